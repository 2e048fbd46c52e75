"""Whole steps of gloo ranks with streams that are only written down: no tensor is touched by two streams without an order between them, every
purpose keeps to its stream, groups are entered in one order, computing goes on beside what travels, and the host waits once a step.
"""

from __future__ import annotations

import graphlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fake_streams import FakeCuda, Operation, Watch
from host_waits import HostWaits
from layouts import CHUNK, CPU, SEED, Case, Outcome, check_equal, microbatch, outcome, packs_of, random_plan, run_alone
from layouts import assemble_plan as assemble
from ranks import run_ranks

from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import OptimConfig
from megadcp.engine import step
from megadcp.engine.step import Engine, run_step
from megadcp.mesh.groups import GroupPool
from megadcp.mesh.streams import PURPOSES, Pending, StreamChannel, Streams
from megadcp.nn.gpt import GPT
from megadcp.nn.part import parts_of
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.step_plan import Recompute, StepPlan
from megadcp.train.optim import Optimizer

STREAM = {purpose: number for number, purpose in enumerate(PURPOSES, start=1)}
LANES, TP, WHOLE = Case(lanes=4), Case(tp=2, lanes=2), Case(tp=2, stage_layers=(2, 2), lanes=2)
WHOLE_ROWS = replace(TP, sequence_parallel=False)
PIPELINE = Case(stage_layers=(2, 2), lanes=2, chunks=2)


@dataclass(frozen=True)
class Seen:
    """What one rank's watch has seen. purposes: group -> purposes that it serves here."""

    outcome: Outcome
    races: list[str]
    log: list[Operation]
    beside: Counter[int]
    purposes: dict[str, set[str]]
    operations: int
    host_waits: int
    reads: dict[str, int]


