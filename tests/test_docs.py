"""README and docs/ tell the truth: the site builds, every command exists, every error line is one that the program says.

Marked slow: commands that need neither a GPU nor a cluster are run as they stand on their page. 3 minutes on a quiet core.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from doc_commands import (
    ADDED,
    GROUPS,
    PLACEHOLDER,
    ROOT,
    Command,
    blocks,
    check,
    check_name,
    check_settings,
    pages,
    read,
    runs,
    shape,
    spans,
    untagged,
)

from megadcp.config.check import UserError

COMMANDS = [command for page in pages() for block in blocks(page) for command in block.commands]
NOT_THERE = ("configs/hardware/mine.yaml", "benchmarks/gpu")  # yours to make
IN_TEXT = [Command(page, line, text) for page in pages() for line, text in spans(page)]


# ------------------------------------------------------------------------------------------------------------------------ the site
def build(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip('mkdocs-material is not installed: pip install -e ".[docs]"')
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder / "site"), *more],
        cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


def test_site_builds(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    for page in pages()[1:]:
        assert (site / Path(page).name.replace(".md", ".html")).is_file(), page
    assert (site / "benchmarks" / "index.html").is_file()
    assert not (site / "hooks.py").exists()
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        asked = re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(https?:[^"]+)"', text)
        assert not asked, f"{path.name} asks {asked[0]}"


@pytest.mark.parametrize(
    "wrong", ["[nowhere](nowhere.md)", "[no such part](plan.md#no-such-part)", "![none](pictures/none.svg)", "[gone](../gone.md)"]
)
def test_site_refuses(wrong: str, tmp_path: Path) -> None:
    for name in ("docs", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with open(tmp_path / "docs" / "index.md", "a", encoding="utf-8") as file:
        file.write(f"\n{wrong}\n")
    done = build(tmp_path, "-f", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert wrong.rpartition("(")[2].rstrip(")").removeprefix("../") in done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------------------------ commands
def test_there_are_commands() -> None:
    assert len(COMMANDS) > 60
    assert sum(map(runs, COMMANDS)) > 40


def test_every_command_is_tagged() -> None:
    assert [line for page in pages() for line in untagged(page)] == []


def test_every_command_exists() -> None:
    faults = []
    for command in [*COMMANDS, *(one for one in IN_TEXT if re.match(r"(python \S+\.py|torchrun|pip install) ", one.text))]:
        if command.refused:
            continue
        try:
            check(command.text)
        except (AssertionError, UserError, ValueError) as error:
            faults.append(f"{command.where}\n    {error}")
    assert not faults, "\n".join(faults)


def test_readme_commands_are_run_on_a_page() -> None:
    """With the same options and settings, or more of them; README's sizes are a user's, a page's are a test's."""
    on_pages = [shape(one) for one in COMMANDS if one.page != "README.md" and runs(one)]
    faults = []
    for one in COMMANDS:
        if one.page != "README.md" or not runs(one) or not re.match(r"(python|torchrun) ", one.text):
            continue
        program, names = shape(one)
        if not any(program == other and names - {"--help"} <= given for other, given in on_pages):
            faults.append(one.where)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "wrong",
    [
        "python tools/plam.py replay runs/x",
        "python tools/generate.py runs/x --promt hello",
        "python tools/plan.py preset=web modell=gpt_8b",
        "python tools/plan.py what-if runs/x parallel.tpp=2",
        "python pretrain_gpt.py optim.rate=1",
        "python pretrain_gpt.py model=gpt_9b",
        "python pretrain_gpt.py --config job",
        "torchrun --nproc-per-node 2 pretrain_gpt.py cluster.processes=2 parallel.tp=3",
        'pip install "megadcp[everything]"',
        "pyhton pretrain_gpt.py",
    ],
)
def test_wrong_commands_are_noticed(wrong: str) -> None:
    with pytest.raises((AssertionError, UserError)):
        check(wrong)


def test_settings_in_text_exist() -> None:
    """`group.name`, `group.name=value` and `group=name` in running text."""
    faults = []
    for one in IN_TEXT:
        for word in one.text.split() if one.text.count("=") > 1 else [one.text]:
            match = re.fullmatch(rf"({GROUPS}|experiment)((?:\.\w+)*)(=.*)?", word)
            if not match or match[0] == match[1] or re.search(r"\.(md|py|json|jsonl|yaml|svg|safetensors|zst|bin|idx|\d+)\b", match[2]):
                continue
            try:
                if match[2]:
                    check_name((match[1] + match[2]).rstrip("_*"))
                elif match[3] and not PLACEHOLDER.search(word) and word != "hardware=mine":
                    assert (ROOT / "configs" / match[1] / f"{match[3][1:]}.yaml").is_file(), f"no configs/{match[1]}/{match[3][1:]}.yaml"
            except (AssertionError, UserError) as error:
                faults.append(f"{one.where}: {error}")
    assert not faults, "\n".join(faults)


def test_files_in_text_exist() -> None:
    known = [
        path.relative_to(ROOT).as_posix()
        for folder in ("megadcp", "tools", "tests", "configs", "docs", "docker", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*")
    ]
    known += [path.name for path in ROOT.iterdir()]
    faults = []
    for one in IN_TEXT:
        if re.fullmatch(r"[\w./-]+\.py", one.text) or re.fullmatch(
            r"(megadcp|tools|tests|configs|docs|docker|benchmarks|examples)/[\w./-]+", one.text
        ):
            name = one.text.rstrip("/")
            if name not in NOT_THERE and not PLACEHOLDER.search(name) and not any(path == name or path.endswith(f"/{name}") for path in known):
                faults.append(one.where)
    assert not faults, "\n".join(faults)


# -------------------------------------------------------------------------------------------------------------------------- errors
@cache
def templates() -> list[str]:
    """All texts of the program, with `<>` where a value goes."""
    found = []
    for path in [*(ROOT / "megadcp").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def error_lines() -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", read("docs/errors.md"), re.MULTILINE)


def is_said(line: str) -> bool:
    wanted = re.sub(r"<[^>]*>", "<>", line)
    return any(wanted.strip("<>") in template for template in templates())


def test_error_lines_are_those_of_the_program() -> None:
    assert len(error_lines()) > 40
    assert [line for line in error_lines() if not is_said(line)] == []
    assert not is_said("parallel.tp=<3> does not fit model.<heads>=<16>; legal here: <1>")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("model.layer=6", "is not a setting"),
        ("data.train=[{prefix: a},{prefix: b,weight: 0}]", "takes no share of the blend"),
        ("cluster.processes=4 parallel.tp=3", "does not divide model."),
        ("cluster.processes=4 parallel.tp=2 parallel.pp=4", "does not divide cluster.nodes="),
        ("run.steps=8", "is longer than run.steps="),
        ("model.attention_dropout=0.1", "can't be had: "),
        ("data.max_length=131072", "can't hold a document of data.max_length="),
    ],
)
def test_errors_as_they_come(overrides: str, line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        check_settings(overrides.split() if "{" not in overrides else [overrides])


# ------------------------------------------------------------------------------------------------------------------ marked slow: run
WRAPPER = """#!/bin/bash
# Adds what the page says is added, unless the command sets it itself, or trains nothing.
added=()
for word in "$@"; do
    if [[ $word == *pretrain_gpt.py ]]; then trains=yes; fi
    if [[ $word == --cfg || $word == --help || $word == --info ]]; then shows=yes; fi
