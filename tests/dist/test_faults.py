"""What happens to the other ranks when one fails: every process ends non-zero in bounded time, and nobody runs a plan that another doesn't have.

These ranks are processes of their own that end when they fail, as a launcher's do; nobody ends them from outside.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import CPU, MODEL, Case, make_engine, packs_of, random_plan
from ranks import run_ranks
from torch import Tensor

from megadcp.engine.agree import PlanMismatch
from megadcp.engine.step import Engine, run_step
from megadcp.mesh.groups import GroupPool
from megadcp.plan.step_plan import Recompute
from megadcp.plan.verify import PlanError

LIMIT_SECONDS = 30.0
CASE = Case(lanes=2, tp=1, stage_layers=(2, 2), model=replace(MODEL, tied=True), seed=1)
WIDE = Case(lanes=4, seed=2)
CULPRIT = 2


@dataclass
class Ended:
    """Of one rank: exit code and what it said."""

    code: int
    text: str
    seconds: float


def let_end(world: int, function: Callable[[int, int], None], timeout_s: float = 20.0) -> list[Ended]:
    """function(rank, world) in processes that end by themselves: 0, or 1 after an exception. Those still there at the limit: code -9, with stacks."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        begin = time.monotonic()
        ids = [_start(rank, world, Path(folder), function, timeout_s) for rank in range(world)]
        codes: dict[int, tuple[int, float]] = {}
        while len(codes) < world and time.monotonic() - begin < LIMIT_SECONDS:
            for rank, process in enumerate(ids):
                if rank not in codes and os.waitpid(process, os.WNOHANG) != (0, 0):
                    codes[rank] = _code(Path(folder) / f"code-{rank}"), time.monotonic() - begin
            time.sleep(0.02)
        for rank, process in enumerate(ids):
            if rank not in codes:
                os.kill(process, signal.SIGUSR1)
                time.sleep(0.3)
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                codes[rank] = -9, time.monotonic() - begin
        return [Ended(codes[rank][0], (Path(folder) / f"said-{rank}").read_text(), codes[rank][1]) for rank in range(world)]


def _code(file: Path) -> int:
    return int(file.read_text()) if file.exists() else -1


def _start(rank: int, world: int, folder: Path, function: Callable[[int, int], None], timeout_s: float) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)
        with open(folder / f"said-{rank}", "w", encoding="utf-8") as said:
            faulthandler.register(signal.SIGUSR1, said)
            try:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                store = dist.FileStore(str(folder / "store"), world)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
                function(rank, world)
                code = 0
            except BaseException:
                said.write(traceback.format_exc())
                said.flush()
            (folder / f"code-{rank}").write_text(str(code))
    finally:
        os._exit(code)


class Broken(RuntimeError):
    """What is thrown in."""


def two_steps(rank: int, case: Case, spoil: Callable[[Engine], None], timeout_s: float = 20.0) -> None:
    with GroupPool(case.mesh, rank, CPU, timeout_s=timeout_s) as pool:
        one, plan = make_engine(case, rank, pool), random_plan(case, 1)
        packs = packs_of(case, plan, pool.coords.lane)
        run_step(one, plan, packs, 0.1)
        if rank == CULPRIT:
            spoil(one)
        run_step(one, plan, packs, 0.1)
        run_step(one, plan, packs, 0.1)  # a fault at the very end of a step meets the others in the next


def in_forward(one: Engine) -> None:
    def hook(module: Any, inputs: Any) -> None:
        raise Broken("in the forward")

    next(reversed(one.model.layers.values())).register_forward_pre_hook(hook)  # type: ignore[union-attr, operator, call-overload]


def in_backward(one: Engine) -> None:
    def hook(gradient: Tensor) -> None:
        raise Broken("in the backward")

    next(iter(one.model.layers.values())).mlp.down.weight.register_hook(hook)  # type: ignore[union-attr, operator]


def in_optimizer(one: Engine) -> None:
    class Failing:
        def step(self, lr: float) -> None:
            raise Broken("in the optimizer")

    one.optimizer = Failing()


