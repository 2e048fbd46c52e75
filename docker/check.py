"""Does every file and command that the Dockerfiles use exist? `python docker/check.py [DOCKERFILE ...]`; exit code 1 and one line each if not.

No engine is needed: the files are read, and what each COPY would put where is followed through the stages. Checked are
- that a base is pinned by a tag other than latest, or is an earlier stage;
- that what COPY takes is in the repository and .dockerignore leaves it in; COPY --from and --mount name an earlier stage;
- that scripts in RUN, CMD and ENTRYPOINT, and paths inside the project's folder of the image, are there at that point;
- that extras in `pip install .[..]` are in setup.py;
- that the last user is not root.
Needs the standard library only. hadolint looks at the rest.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "/opt/megadcp"  # the project's folder in the images
SCRIPT = re.compile(r"[\w./-]+\.(?:py|sh|conf|yaml)")


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continued lines put together."""

    line: int
    name: str
    value: str


@dataclass(frozen=True)
class Stage:
    """What is known of an image while it is built: files that came from the repository, by their place in the image."""

    name: str = ""
    folder: str = "/"
    user: str = "root"
    files: dict[str, str] = field(default_factory=dict)

    def place(self, path: str) -> str:
        """The absolute path in the image."""
        return _normal(path if path.startswith("/") else f"{self.folder}/{path}")


def instructions(text: str) -> Iterator[Instruction]:
    """The instructions of a Dockerfile; comments and blank lines between continued lines are dropped, as the builder does."""
    parts: list[str] = []
    begin = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and parts) or not (line.strip() or parts):
            continue
        begin = begin if parts else number
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            name, _, value = " ".join(part.strip() for part in parts).partition(" ")
            yield Instruction(begin, name.upper(), value.strip())
            parts = []


