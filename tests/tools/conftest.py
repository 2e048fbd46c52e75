from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from plan_tool_helpers import ROOT, Call


@pytest.fixture
def plan_tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    names = ("plan", "plan_files", "plan_settings")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("plan")
    for name in names:  # the fixture's end takes them out again
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return module


@pytest.fixture
def call(plan_tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    return Call(plan_tool, tmp_path, capsys)