@pytest.mark.parametrize("case", [CASE, WIDE], ids=["2 lanes of pp 2", "4 lanes"])
@pytest.mark.parametrize("spoil", [in_forward, in_backward, in_optimizer])
def test_a_rank_that_raises_ends_all(case: Case, spoil: Callable[[Engine], None]) -> None:
    ended = let_end(4, lambda rank, world: two_steps(rank, case, spoil))
    assert [one.code for one in ended] == [1, 1, 1, 1], "\n".join(one.text for one in ended)
    assert "Broken: in the" in ended[CULPRIT].text
    assert all("Broken" not in one.text for rank, one in enumerate(ended) if rank != CULPRIT)
    assert all(one.seconds < LIMIT_SECONDS for one in ended)


def test_a_rank_that_dies_without_a_word_ends_all() -> None:
    def die(one: Engine) -> None:
        os._exit(9)

    ended = let_end(4, lambda rank, world: two_steps(rank, CASE, die))
    assert [one.code for one in ended] == [1, 1, -1, 1], "\n".join(one.text for one in ended)


def test_a_slow_rank_ends_all_when_the_time_is_up() -> None:
    """One rank sleeps in its forward for longer than collectives may take: the others give up, and it finds nobody when it wakes up."""

    def sleep(one: Engine) -> None:
        next(iter(one.model.layers.values())).register_forward_pre_hook(lambda module, inputs: time.sleep(5))  # type: ignore[union-attr, operator]

    ended = let_end(4, lambda rank, world: two_steps(rank, CASE, sleep, timeout_s=2.0), timeout_s=2.0)
    assert [one.code for one in ended] == [1, 1, 1, 1], "\n".join(one.text for one in ended)
    assert any("imed out" in one.text or "imeout" in one.text for one in ended)


# ----------------------------------------------------------------------------------------------------------------- plans
def other_plan(rank: int, world: int, how: str) -> tuple[str, str, bool]:
    """(kind of error, its message, whether anything has run) on each rank, when rank 2's plan is not the others'."""
    case = CASE
    with GroupPool(case.mesh, rank, CPU) as pool:
        one, plan = make_engine(case, rank, pool), random_plan(case, 1)
        packs, ran = packs_of(case, plan, pool.coords.lane), []
        one.model.register_forward_pre_hook(lambda module, inputs: ran.append(1))
        if rank == CULPRIT and how == "legal":
            plan = replace(plan, profile=replace(plan.profile, memory_bytes=2 * plan.profile.memory_bytes))
        elif rank == CULPRIT and how == "illegal":
            plan = replace(plan, microbatches=plan.microbatches[1:])
        elif rank == CULPRIT and how == "another step":
            plan = replace(plan, step=plan.step + 1)
        elif rank == CULPRIT and how == "packs":
            packs = packs[1:]
        elif rank == CULPRIT and how == "recompute":
            plan = replace(plan, microbatches=(replace(plan.microbatches[0], recompute=Recompute("full", 9)), *plan.microbatches[1:]))
        try:
            run_step(one, plan, packs, 0.1)
        except (PlanMismatch, PlanError, ValueError) as error:
            return type(error).__name__, str(error), bool(ran)
        return "", "", bool(ran)


@pytest.mark.parametrize("how", ["legal", "another step"])
def test_a_plan_that_differs_on_one_rank_is_named_by_all(how: str) -> None:
    found = run_ranks(4, other_plan, how)
    assert {kind for kind, _, _ in found} == {"PlanMismatch"}
    assert len({message for _, message, _ in found}) == 1
    assert "rank 2 has step" in found[0][1]
    assert not any(ran for _, _, ran in found)


@pytest.mark.parametrize(("how", "kind"), [("illegal", "PlanError"), ("packs", "ValueError"), ("recompute", "PlanError")])
def test_a_plan_that_one_rank_refuses_is_run_by_none(how: str, kind: str) -> None:
    found = run_ranks(4, other_plan, how)
    assert [one[0] for one in found] == ["PlanMismatch", "PlanMismatch", kind, "PlanMismatch"]
    assert "rank 2 refused the plan of step 5" in found[0][1]
    assert not any(ran for _, _, ran in found)