class Checker:
    """Follows one Dockerfile; `problems` has a line for each fault."""

    def __init__(self, dockerfile: Path, root: Path = ROOT) -> None:
        self.path, self.root = dockerfile, root
        self.problems: list[str] = []
        self.stages: dict[str, Stage] = {}
        self.stage = Stage()
        self.ignored = [line.strip() for line in _lines(root / ".dockerignore") if line.strip() and not line.startswith("#")]

    def run(self) -> list[str]:
        """Every fault, in the order of the file."""
        found = list(instructions(self.path.read_text(encoding="utf-8")))
        if not any(each.name == "FROM" for each in found):
            self.problems.append(f"{self.path.name}: no FROM, so it is no Dockerfile")
        for each in found:
            method = getattr(self, f"_{each.name.lower()}", None)
            if method:
                method(each)
        if self.stage.user in ("root", "0"):
            self.problems.append(f"{self.path.name}: the image's user is root; end with USER and a number above 0")
        return self.problems

    def _wrong(self, at: Instruction, text: str) -> None:
        self.problems.append(f"{self.path.name}:{at.line}: {text}")

    # ------------------------------------------------------------------------------------------------------- one instruction each
    def _from(self, at: Instruction) -> None:
        words = [word for word in at.value.split() if not word.startswith("--")]
        image = words[0]
        name = words[2] if len(words) == 3 and words[1].lower() == "as" else f"stage {len(self.stages)}"
        if image in self.stages:
            self.stage = replace(self.stages[image], name=name, files=dict(self.stages[image].files))
        else:
            self.stage = Stage(name)
            tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
            if not tag or tag == "latest":
                self._wrong(at, f"{image} is not pinned; name a tag other than latest")
        self.stages[name] = self.stage

    def _workdir(self, at: Instruction) -> None:
        self._now(replace(self.stage, folder=self.stage.place(at.value)))

    def _user(self, at: Instruction) -> None:
        self._now(replace(self.stage, user=at.value.partition(":")[0]))

    def _now(self, stage: Stage) -> None:
        self.stage = self.stages[stage.name] = stage

    def _copy(self, at: Instruction) -> None:
        words = shlex.split(at.value)
        options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        if "from" in options:
            self._earlier(at, options["from"])
            return
        place = self.stage.place(target)
        into = target.endswith("/") or len(sources) > 1 or target in (".", "./")
        for source in sources:
            taken = list(self._taken(source))
            if not taken:
                self._wrong(at, f"COPY {source}: {'kept out by .dockerignore' if (self.root / source).exists() else 'not in the repository'}")
            for name in taken:
                inner = PurePosixPath(name).relative_to(source).as_posix() if (self.root / source).is_dir() else ""
                base = f"{place}/{PurePosixPath(source).name}" if into and not inner else place
                self.stage.files[_normal(f"{base}/{inner}" if inner else base)] = name

    _add = _copy

    def _run(self, at: Instruction) -> None:
        for source in re.findall(r"--mount=\S*\bfrom=([^,\s]+)", at.value):
            self._earlier(at, source)
        self._commands(at, re.sub(r"--mount=\S+", "", at.value))

    def _cmd(self, at: Instruction) -> None:
        self._commands(at, " ".join(json.loads(at.value)) if at.value.startswith("[") else at.value)

    _entrypoint = _cmd

    # --------------------------------------------------------------------------------------------------------------- helpers
    def _earlier(self, at: Instruction, name: str) -> None:
        if name not in list(self.stages)[:-1]:
            self._wrong(at, f"--from={name}: no earlier stage has this name")

    def _commands(self, at: Instruction, text: str) -> None:
        """Scripts and project paths in a shell command, or in the words of an exec form."""
        for word in shlex.split(text):
            inside = word.startswith((f"{PROJECT}/", "./")) or (SCRIPT.fullmatch(word) and not word.startswith("/"))
            place = self.stage.place(word)
            if inside and place not in self.stage.files and not any(each.startswith(f"{place}/") for each in self.stage.files):
                self._wrong(at, f"{word}: not in the image at this point ({place})")
            extras = re.fullmatch(r"\.\[([\w,-]+)\]", word)
            for extra in extras.group(1).split(",") if extras else ():
                if extra not in _extras(self.root):
                    self._wrong(at, f"{word}: setup.py has no extra {extra}; legal here: {', '.join(_extras(self.root))}")

    def _taken(self, source: str) -> Iterator[str]:
        """Files of the repository that a COPY of `source` takes."""
        start = self.root / source
        paths = [start] if start.is_file() else sorted(start.rglob("*")) if start.is_dir() else []
        for path in paths:
            name = path.relative_to(self.root).as_posix()
            if path.is_file() and not self._ignores(name):
                yield name

    def _ignores(self, name: str) -> bool:
        parts = PurePosixPath(name).parts
        for pattern in self.ignored:
            anywhere = pattern.startswith("**/")
            for end in range(1, len(parts) + 1):
                whole = "/".join(parts[:end])
                if fnmatch(whole, pattern) or (anywhere and fnmatch(parts[end - 1], pattern[3:])):
                    return True
        return False


def _normal(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return "/" + "/".join(parts)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _extras(root: Path) -> list[str]:
    """Extras of setup.py, by running it with a setup() that only tells them."""
    code = "import json, setuptools\nsetuptools.setup = lambda **values: print(json.dumps(sorted(values['extras_require'])))\n"
    run = "__file__ = 'setup.py'\nexec(compile(open('setup.py', encoding='utf-8').read(), 'setup.py', 'exec'))"
    done = subprocess.run([sys.executable, "-c", code + run], cwd=root, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def main(argv: Sequence[str]) -> int:
    """Exit code of one call."""
    if any(word.startswith("-") for word in argv):
        print(__doc__)
        return 0
    paths = [Path(word) for word in argv] or sorted((ROOT / "docker").glob("Dockerfile*"))
    problems = [problem for path in paths for problem in Checker(path).run()]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"every file and command exists: {', '.join(path.name for path in paths)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
