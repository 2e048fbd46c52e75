"""The parts of the search with pipelines, each against something simpler."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import plan_reference as ref
import pytest

from megadcp.plan.actions import FORWARD, dense_actions, waits_for
from megadcp.plan.columns import makespans, peaks
from megadcp.plan.cost import FORWARD_SHARE, CostModel
from megadcp.plan.limits import Limits, everywhere, most_cp
from megadcp.plan.memory import MOST_TOKENS, MemoryModel
from megadcp.plan.packing import pad
from megadcp.plan.pipeline_attempts import Workshop
from megadcp.plan.pipeline_costs import Cells, PipelineCosts
from megadcp.plan.pipeline_fill import THOUSAND, Block, Filling, NoRoom, Pace, Sizes
from megadcp.plan.pipeline_memory import InFlight, choose_recompute
from megadcp.plan.pipeline_profile import Lane, Tall, growth, target
from megadcp.plan.pipeline_reshape import Slots, one_lane, reshape
from megadcp.plan.pipeline_score import Scorer
from megadcp.plan.presets import draw
from megadcp.plan.simulate import run

GPT_8B_LANE = Lane((0.0128, 0.0128, 0.0128, 0.0161), (4.26, 4.26, 4.26, 5.15), 1, 96)


def workshop(b, lengths):
    costs = PipelineCosts(b, Limits(most_cp(b), MOST_TOKENS, everywhere(b)), max(lengths))
    return costs, Workshop(costs, np.array(sorted(lengths, reverse=True)))


def one(lane, shares):
    """Makespan of one lane with these shares."""
    seconds = np.array(lane.fixed) + np.array(lane.work) * np.array(shares)[:, None]
    return float(makespans(seconds[:, :, None], np.ones((len(shares), 1), bool), lane.chunks)[0])


# ------------------------------------------------------------------------------------------------------------------- profiles
@pytest.mark.parametrize("shape", [(20, 4, 1), (3, 4, 1), (12, 4, 2), (8, 2, 3)])
def test_a_full_lane_level_by_level(shape):
    slots, stages, chunks = shape
    seconds = np.random.default_rng(slots).random((slots, stages, 7))
    assert (one_lane(seconds, chunks) == makespans(seconds, np.ones((slots, 7), bool), chunks)).all()


@pytest.mark.parametrize("reverse", [False, True])
def test_growth_keeps_the_last_stage_busy_and_no_more_would(reverse):
    lane, share = GPT_8B_LANE, 1 - FORWARD_SHARE if reverse else FORWARD_SHARE
    shares = growth(lane.fixed, lane.work, 0.003, 12, share, 3)
    assert all(later > sooner for sooner, later in pairwise(shares[:6]))

    def idle(shares):
        """Seconds that the last stage waits after its first action: its makespan less fill, its work and the drain."""
        order = shares[::-1] if reverse else shares
        fill = sum((FORWARD_SHARE if not reverse else 1 - FORWARD_SHARE) * (lane.fixed[s] + lane.work[s] * shares[0]) for s in range(3))
        work = sum(lane.fixed[3] + lane.work[3] * share for share in shares)
        drain = sum((1 - FORWARD_SHARE if not reverse else FORWARD_SHARE) * (lane.fixed[s] + lane.work[s] * shares[-1]) for s in range(3))
        return one(lane, order) - fill - work - drain

    assert idle(shares[:6]) == pytest.approx(0, abs=1e-9)
    assert idle([*shares[:5], shares[5] * 1.05]) > 1e-3 * shares[5]


def best_of_program(lane, slots):
    """Least makespan of one lane with this many slots over all shares: a linear program over the dense lists."""
    optimize = pytest.importorskip("scipy.optimize")
    stages, rows, limits = len(lane.fixed), [], []
    lists = dense_actions(slots, stages, lane.chunks)
    place = {(stage, action): slots + k for k, (stage, action) in enumerate((s, a) for s in range(stages) for a in lists[s])}
    size = slots + len(place) + 1
    for stage in range(stages):
        before = None
        for action in lists[stage]:
            share = (FORWARD_SHARE if action.kind == FORWARD else 1 - FORWARD_SHARE) / lane.chunks
            for node in {before, waits_for(action, stage, stages, lane.chunks)}:  # end >= end of what comes before + duration
                row = np.zeros(size)
                if node is not None:
                    row[place[node]] = 1
                row[action.slot], row[place[stage, action]] = share * lane.work[stage], -1
                rows.append(row)
                limits.append(-share * lane.fixed[stage])
            before = stage, action
        row = np.zeros(size)
        row[place[before]], row[-1] = 1, -1
        rows.append(row)
        limits.append(0)
    cost, sum_ = np.zeros(size), np.zeros((1, size))
    cost[-1], sum_[0, :slots] = 1, 1
    return optimize.linprog(cost, A_ub=np.array(rows), b_ub=limits, A_eq=sum_, b_eq=[1]).fun


@pytest.mark.parametrize(
    ("lane", "gap"),
    [
        (GPT_8B_LANE, 0.001),
        (replace(GPT_8B_LANE, work=(2.4, 2.4, 2.4, 2.5)), 0.008),
        (replace(GPT_8B_LANE, work=(2.4, 2.4, 2.1, 2.04)), 0.02),
        (replace(GPT_8B_LANE, fixed=(0.0128, 0.0161), work=(2.4, 2.9)), 0.002),
        (replace(GPT_8B_LANE, chunks=2, work=(2.4, 2.4, 2.4, 2.9)), 0.02),
    ],
)
def test_profiles_are_near_the_linear_programs_best(lane, gap):
    best = target(lane)
    assert best.sum() == pytest.approx(1)
    least = min(best_of_program(lane, len(best) + more) for more in (-4, 0, 4))
    assert least * (1 - 1e-7) <= one(lane, best) < (1 + gap) * least


def test_caps_and_tall_slots_are_kept():
    capped = target(replace(GPT_8B_LANE, cap=0.06))
    assert capped.max() <= 0.06 / 0.93 + 1e-12
    tall = target(GPT_8B_LANE, Tall((0.2, 0.15), (0.95, 0.95, 0.95, 1.0)))
    assert any(tall[k] >= 0.2 - 1e-9 and max(tall[k - 1], tall[k + 1]) >= 0.15 - 1e-9 for k in range(1, len(tall) - 1))
    assert tall.sum() == pytest.approx(1)


def test_reshape_moves_content_within_limits_and_improves():
    lane = GPT_8B_LANE
    content = np.full(16, lane.work[3] / 16)
    ratio = np.repeat((np.array(lane.work) / lane.work[3])[None], 16, axis=0)
    least, most = np.full(16, 0.05), np.full(16, 0.5)
    least[3] = content[3]
    better, nanoseconds = reshape(Slots(np.array(lane.fixed), content, ratio, least, most), 30, 1)
    assert better.sum() == pytest.approx(content.sum())
    assert (better >= least - 1e-12).all()
    assert (better <= most + 1e-12).all()
    assert nanoseconds == round(one(lane, better / lane.work[3]) * 1e9)
    assert nanoseconds < 0.94e9 * one(lane, content / lane.work[3])


# -------------------------------------------------------------------------------------------------------------------- filling
@pytest.mark.parametrize("speeds", [(THOUSAND,) * 6, (1100, 1100, 500, 1100, 1100, 1100)])
@pytest.mark.parametrize("base", [1, 2])
def test_every_document_has_one_place_and_rooms_hold(speeds, base):
    b = ref.basis(ref.GPT_8B, lanes=6, pp=4)
    lengths = draw("wikipedia", 6 * 65536, 60000, 1)
    _, shop = workshop(b, lengths)
    rooms = [int(share * 1.05e9 * shop.work[base][shop.busiest]) for share in target(shop.lane).tolist()]
    pace = Pace(speeds, 16_000_000)
    filling = Filling(rooms, base, shop.sizes, pace, 200)
    assert filling.place_coarse(len(lengths))
    before = {id(cell): cell.room for cell in filling.cells}
    assert filling.homeless or min(before.values()) >= 0
    cells = filling.place_rest()
    assert sorted(document for cell in cells for document in cell.documents) == list(range(len(lengths)))
    taken = [(cell.slot, lane) for cell in cells for lane in range(cell.lane, cell.lane + cell.cp)]
    assert len(taken) == len(set(taken))
    assert all(cell.lane >= 0 and cell.lane % cell.cp == 0 and cell.lane + cell.cp <= 6 for cell in cells)
    for cell in cells:
        held = sum(shop.sizes[cell.cp].seconds[document] for document in cell.documents)
        room = rooms[cell.slot] if min(speeds) == max(speeds) else pace.content(rooms[cell.slot], cell.lane, cell.cp)
        assert cell.room == room - held


def literal_filling(rooms, lanes, seconds, tokens, cap):
    """Best fit on single lanes as the docstrings say, looking at every cell for every document: [(slot, lane, documents)]; None without room."""
    cells, free = [], {slot: lanes for slot in range(len(rooms))}
    homeless = []
    for document, (need, own) in enumerate(zip(seconds, tokens, strict=True)):
        found = [(cell["room"], 0, at) for at, cell in enumerate(cells) if cell["room"] >= need and cell["tokens"] + own <= cap]
        found += [(rooms[slot], 1, slot) for slot, count in free.items() if count and rooms[slot] >= need]
        if not found:
            homeless.append(document)
            continue
        _, new, at = min(found)
        if new:
            free[at] -= 1
            cells.append({"slot": at, "lane": free[at], "room": rooms[at], "tokens": 0, "documents": []})
            at = len(cells) - 1
        cells[at]["documents"].append(document)
        cells[at]["room"] -= need
        cells[at]["tokens"] += own
    for slot, count in free.items():
        cells += [{"slot": slot, "lane": lane, "room": rooms[slot], "tokens": 0, "documents": []} for lane in range(count)]
    for document in homeless:
        may = [cell for cell in cells if not cell["documents"] or cell["tokens"] + tokens[document] <= cap]
        if not may:
            return None
        best = max(may, key=lambda cell: cell["room"] - seconds[document])
        best["documents"].append(document)
        best["room"] -= seconds[document]
        best["tokens"] += tokens[document]
    return [(cell["slot"], cell["lane"], cell["documents"]) for cell in cells if cell["documents"]]


@pytest.mark.parametrize("seed", range(20))
def test_filling_is_best_fit_where_tokens_bind_and_where_they_do_not(seed):
    rng = np.random.default_rng(seed)
    tokens = np.sort(np.exp(rng.uniform(3, 9, 150)).astype(np.int64))[::-1].copy()
    nanoseconds = tokens * 100 + tokens**2 // 50
    lanes, slots = 4, 8
    rooms = (rng.uniform(0.7, 1.4, slots) * nanoseconds.sum() / (lanes * slots)).astype(np.int64).tolist()
    cap = int(tokens.sum() / (lanes * slots) * rng.choice([1.3, 2.0, 50.0])) + int(tokens[-1])
    sizes = Sizes(1, nanoseconds.tolist(), tokens.tolist(), cap, nanoseconds, tokens, int(tokens[0]))
    filling = Filling(rooms, 1, {1: sizes}, Pace((THOUSAND,) * lanes, 0), len(tokens))
    assert filling.place_coarse(len(tokens))
    try:
        cells = [(cell.slot, cell.lane, cell.documents) for cell in filling.place_rest()]
    except NoRoom:
        cells = None
    assert cells == literal_filling(rooms, lanes, nanoseconds.tolist(), tokens.tolist(), cap)


def test_blocks_stay_where_they_are():
    b = ref.basis(ref.GPT_8B, lanes=8, pp=4)
    lengths = draw("wikipedia", 8 * 65536, 60000, 1)
    _, shop = workshop(b, lengths)
    rooms = [300_000_000] * 14
    blocks = [Block(5, 4, 4, 0), Block(2, 0, 2, 1)]
    filling = Filling(rooms, 1, shop.sizes, Pace((THOUSAND,) * 8, 0), 100, blocks)
    filling.place_coarse(len(lengths))
    cells = filling.place_rest()
    assert [(cell.slot, cell.lane, cell.cp) for cell in cells if 0 in cell.documents] == [(5, 4, 4)]
    assert [(cell.slot, cell.lane, cell.cp) for cell in cells if 1 in cell.documents] == [(2, 0, 2)]
    assert any(cell.slot == 5 and cell.lane < 4 for cell in cells)  # lanes below an aligned group are not lost


# -------------------------------------------------------------------------------------------------------------- prices, memory
@pytest.mark.parametrize("layout", [{"lanes": 16}, {"lanes": 6, "tp": 2, "precision": "fp8_block"}, {"lanes": 8, "virtual_stages": 2}], ids=str)
def test_scores_are_the_simulators(layout):
    b = ref.basis(ref.GPT_1B, pp=4, **layout)
    b = replace(b, lane_speed=(0.7, *[1.0] * (b.layout.lanes - 1))) if b.layout.tp == 1 else b
    lengths = draw("web", b.layout.lanes * 20000, 60000, 2)
    order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    costs, shop = workshop(b, lengths)
    scorer, cost = Scorer(costs, order, shop.lengths), CostModel(b)
    for attempt in shop.promising():
        plan = scorer.plan(attempt.cells)
        microbatches = scorer.microbatches(plan)
        assert plan.nanoseconds == pytest.approx(run(cost, microbatches).makespan * 1e9, abs=2)
        by_place = {(m.slot, m.lane): m for m in microbatches}
        for number, cell in enumerate(plan.cells):
            m = by_place[cell.slot, cell.lane]
            assert m.padded == pad([lengths[document] for document in m.documents], m.cp, b.align)
            assert m.cp_comm == cost.best_kind(cost.load_of(m)._replace(kind="none"))
            assert plan.seconds[:, number] == pytest.approx(cost.stage_seconds(m), rel=1e-12)


def cells_of(microbatches):
    columns = [np.array([getattr(m, name) for m in microbatches]) for name in ("slot", "lane", "cp", "tokens")]
    squares = np.array([float(sum(x * x for x in m.padded)) for m in microbatches])
    return Cells(*columns, squares, max(m.slot for m in microbatches) + 1)


@pytest.mark.parametrize("seed", range(12))
def test_windows_equal_the_walk(seed):
    rng = random.Random(seed)
    b = ref.basis(replace(ref.SMALL, layers=12), lanes=4, pp=rng.choice([2, 3, 4]))
    plan = ref.random_plan(b, rng, slots=rng.choice([1, 2, 3, 7]))
    flight = InFlight(workshop(b, plan.lengths)[0], cells_of(plan.microbatches))
    recompute = [m.recompute for m in plan.microbatches]
    stored, passing = (flight.on_lanes(part) for part in flight.bytes([r.level for r in recompute], [r.layers for r in recompute]))
    windows = [flight._peak(stage, stored[:, stage], passing[:, stage]) for stage in range(b.layout.pp)]
    assert windows == pytest.approx(peaks(stored, passing).max(axis=1), rel=1e-12)
    assert windows == pytest.approx(MemoryModel(b).peaks(plan.microbatches), rel=1e-9)


@pytest.mark.parametrize("chunks", [1, 2])
def test_recompute_is_none_where_there_is_room_and_fits_where_there_is_not(chunks):
    b = ref.basis(ref.GPT_8B, lanes=4, pp=4, virtual_stages=chunks)
    plan = ref.random_plan(b, random.Random(3), slots=8, longest=30000)
    cells, memory = cells_of(plan.microbatches), MemoryModel(b)
    plain = [replace(m, recompute=type(m.recompute)()) for m in plan.microbatches]
    seen = set()
    for share in (1.01, 0.9, 0.7, 0.5, 0.3):
        need = max(peak * share + memory.static(stage, 2) for stage, peak in enumerate(memory.peaks(plain)))
        tight = replace(b, profile=replace(b.profile, memory_bytes=need / b.profile.usable_fraction))
        costs = PipelineCosts(tight, Limits(4, MOST_TOKENS, everywhere(tight)))
        found = choose_recompute(costs, cells, costs.price(cells))
        seen |= {one.level for one in found}
        chosen = [replace(m, recompute=one) for m, one in zip(plain, found, strict=True)]
        held = MemoryModel(tight).peaks(chosen)
        assert all(peak <= MemoryModel(tight).budget(stage, 2) * (1 + 1e-9) for stage, peak in enumerate(held))
        assert (share > 1) == all(one.layers == 0 for one in found)
    assert len(seen) >= 3
