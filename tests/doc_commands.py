"""The commands of README and docs/: found, checked without being run, and run.

A fence tagged `sh` is run, its commands in order, in one folder per page. `# refused` behind a command: exit code 2 is expected. A fence tagged
`text` right after it is an excerpt of what its commands print; a line `...` leaves some out. A fence with a title (`sh title="on the cluster"`) is
checked, not run, except that tools/submit.py is run with --print.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from megadcp.config.check import UserError
from megadcp.config.load import compose
from megadcp.config.run_file import unknown_setting

ROOT = Path(__file__).resolve().parents[1]
OTHERS = "cd cmp docker echo find for git kill mkdocs nsys pip pytest sbatch scancel scontrol srun wandb"
PROGRAMS = {".", *OTHERS.split()}
STARTS = {"python", "torchrun", *PROGRAMS}
PLACEHOLDER = re.compile(r"(?:^|[\s=/:{])(?:[A-Z]{3,}|\.\.\.|my/)|\.\.\.$|^N$|[=/]N\b")
GROUPS = "run|model|data|parallel|plan|precision|optim|checkpoint|log|health|cluster|hardware"
ADDED = re.compile(r"^Tested with `([^`]+)`\s+added", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command as it stands on a page."""

    page: str
    line: int
    text: str
    titled: bool = False
    refused: bool = False

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


@dataclasses.dataclass
class Block:
    """The commands of one fence, and lines that they print."""

    commands: list[Command]
    output: list[str]


def pages() -> list[str]:
    """README and docs/, from the root."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _fences(page: str) -> Iterator[tuple[int, str, str, list[str]]]:
    """(line of the first one inside, language, rest of the header, lines) of every fence."""
    inside: list[str] | None = None
    begin, language, rest = 0, "", ""
    for number, line in enumerate(read(page).splitlines(), start=1):
        header = re.match(r"\s*```\s*(\w*)\s*(.*)$", line)
        if header and inside is None:
            inside, begin, language, rest = [], number + 1, header[1], header[2]
        elif header and inside is not None:
            yield begin, language, rest, inside
            inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{page}: a fence that begins at line {begin} has no end"


def _commands(page: str, begin: int, lines: list[str], titled: bool) -> list[Command]:
    found: list[Command] = []
    at = 0
    while at < len(lines):
        first, text = at, lines[at].strip()
        while text.endswith("\\") and at + 1 < len(lines):
            at += 1
            text = text[:-1].rstrip() + " " + lines[at].strip()
        at += 1
        if text and not text.startswith("#"):
            plain, _, comment = re.match(r"(.*?)(\s{2,}#\s*(.*))?$", text).groups()
            found.append(Command(page, begin + first, plain, titled, (comment or "") == "refused"))
    return found


def blocks(page: str) -> list[Block]:
    """All fences of a page that hold commands. README's carry no tag: there the first word tells."""
    found: list[Block] = []
    follows = False
    for begin, language, rest, lines in _fences(page):
        first = next((line.split()[0] for line in lines if line.strip()), "")
        if language == "sh" or (page == "README.md" and not language and first in STARTS):
            found.append(Block(_commands(page, begin, lines, titled="title=" in rest), []))
            follows = True
            continue
        if language == "text" and follows:
            found[-1].output = [line for line in lines if line.strip() and line.strip() != "..."]
        follows = False
    return found


def untagged(page: str) -> list[str]:
    """Commands in fences that are not tagged as such."""
    return [
        f"{page}:{begin + at}: {line}"
        for begin, language, _, lines in _fences(page)
        if language != "sh" and page != "README.md"
        for at, line in enumerate(lines)
        if re.match(r"\s*(\$ )?(python|torchrun|pip install|sbatch) ", line)
    ]


def spans(page: str) -> list[tuple[int, str]]:
    """(line, text) of code in running text."""
    fenced: set[int] = set()
    for begin, _, _, lines in _fences(page):
        fenced.update(range(begin - 1, begin + len(lines) + 1))
    return [
        (number, span)
        for number, line in enumerate(read(page).splitlines(), start=1)
        if number not in fenced
        for span in re.findall(r"`([^`]+)`", line)
    ]


def runs(command: Command) -> bool:
    """Whether a machine without a GPU and without a cluster can run it, and something is left to see."""
    text = command.text
    if "tools/submit.py" in text:
        return True
    if command.titled or PLACEHOLDER.search(text):
        return False
    if re.match(r"(pip|git|sbatch|docker|pytest|mkdocs|wandb|nsys|scancel|srun|kill)\b", text):
        return False
    return "tools/gpu_check.py" not in text and ("tools/preprocess_array.py" not in text or "--local" in text)