def purposes_of(pool: GroupPool, case: Case) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    groups = [(pool.tp, "tp"), (pool.pipeline, "pp"), *((one, "dp") for one in (pool.lanes, pool.world, pool.ends, pool.model))]
    groups += [(pool.cp(pool.coords.lane, size), "cp") for size in pool.sizes if pool.coords.lane // size * size + size <= case.lanes]
    for group, purpose in groups:
        if group.handle is not None:
            found.setdefault(group.handle.group_name, set()).add(purpose)
    return found


def watched(rank: int, world: int, case: Case, plans: Sequence[StepPlan], fault: str = "") -> Seen:
    """Steps with a real update, all on watched streams; the gradients are those of the last step, before which no weight has changed."""
    api = FakeCuda()
    with pytest.MonkeyPatch.context() as patch, GroupPool(case.mesh, rank, CPU, timeout_s=60, overlap=True, streams=Streams(CPU, api)) as pool:
        if fault:
            break_something(patch, fault)
        backend = torch_backend(torch.float64, CPU, pool.tp, case.sequence_parallel)
        part = parts_of(case.stage_layers, case.chunks)[pool.coords.pp]
        gpt = GPT(case.model, backend, SEED, CHUNK, part)
        gradients = GradientBuffers(gpt.named_parameters(), pool, case.model.tied, bucket=2000)
        engine = Engine(gpt, gradients, Optimizer(gpt, gradients, backend, OptimConfig(), {}), CPU, 0.0, pool)
        reads: dict[str, int] = {}
        run = step.run_lane

        def counted(*arguments: Any, **named: Any) -> Any:
            with HostWaits() as waits:
                losses = run(*arguments, **named)
            # what is copied to the device is put together on the host
            reads.update({name: count for name, count in waits.found.items() if " at engine/transfer.py" not in name})
            return losses

        patch.setattr(step, "run_lane", counted)
        with Watch(api) as watch:
            for plan in plans:
                result = run_step(engine, plan, packs_of(case, plan, pool.coords.lane), 0.0)
            engine.optimizer.wait()
        found = outcome(case, engine, result)
        return Seen(found, watch.races, watch.log, watch.beside, purposes_of(pool, case), watch.operations, api.host_waits, reads)


def break_something(patch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "nobody waits for a result":
        patch.setattr(Pending, "wait", lambda self: None)
    elif fault == "nobody waits for inputs":

        def start(self, launch, touched=()):
            with self.api.stream(self.stream):
                list(launch(False))
                event = self.stream.record_event()
            return [Pending(self.api, event, touched)]

        patch.setattr(StreamChannel, "start", start)
    elif fault == "tensors are not kept":
        before = Pending.__init__
        patch.setattr(Pending, "__init__", lambda self, api, event, touched: before(self, api, event, ()))


def check(found: list[Seen]) -> None:
    for seen in found:
        assert seen.races == []
        assert seen.operations > 500
        assert seen.reads == {}
        assert seen.host_waits == 2, "one in each step: for its verdict"
        for operation in seen.log:
            assert operation.stream in {STREAM[purpose] for purpose in seen.purposes[operation.group]}, operation
    entered_in_one_order([seen.log for seen in found])


def entered_in_one_order(logs: Sequence[Sequence[Operation]]) -> None:
    """Sort all ranks' operations: each rank's in the order in which it starts them, the same operation of several ranks as one."""
    names: dict[tuple[object, ...], str] = {}
    batches: list[list[list[tuple[object, ...]]]] = []  # of each rank: the operations that it starts together
    for log in logs:
        counts: Counter[tuple[object, ...]] = Counter()
        own: list[list[tuple[object, ...]]] = []
        last = -1
        for operation in log:
            key = (operation.group, operation.message)
            node = (*key, counts[key])
            counts[key] += 1
            kind = operation.name if operation.message is None else "message"
            assert names.setdefault(node, kind) == kind, f"{node} is {names[node]} on one rank and {kind} on another"
            if operation.start != last:
                own.append([])
            own[-1].append(node)
            last = operation.start
        batches.append(own)
    leader: dict[tuple[object, ...], tuple[object, ...]] = {}

    def find(node: tuple[object, ...]) -> tuple[object, ...]:
        while leader.setdefault(node, node) != node:
            node = leader[node]
        return node

    for own in batches:
        for batch in own:
            for node in batch[1:]:
                leader[find(node)] = find(batch[0])
    sorter: graphlib.TopologicalSorter[tuple[object, ...]] = graphlib.TopologicalSorter()
    for own in batches:
        for before, after in itertools.pairwise(own):
            if find(before[0]) != find(after[0]):
                sorter.add(find(after[0]), find(before[0]))
    tuple(sorter.static_order())


@pytest.mark.parametrize("case", [LANES, TP, PIPELINE], ids=["lanes", "tp", "pipeline"])
def test_no_race_and_one_order(case):
    plans = [random_plan(case, seed) for seed in (1, 2)]
    found = run_ranks(case.world, watched, case, plans)
    check(found)
    check_equal(found[0].outcome, run_alone(case))


@pytest.mark.slow  # 60 s
@pytest.mark.parametrize("seed", [10, 11, 13])
@pytest.mark.parametrize("case", [LANES, TP, PIPELINE, WHOLE, WHOLE_ROWS], ids=["lanes", "tp", "pipeline", "all", "tp alone"])
def test_no_race_and_one_order_in_more_plans(case, seed):
    found = run_ranks(case.world, watched, case, [random_plan(case, seed), random_plan(case, seed + 100)])
    check(found)
    check_equal(found[0].outcome, run_alone(case))


def ring_plan(case: Case) -> StepPlan:
    """Two microbatches of all lanes in turn."""
    halves = (range(4), range(4, 8))
    return assemble(case, [microbatch(case, (slot, 0, case.lanes), list(half), Recompute(), "ring") for slot, half in enumerate(halves)])


def test_computing_goes_on_beside_what_travels():
    """Of every purpose: keys of the next ring step, rows and input gradients, messages of the pipeline, sums and parameters, the next batch."""
    found = run_ranks(WHOLE.world, watched, WHOLE, [ring_plan(WHOLE)] * 2)
    check(found)
    for purpose in PURPOSES:
        assert all(seen.beside[STREAM[purpose]] > 0 for seen in found), purpose


@pytest.mark.parametrize("fault", ["nobody waits for a result", "nobody waits for inputs", "tensors are not kept"])
def test_the_watch_sees_a_missing_order(fault):
    found = run_ranks(TP.world, watched, TP, [ring_plan(TP)] * 2, fault)
    assert any(seen.races for seen in found)


def test_the_order_check_sees_groups_that_cross():
    def one(group: str, start: int) -> Operation:
        return Operation(start, 1, "c10d::allreduce_", group, None)

    entered_in_one_order([[one("a", 1), one("b", 2)], [one("a", 1), one("b", 2)]])
    with pytest.raises(graphlib.CycleError):
        entered_in_one_order([[one("a", 1), one("b", 2)], [one("b", 1), one("a", 2)]])
    with pytest.raises(AssertionError, match="on one rank"):
        entered_in_one_order([[one("a", 1)], [replace(one("a", 1), name="c10d::broadcast_")]])
    there, back = (Operation(0, 3, "c10d::send", "p", pair) for pair in ((0, 1), (1, 0)))
    entered_in_one_order([[there, replace(back, name="c10d::recv_")], [back, replace(there, name="c10d::recv_")]])  # in one batch
    apart = [[there, replace(back, start=1)], [back, replace(there, start=1)]]
    with pytest.raises(graphlib.CycleError):
        entered_in_one_order(apart)
