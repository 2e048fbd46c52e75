import functools
import itertools
import math
import random
import sys
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.config.check import UserError
from megadcp.plan.baselines import static_best
from megadcp.plan.basis import basis_from
from megadcp.plan.bound_1f1b import lower_bound_1f1b
from megadcp.plan.cost import CostModel
from megadcp.plan.exact import solve
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.packing import pad
from megadcp.plan.planner import planner_for
from megadcp.plan.simulate import run, simulate
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute
from megadcp.plan.verify import PlanError, verify

pytest.importorskip("scipy.optimize")

TINY = replace(ref.SMALL, layers=2)
QUICK = replace(ref.H200, gemm_half_tokens=64, layer_overhead_seconds=2e-5)


# ------------------------------------------------------------------------------------------------- everything, tried literally
def partitions(items):
    """All partitions of a list."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [items[0], *rest[k]], *rest[k + 1 :]]


def places(b):
    """(cp, lane) of every aligned block."""
    powers = [1 << k for k in range(b.layout.lanes.bit_length())]
    return [(cp, lane) for cp in powers for lane in range(0, b.layout.lanes - cp + 1, cp)]


def ways(b, lengths, documents, cp, lane):
    """Every order, recompute value and kind of communication of a set of documents on a block."""
    values = [Recompute()] + [Recompute(level, layers) for level in LEVELS[1:] for layers in range(1, b.recomputable + 1)]
    for order in itertools.permutations(documents):
        for recompute in values:
            for kind in CostModel(b).legal_kinds(cp):
                yield Microbatch(0, lane, cp, order, pad([lengths[one] for one in order], cp, b.align), recompute, kind)


def room(b, chosen):
    """Budget of each stage under the cp sizes of some places."""
    sizes = len({cp for cp, _ in chosen if cp > 1})
    hw = b.profile
    return [hw.usable_fraction * hw.memory_bytes - ref.stage_static(b, stage, sizes) for stage in range(b.layout.pp)]


def speed(b, cp, lane):
    return min(b.lane_speed[lane : lane + cp]) if b.lane_speed else 1.0


def literal_lanes(b, lengths):
    """Least makespan without pipelines: every partition on all places, each pack in its best way, every order of slots by events."""
    best, known = math.inf, {}
    for parts in partitions(list(range(len(lengths)))):
        for chosen in itertools.product(places(b), repeat=len(parts)):
            budget = room(b, chosen)[0]
            packs = []
            for part, (cp, lane) in zip(parts, chosen, strict=True):
                key = tuple(part), cp, lane, budget
                if key not in known:
                    fitting = [m for m in ways(b, lengths, part, cp, lane) if sum(ref.stage_bytes(b, m, 0)) <= budget]
                    known[key] = min(fitting, key=lambda m: ref.stage_seconds(b, m)[0], default=None)
                packs.append(known[key])
            if None in packs:
                continue
            area = sum(ref.stage_seconds(b, m)[0] * m.cp / speed(b, m.cp, m.lane) for m in packs) / b.layout.lanes
            if area >= best:
                continue
            for order in itertools.permutations(packs):
                microbatches = [replace(m, slot=slot) for slot, m in enumerate(order)]
                best = min(best, ref.event_simulation(b, microbatches)[0])
    return best


def literal_pipelines(b, lengths, depth):
    """Least makespan with pipelines: every partition, place, slot below `depth`, way; fitting by the walk of the action lists."""
    best = math.inf
    for parts in partitions(list(range(len(lengths)))):
        for chosen in itertools.product(places(b), repeat=len(parts)):
            budgets = room(b, chosen)
            own = [list(ways(b, lengths, part, *place)) for part, place in zip(parts, chosen, strict=True)]
            for slots in itertools.product(range(depth), repeat=len(parts)):
                taken = [(slot, member) for slot, (cp, lane) in zip(slots, chosen, strict=True) for member in range(lane, lane + cp)]
                if min(slots) > 0 or len(set(taken)) < len(taken):
                    continue
                for packs in itertools.product(*own):
                    makespan, peaks = ref.event_simulation(b, [replace(m, slot=slot) for m, slot in zip(packs, slots, strict=True)])
                    if makespan < best and all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True)):
                        best = makespan
    return best


def checked(b, lengths, **limits):
    """The exact plan, verified, no better than the bounds and no worse than static-best."""
    exact = solve(b, lengths, **limits)
    plan = ref.plan_of(b, lengths, exact.microbatches)
    verify(replace(plan, microbatches=exact.microbatches))
    assert simulate(plan).makespan == exact.makespan
    assert exact.proved
    assert exact.makespan * (1 - 1e-5) <= exact.lower <= exact.makespan
    bound = lower_bound_1f1b if b.schedule == "1f1b" else lower_bound
    assert exact.makespan >= bound(b, lengths) * (1 - 1e-12)
    static = static_best(b, lengths, sum(lengths), max_cp=limits.get("max_cp", 0))
    if static is not None:
        assert exact.makespan <= static.makespan * (1 + 1e-5)
    return exact


LANES = [
    (dict(lanes=2), [3000, 900, 40]),
    (dict(lanes=2), [20000, 19000, 18000]),
    (dict(lanes=2, hardware=replace(QUICK, memory_bytes=0.75e9)), [30000, 20000, 16000]),
    (dict(lanes=2, hardware=replace(QUICK, memory_bytes=0.15e9)), [9000, 7000, 6000, 100]),
    (dict(lanes=3, hardware=replace(QUICK, gpus_per_node=1)), [9000, 500, 400]),
    (dict(lanes=2, tp=2, precision="fp8_current"), [700, 300, 33]),
]


@pytest.mark.parametrize("speeds", [(), (1.0, 0.6, 0.9)])
@pytest.mark.parametrize(("layout", "lengths"), LANES)
def test_lanes_against_everything(layout, lengths, speeds):
    b = ref.basis(TINY, **layout)
    b = replace(b, lane_speed=speeds[: b.layout.lanes])
    assert checked(b, lengths).makespan == pytest.approx(literal_lanes(b, lengths), rel=1e-5)


PIPELINES = [
    (dict(pp=2), [900, 300, 40]),
    (dict(pp=2, hardware=replace(QUICK, memory_bytes=0.1e9)), [9000, 7000, 6000]),
    (dict(pp=2, lanes=2, hardware=replace(QUICK, node_bytes=30e9)), [3000, 2900]),
]


@pytest.mark.parametrize("speeds", [(), (1.0, 0.6)])
@pytest.mark.parametrize(("layout", "lengths"), PIPELINES)
def test_pipelines_against_everything(layout, lengths, speeds):
    b = ref.basis(TINY, **layout)
    b = replace(b, lane_speed=speeds[: b.layout.lanes])
    exact = checked(b, lengths)
    assert exact.makespan == pytest.approx(literal_pipelines(b, lengths, 2 * len(lengths) - 1), rel=1e-9)


def test_in_falling_order_nobody_waits():
    """Blocks in order of falling cp take the largest sum of a lane; any other order takes at least that."""
    b = ref.basis(ref.SMALL, lanes=8)
    cost = CostModel(b)
    for seed in range(20):
        plan = ref.random_plan(b, random.Random(seed), slots=6)
        sums = [math.fsum(cost.seconds(m) for m in plan.microbatches if m.lane <= lane < m.lane + m.cp) for lane in range(8)]
        falling = [replace(m, slot=slot) for slot, m in enumerate(sorted(plan.microbatches, key=lambda m: -m.cp))]
        assert run(cost, falling).makespan == pytest.approx(max(sums), rel=1e-12)
        assert simulate(plan).makespan >= max(sums) * (1 - 1e-12)


def test_gaps_between_slots_save_memory():
    """Where memory is short, an empty slot means less in flight: the best plan has some, and without them it would not fit."""
    b = ref.basis(ref.SMALL, pp=2, hardware=replace(QUICK, memory_bytes=0.35e9))
    lengths = [13000, 25000, 27000, 27000]
    exact = checked(b, lengths)
    slots = sorted(one.slot for one in exact.microbatches)
    dense = [replace(one, slot=slots.index(one.slot)) for one in exact.microbatches]
    assert dense != list(exact.microbatches)
    with pytest.raises(PlanError, match="memory budget"):
        verify(ref.plan_of(b, lengths, dense))


def test_cp_limit():
    b = ref.basis(ref.SMALL, lanes=4)
    free, limited = checked(b, [50000, 200, 100]), checked(b, [50000, 200, 100], max_cp=2)
    assert max(one.cp for one in free.microbatches) == 4
    assert max(one.cp for one in limited.microbatches) == 2
    assert free.makespan < limited.makespan


def test_a_limit_of_time_is_told():
    """What stops early says so, and what it says stays true."""
    b = ref.basis(ref.SMALL, lanes=8, hardware=QUICK)
    lengths = [9000, 8000, 7000, 6000, 5500, 5200, 5100, 4000]
    try:
        exact = solve(b, lengths, seconds_limit=0.0)
    except UserError as error:
        assert "seconds_limit" in str(error)  # noqa: PT017
    else:
        assert lower_bound(b, lengths) * (1 - 1e-9) <= exact.lower <= exact.makespan


def test_refusals(monkeypatch):
    b = ref.basis(ref.SMALL, lanes=8)
    with pytest.raises(UserError, match="40 documents on 8 lanes, which is too large; on these lanes at most 11 documents"):
        solve(b, [100] * 40)
    with pytest.raises(UserError, match=r"pp=2: [0-9]+ placements to try"):
        solve(ref.basis(ref.SMALL, lanes=8, pp=2), [100] * 6)
    with pytest.raises(UserError, match="virtual_stages=3"):
        solve(ref.basis(ref.SMALL, pp=2, virtual_stages=3), [100])
    with pytest.raises(UserError, match="at least 1 token"):
        solve(b, [5, 0])
    for pp in (1, 2):
        with pytest.raises(UserError, match="no plan for documents of 1000000, 5 tokens on 1 lanes fits"):
            solve(ref.basis(ref.SMALL, pp=pp, hardware=replace(ref.H200, memory_bytes=3e8)), [5, 10**6])
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match="pip install scipy"):
        solve(b, [100])


# ---------------------------------------------------------------------------------------------------------- the planner's gap
def lanes_case(seed):
    """(config, lengths) of a small step without pipelines."""
    rng = random.Random(seed)
    model = rng.choice((ref.SMALL, ref.GPT_1B, ref.GPT_8B))
    hardware = replace(QUICK, memory_bytes=rng.choice((2e9, 141e9))) if model is ref.SMALL else ref.H200
    longest = rng.choice((3000, 20000, 60000))
    lanes, documents = rng.choice((2, 4, 4, 6, 8)), rng.randint(4, 6)
    return ref.config(model, lanes=lanes, hardware=hardware), [rng.randint(longest // 10, longest) for _ in range(documents)]


def pipeline_case(seed):
    """(config, lengths) of a tiny step with pipelines."""
    rng = random.Random(seed)
    lanes, documents, pp = rng.choice(((1, 4, 2), (1, 5, 2), (2, 3, 2), (2, 4, 2), (1, 4, 3)))
    longest = rng.choice((3000, 30000))
    return ref.config(ref.SMALL, lanes=lanes, pp=pp, hardware=QUICK), [rng.randint(longest // 10, longest) for _ in range(documents)]


@functools.cache
def gap(case, seed):
    """The planner's makespan over the exact one, less 1."""
    config, lengths = case(seed)
    planned = simulate(planner_for(config)(0, lengths)).makespan
    return planned / checked(basis_from(config), lengths).makespan - 1


# (cases, worst gap, mean gap) as measured, rounded up
GAPS = {"lanes": (lanes_case, range(20), 0.04, 0.005), "pipelines": (pipeline_case, range(10), 0.08, 0.03)}


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, (_, seeds, _, _) in GAPS.items() for seed in seeds])
def test_the_planner_is_near(kind, seed):
    case, _, worst, _ = GAPS[kind]
    assert -1e-5 <= gap(case, seed) <= worst


@pytest.mark.parametrize("kind", GAPS)
def test_the_planner_is_near_on_average(kind):
    case, seeds, _, mean = GAPS[kind]
    assert math.fsum(gap(case, seed) for seed in seeds) / len(seeds) <= mean
