"""The example: how many lines differ from the plain loop, and that both train the same."""

import difflib
import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from any_helpers import HARDWARE
from ranks import run_ranks

from megadcp.interop.any_model import Options, Steps

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed_lines(plain: str, planned: str) -> list[str]:
    """Lines of `planned` that `plain` hasn't, in order: added or changed."""
    return [line[2:] for line in difflib.ndiff(plain.splitlines(), planned.splitlines()) if line.startswith("+ ")]


def test_at_most_ten_lines_differ() -> None:
    plain, planned = ((EXAMPLES / f"{name}.py").read_text(encoding="utf-8") for name in ("plain_llama", "ten_lines_llama"))
    changed = changed_lines(plain, planned)
    assert len(changed) <= 10, "\n".join(changed)
    assert sum("Steps(" in line for line in changed) == 1
    removed = changed_lines(planned, plain)
    assert len(removed) <= len(changed)


def test_changed_lines_are_counted() -> None:
    assert changed_lines("a\nb\nc", "a\n  b\nc\nd") == ["  b", "d"]


def small(module: ModuleType, count: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    return module.make_model(), [each[:120] for each in module.make_documents(count)]


def planned_on_rank(rank: int, world: int, count: int, batch_size: int) -> tuple[list[float], dict]:
    module = load("ten_lines_llama")
    module.Steps = partial(Steps, options=Options(hardware=HARDWARE))
    model, documents = small(module, count)
    losses = module.train(model, documents, batch_size)
    return losses, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("count", [16, pytest.param(96, marks=pytest.mark.slow)])
def test_both_loops_train_the_same(count: int) -> None:
    module = load("plain_llama")
    model, documents = small(module, count)
    losses = module.train(model, documents, 8)
    found = run_ranks(4, planned_on_rank, count, 8, timeout_s=120)
    for planned_losses, weights in found:
        assert planned_losses == pytest.approx(losses, rel=1e-4)
        assert all(torch.equal(each, found[0][1][name]) for name, each in weights.items())
    assert losses[-1] < losses[0]
