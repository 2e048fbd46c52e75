"""A corpus that every Python has: the source files of its own library, topped up from installed packages. Nothing is downloaded.

Files from a few bytes to some hundred kilobytes, real text with a long tail. Which files, and their order, are a pure function of
what is installed: names in path order decide what is taken, a hash of the name decides the place in the corpus, so that the last
documents (the held-out ones) are no particular corner of the library.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Test suites are long, odd and not what people write; site-packages below the library is the second source, not the first.
LEFT_OUT = frozenset(("test", "tests", "testing", "idle_test", "__pycache__", "site-packages", "dist-packages"))
PART_BYTES = 4_000_000  # text of one corpus file


@dataclass
class Collected:
    """Documents as (source, text), in corpus order, and what was passed over."""

    documents: list[tuple[str, str]] = field(default_factory=list)
    bytes: int = 0
    from_library: int = 0
    from_packages: int = 0
    not_utf8: int = 0
    empty: int = 0
    duplicates: int = 0
    unreadable: int = 0

    def skipped(self) -> str:
        """What was passed over and why, in words; '' when nothing was."""
        counts = {"duplicates": self.duplicates, "empty": self.empty, "not UTF-8": self.not_utf8, "unreadable": self.unreadable}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def library_folders() -> list[Path]:
    """Where this Python's own library lies (in a venv: the library of the Python that made it)."""
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)]
    return _folders(paths)


def package_folders() -> list[Path]:
    """Where installed packages lie: the environment's own folder first, then those of the Python below it."""
    paths: list[str] = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    paths += [path for path in sys.path if os.path.basename(path.rstrip("/\\")) in ("site-packages", "dist-packages")]
    return _folders(paths)


def _folders(paths: Sequence[str | None]) -> list[Path]:
    """The existing ones, each once."""
    real = dict.fromkeys(os.path.realpath(path) for path in paths if path)
    return [Path(path) for path in real if os.path.isdir(path)]


def source_files(folder: Path) -> Iterator[tuple[str, str]]:
    """(name relative to the folder with forward slashes, full path) of its *.py files, in path order, without test suites."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name.lower() not in LEFT_OUT]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                found.append((os.path.relpath(path, folder).replace(os.sep, "/"), path))
    yield from sorted(found, key=lambda item: item[0].split("/"))


def collect(corpus_bytes: int, library: Sequence[Path] | None = None, packages: Sequence[Path] | None = None) -> Collected:
    """Take files until their text reaches `corpus_bytes` (bytes of UTF-8) or there are no more. A file counts once, by path and content."""
    result = Collected()
    paths: set[str] = set()
    contents: set[bytes] = set()
    sources = [("library", folder) for folder in (library_folders() if library is None else library)]
    sources += [("packages", folder) for folder in (package_folders() if packages is None else packages)]
    for kind, folder in sources:
        for name, path in source_files(folder):
            if result.bytes >= corpus_bytes:
                break
            _take(result, kind, name, path, (paths, contents))
    result.documents.sort(key=lambda document: (hashlib.sha256(document[0].encode("utf-8", "surrogateescape")).digest(), document[0]))
    return result


def _take(result: Collected, kind: str, name: str, path: str, known: tuple[set[str], set[bytes]]) -> None:
    paths, contents = known
    real = os.path.realpath(path)
    if real in paths:
        result.duplicates += 1
        return
    paths.add(real)
    try:
        raw = Path(real).read_bytes()
    except OSError:
        result.unreadable += 1
        return
    try:
        text = raw.decode("utf-8")
        name.encode("utf-8")  # a name outside UTF-8 can't be written down either
    except (UnicodeDecodeError, UnicodeEncodeError):
        result.not_utf8 += 1
        return
    digest = hashlib.sha256(raw).digest()
    if not text.strip():
        result.empty += 1
    elif digest in contents:
        result.duplicates += 1
    else:
        contents.add(digest)
        result.documents.append((f"{kind}/{name}", text))
        result.bytes += len(raw)
        if kind == "library":
            result.from_library += 1
        else:
            result.from_packages += 1


def write_corpus(collected: Collected, folder: Path) -> None:
    """Write part-00000.jsonl and following, one {"text", "source"} a line. The folder must be new: it is written as it goes."""
    folder.mkdir(parents=True)
    part, filled, file = 0, PART_BYTES, None
    try:
        for source, text in collected.documents:
            if filled >= PART_BYTES:
                if file is not None:
                    file.close()
                file = open(folder / f"part-{part:05d}.jsonl", "w", encoding="utf-8", newline="\n")  # noqa: SIM115 - closed below
                part, filled = part + 1, 0
            file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")  # type: ignore[union-attr]
            filled += len(text)
    finally:
        if file is not None:
            file.close()