done
if [ "$trains$shows" == yes ]; then
    for one in $ADDED; do
        own=
        for word in "$@"; do if [[ $word == "${one%%=*}="* ]]; then own=yes; fi; done
        if [ -z "$own" ]; then added+=("$one"); fi
    done
fi
exec PROGRAM "$@" "${added[@]}"
"""
FIRST = "docs/first_run.md"
RUN = [
    FIRST,
    *(page for page in pages() if page not in (FIRST, "README.md") and any(runs(command) for block in blocks(page) for command in block.commands)),
]
LIMIT_SECONDS = 300  # of one command


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name, program in (("python", sys.executable), ("torchrun", f"{sys.executable} -m torch.distributed.run")):
        (folder / name).write_text(WRAPPER.replace("PROGRAM", program), encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def checkout(folder: Path) -> Path:
    """A folder in which pages can be followed: the repository's files, and its own docs/pictures and configs."""
    folder.mkdir(exist_ok=True)
    for name in ("tools", "megadcp", "benchmarks", "docker", "examples", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "docs" / "pictures").mkdir(parents=True)
    return folder


def follow(page: str, folder: Path, programs: Path) -> None:
    """Run the page's commands in the folder."""
    added = ADDED.search(read(page))
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "ADDED": added[1] if added else "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    for block in blocks(page):
        said = ""
        for command in filter(runs, block.commands):
            text = command.text
            if "tools/submit.py" in text and "--print" not in text:
                text += " --print"
            begin = time.monotonic()
            done = subprocess.run(
                ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
            print(f"{time.monotonic() - begin:5.1f} s  {command.where}")
            said += done.stdout + done.stderr
            assert done.returncode == (2 if command.refused else 0), f"{command.where}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
        plain = [" ".join(line.split()) for line in said.splitlines()]
        for line in block.output:
            assert " ".join(line.split()) in plain, f"{page}: this line was not printed:\n{line}\nBut:\n{said}"


@pytest.fixture(scope="module")
def after_first_run(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first page leaves: most others begin there."""
    folder = checkout(tmp_path_factory.mktemp("docs") / "first_run")
    follow(FIRST, folder, programs)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_run(page: str, after_first_run: Path, programs: Path, tmp_path: Path) -> None:
    if page == FIRST:
        assert (after_first_run / "runs" / "quickstart" / "result.json").is_file()
        return
    folder = checkout(tmp_path / "clone")
    for name in ("runs/quickstart", "datasets"):
        shutil.copytree(after_first_run / name, folder / name)
    follow(page, folder, programs)
    for made in (folder / "docs" / "pictures").iterdir():
        kept = ROOT / "docs" / "pictures" / made.name
        assert made.read_bytes() == kept.read_bytes(), f"docs/pictures/{made.name} is not what the command on {page} makes; make it again"


def test_every_picture_is_made_and_shown() -> None:
    kept = {path.name for path in (ROOT / "docs" / "pictures").iterdir()} - {"gain.svg"}  # the README's, by tools/evidence.py chart
    made = {name for command in COMMANDS for name in re.findall(r"docs/pictures/(\S+\.svg)", command.text) if runs(command)}
    shown = {name for page in pages() for name in re.findall(r"\]\(pictures/([\w.]+)\)", read(page))}
    assert kept == made == shown
