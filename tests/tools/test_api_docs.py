"""docs/api.md: as the code has it, and its example as a reader runs it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def api_docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "api_docs", raising=False)
    return importlib.import_module("api_docs")


def test_the_page_is_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "api_docs.py"), "--check"], check=True)


def test_a_changed_docstring_is_noticed(
    api_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "api.md"
    old.write_text(api_docs.page().replace("every invariant", "some invariants", 1) + "x", encoding="utf-8")
    monkeypatch.setattr(api_docs, "PAGE", old)
    monkeypatch.setattr(sys, "argv", ["api_docs.py", "--check"])
    assert api_docs.main() == 1
    assert "out of date" in capsys.readouterr().out


def test_a_name_that_is_gone_is_noticed(api_docs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_docs, "PARTS", (("Verify", "", (("plan/verify.py", ("verifies",)),)),))
    with pytest.raises(SystemExit, match=r"megadcp\.plan\.verify\.verifies, which is not there"):
        api_docs.page()


def test_every_entry_says_something(api_docs: ModuleType) -> None:
    """No public name without a docstring."""
    blocks = re.split(r"^```python\n", api_docs.page(), flags=re.MULTILINE)[2:]  # before the first one, and the example
    bare = [block.splitlines()[0] for block in blocks if not block.split("```")[1].split("\n#")[0].strip()]
    assert bare == []
    assert len(blocks) > 60


def test_the_example_runs(api_docs: ModuleType) -> None:
    code = api_docs.HEAD.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.match(r"[\d.e-]+ \[\(0, \d+, \(", done.stdout)
