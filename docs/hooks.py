"""What the site adds to mkdocs: all pages of benchmarks/ are part of it, and links to the repository's other files become text.

Pages are written to be read in the repository, where `../benchmarks/README.md` and `../docker` lead somewhere. On the site the first is a page;
the second is not there, so the link's text stays and the link goes.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
INCLUDED = "benchmarks"
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that the nav does not name stand at the end of Reference, or of Measured."""
    parts = {name: part for one in config.nav or [] for name, part in one.items() if isinstance(part, list)}
    named = re.findall(r"[\w/]+\.md", str(config.nav))
    for part, pages in (("Reference", sorted(path.name for path in (ROOT / "docs").glob("*.md"))), ("Measured", _included())):
        parts[part] += [page for page in pages if page not in named]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in what benchmarks/ says."""
    for page in _included():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    return files


def _included() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / INCLUDED).rglob("*.md"))


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their target is on the site, or take them out."""
    source = page.file.src_uri
    here = os.path.dirname(source if source.startswith(f"{INCLUDED}/") else f"docs/{source}")

    def lead(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, _, anchor = target.partition("#")
        place = os.path.normpath(os.path.join(here, path))
        on_site = place.removeprefix("docs/")
        if files.get_file_from_path(on_site) is None:
            return text if (ROOT / place).exists() else found[0]  # mkdocs names what does not exist at all
        away = os.path.relpath(on_site, os.path.dirname(source) or ".")
        return f"[{text}]({away}{'#' + anchor if anchor else ''})"

    return LINK.sub(lead, markdown)