def shape(command: Command) -> tuple[str, frozenset[str]]:
    """(program, names of options and settings): what a command does, whatever the sizes."""
    words = shlex.split(command.text)
    names = {re.split(r"[=\[]", word)[0] for word in words if word.startswith("-") or re.match(r"[\w.]+=", word)}
    at = next((index for index, word in enumerate(words) if word.endswith(".py")), 0)
    return f"{words[at]} {words[at + 1]}" if words[at + 1 : at + 2] in (["what-if"], ["replay"], ["to-hf"], ["from-hf"]) else words[at], frozenset(
        names
    )


# ------------------------------------------------------------------------------------------------------------------ without running
def check(text: str) -> None:
    """AssertionError or UserError where the command names what does not exist."""
    if text.startswith("for "):
        return
    words = shlex.split(text)
    part: list[str] = []
    for word in [*words, ";"]:
        if word in ("&&", "||", "|", ";"):
            if part:
                _check_program(part)
            part = []
        else:
            part.append(word)


def _check_program(words: list[str]) -> None:
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, arguments = words[0], [word for word in words[1:] if word != ">"]
    if program == "torchrun":
        at = next(index for index, word in enumerate(arguments) if word.endswith(".py"))
        program, arguments = "python", arguments[at:]
    if program == "pip":
        known = set(re.findall(r'^    "(\w+)": \[', read("setup.py"), re.MULTILINE)) | {"dev"}
        for extras in re.findall(r"(?:\.|megadcp)\[([\w,]+)\]", " ".join(arguments)):
            assert set(extras.split(",")) <= known, f"extras {extras}; there are {sorted(known)}"
        return
    if program != "python":
        assert program in PROGRAMS, f"{program} is no known program"
        return
    if arguments[0] == "-m":
        assert arguments[1] == "venv" or (ROOT / (arguments[1].replace(".", "/") + ".py")).is_file(), arguments[1]
        return
    assert (ROOT / arguments[0]).is_file(), f"{arguments[0]} does not exist"
    if arguments[0] == "pretrain_gpt.py":
        _check_training(arguments[1:])
    else:
        _check_tool(arguments[0], arguments[1:])


def _check_training(arguments: list[str]) -> None:
    overrides, ahead = [], iter(arguments)
    extra = False
    for word in ahead:
        if word in ("--cfg", "--info", "--config-dir"):
            extra = extra or word == "--config-dir"
            next(ahead)
        elif word.startswith("-"):
            assert word in ("-m", "--multirun", "--resolve", "--help", "--hydra-help"), f"{word} is no option"
        else:
            overrides.append(word)
    check_settings([one for one in overrides if not (extra and one.startswith("experiment="))])


def check_settings(overrides: list[str]) -> None:
    """Compose them; of a sweep the first job."""
    own = [re.sub(r"^([\w.]+=[^\[{'\",]+),.*", r"\1", one) for one in overrides if not one.startswith(("hydra.", "hydra/"))]
    compose(own)


@cache
def _source(tool: str) -> str:
    path = ROOT / tool
    return "\n".join(each.read_text(encoding="utf-8") for each in [path, *path.parent.glob(f"{path.stem}_*.py")])


def _check_tool(tool: str, arguments: list[str]) -> None:
    source = _source(tool)
    overrides = []
    for word in arguments:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert f'"{option}"' in source or option in ("--help", "-h"), f"{tool} has no option {option}"
        elif match := re.match(r"\+{0,2}([\w.]+(?:\[\d+\])?(?:\.\w+)*)=", word):
            if re.search(rf'^    "{re.escape(match[1])}": ', source, re.MULTILINE):
                continue
            overrides.append(word)
    if overrides and "what-if" not in arguments:
        longer = ["data.max_length=1024", "data.tokens_per_step=1099511627776"] if tool == "tools/plan.py" else []
        given = {one.partition("=")[0] for one in overrides}
        check_settings(
            [*(one for one in longer if one.partition("=")[0] not in given and "experiment" not in given), "run.sample_prompt=''", *overrides]
        )
        return
    for one in overrides:
        check_name(one.lstrip("+").partition("=")[0])


def check_name(key: str) -> None:
    """A setting, or a group of configs/."""
    if "." not in key:
        assert (ROOT / "configs" / key).is_dir(), f"there is no group {key}"
    elif problem := unknown_setting(key):
        raise UserError(problem)
