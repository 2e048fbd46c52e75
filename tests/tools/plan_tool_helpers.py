"""Calls of tools/plan.py, and what to look for in what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megadcp.plan.step_plan import document_hash

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = [70000, 9000, 4100, 4000, 350, 350, 120, 64, 2000, 1999, 17, 1, 30000, 800, 12000, 640]
H200 = ["model=gpt_1b", "cluster=h200_4x8", "cluster.nodes=1", "precision=bf16"]  # eight lanes
QUICK = ["baselines=false"]


class Call:
    """Calls of the tool in a folder of their own."""

    def __init__(self, tool: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.tool, self.folder, self.capsys = tool, folder, capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = self.tool.main(list(argv))
        said = self.capsys.readouterr()
        return code, said.out, said.err

    def good(self, *argv: str) -> str:
        code, out, err = self(*argv)
        assert (code, err) == (0, ""), err
        return out

    def refused(self, *argv: str, code: int = 2) -> str:
        before = sorted(self.folder.rglob("*"))
        found, out, err = self(*argv)
        assert (found, out) == (code, ""), err
        assert re.fullmatch(r"error: [^\n]+\n", err), err
        assert sorted(self.folder.rglob("*")) == before  # nothing was written
        return err

    def plan(self, lengths: Any = LENGTHS, *more: str, name: str = "plan.json") -> Path:
        """A plan file of these lengths."""
        self.good(*H200, *QUICK, f"lengths={self.lengths(lengths)}", f"out={self.folder / name}", *more)
        return self.folder / name

    def lengths(self, value: Any) -> Path:
        path = self.folder / "lengths.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path


def number(out: str, pattern: str) -> float:
    """The number in the group of a pattern that must be in the output."""
    found = re.search(pattern, out, re.MULTILINE)
    assert found, f"{pattern} in\n{out}"
    return float(found.group(1).replace(",", ""))


def words(out: str, word: str) -> list[str]:
    """What stands under a word of the report."""
    lines = iter(out.splitlines())
    for line in lines:
        if line[:13].strip() == word:
            found = [line[13:]]
            for more in lines:
                if not more.startswith(" " * 13):
                    return found
                found.append(more[13:])
            return found
    raise AssertionError(f"no {word!r} in\n{out}")


def changed(path: Path, change: Any, rehash: bool = True) -> None:
    document = json.loads(path.read_text())
    change(document)
    if rehash:
        document["hash"] = document_hash(document)
    path.write_text(json.dumps(document))


def set_first(**fields: Any) -> Any:
    return lambda document: document["microbatches"][0].update(fields)
