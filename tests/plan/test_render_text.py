"""Text, traces and lengths of a plan: their numbers are those of the plan and its timeline."""

import itertools
import json
import math
import random
import re
from collections import Counter
from dataclasses import replace

import plan_reference as ref
import pytest
from render_helpers import LAYOUTS, SVG, measured, number, parse, plan_for, words

from megadcp.config.check import UserError
from megadcp.plan import render, render_text
from megadcp.plan.basis import Basis
from megadcp.plan.memory import MemoryModel
from megadcp.plan.render_common import bytes_of, count_of, cp_symbol, percent, seconds_of, short, ticks
from megadcp.plan.simulate import Event, Timeline, simulate
from megadcp.plan.step_plan import Microbatch, Recompute


# --------------------------------------------------------------------------------------------------------------------- text
def rows_of(drawn, lanes, pp):
    """(lane, stage) -> (cells, idle share), folded rows spread out again."""
    found = {}
    for line in drawn.splitlines():
        match = re.match(r" *(\d+)(?:-(\d+))?(?: s(\d+))? (\S+) +(-?[\d.]+)%$", line)
        if match:
            for lane in range(int(match[1]), int(match[2] or match[1]) + 1):
                found[lane, int(match[3] or 0)] = match[4], float(match[5]) / 100
    assert len(found) == lanes * pp
    return found


@pytest.mark.parametrize("slower", [False, True])
@pytest.mark.parametrize("name", ["one lane", "six lanes", "pipeline", "1f1b of four", "interleaved"])
def test_the_text_shows_every_lane_and_its_idle_share(name, slower):
    plan = plan_for(name)
    timeline = measured(plan) if slower else simulate(plan)
    drawn = render.text(plan, timeline if slower else None, width=160)
    assert max(map(len, drawn.splitlines())) <= 160
    for (lane, stage), (cells, idle) in rows_of(drawn, plan.layout.lanes, plan.layout.pp).items():
        busy = 0.0
        for event in timeline.events:
            one = plan.microbatches[event.microbatch]
            if event.stage == stage and one.lane <= lane < one.lane + one.cp:
                busy += event.end - event.begin
                assert cp_symbol(one.cp) in cells or event.end - event.begin < 2.5 / len(cells) * timeline.makespan
        assert idle == pytest.approx(1 - busy / timeline.makespan, abs=6e-4)
        # a cell is idle when more than half of it is: with few blocks the dots are the share
        assert cells.count(".") / len(cells) == pytest.approx(idle, abs=0.12)


def test_the_text_by_hand():
    b = ref.basis(ref.SMALL, lanes=3)
    long, short_ = Microbatch(0, 2, 1, (0,), (9000,), Recompute("full", 6)), Microbatch(0, 0, 2, (1,), (4000,), Recompute("mlp", 3), "ring")
    plan = ref.plan_of(b, [9000, 4000], [long, short_])
    width = 100
    drawn = render.text(plan, Timeline(4.0, (Event(0, 0, 0, "FB", 0.0, 4.0), Event(1, 0, 0, "FB", 1.0, 2.0))), width)
    lines = drawn.splitlines()
    cells = width - 5 - 8
    assert any(line.startswith(" 0-1 ") for line in lines)  # two lanes of one group: one row
    rows = rows_of(drawn, 3, 1)
    assert rows[0, 0] == rows[1, 0]
    assert rows[0, 0][1] == 0.75
    assert rows[0, 0][0] == "." * 22 + "|" + "2" * 11 + "~" * 10 + "." * 43  # 87 cells: 21.75 to 43.5, the half full one counts
    assert rows[2, 0] == ("|1" + "=" * (cells - 2), 0.0)
    assert "~ recompute mlp" in drawn
    assert "measured 4 s" in drawn
    ruler = next(line for line in lines if set(line.strip()) == {"-", "+"})
    numbers = lines[lines.index(ruler) + 1]
    assert numbers.endswith(" s")
    assert [float(one) for one in numbers.split()[:-1]][:2] in ([0.0, 0.5], [0.0, 1.0])
    assert ruler.count("+") == len(numbers.split()) - 1
    mark = next(line for line in lines if "measured end" in line)
    assert mark.index(" v") + 1 == 5 + cells - 1


def test_forward_and_backward_in_text():
    b = ref.basis(ref.SMALL, pp=2, stage_layers=(3, 3))
    plan = ref.plan_of(b, [3000], [Microbatch(0, 0, 1, (0,), (3000,), Recompute("full", 3))])
    first, second = (rows_of(render.text(plan), 1, 2)[0, stage][0] for stage in range(2))
    assert re.fullmatch(r">1+\.+<1+=*", first)
    assert re.fullmatch(r"\.+>1+<1=+\.+", second)
    assert "> forward" in render.text(plan)
    assert "> forward" not in render.text(plan_for("one lane"))


def test_many_lanes_are_folded_and_left_out():
    b = ref.basis(ref.SMALL, lanes=256)
    alike = ref.plan_of(b, [2000] * 256, [Microbatch(0, lane, 1, (lane,), (2000,)) for lane in range(256)])
    assert len(rows_of(render.text(alike), 256, 1)) == 256
    assert len(render.text(alike).splitlines()) < 12
    ones = [Microbatch(0, lane, 1, (lane,), (1000 + 40 * (lane * 37 % 256),)) for lane in range(256)]
    plan = ref.plan_of(b, [one.tokens for one in ones], ones)
    drawn = render.text(plan)
    shown = [line for line in drawn.splitlines() if re.fullmatch(r" *\d+ .*%", line)]
    assert len(shown) == render_text.MOST_ROWS
    lanes = {int(line.split()[0]) for line in shown}
    assert {0, 255, max(range(256), key=lambda lane: ones[lane].tokens)} <= lanes  # the one that is done last is there
    assert "216 of 256 lanes are not shown" in drawn
    deep = ref.random_plan(ref.basis(ref.SMALL, lanes=64, pp=4, stage_layers=(2, 2, 1, 1)), random.Random(1))
    rows = len(re.findall(r"^ *[\d-]+ s\d .*%$", render.text(deep), re.M))
    assert render_text.MOST_ROWS - 4 <= rows <= render_text.MOST_ROWS


@pytest.mark.parametrize("width", [40, 57, 100, 240])
def test_lines_keep_the_width(width):
    for name in LAYOUTS:
        assert max(map(len, render.text(plan_for(name), width=width).splitlines())) <= width
    with pytest.raises(UserError, match="width=39"):
        render.text(plan_for("one lane"), width=39)


# -------------------------------------------------------------------------------------------------------------------- trace
@pytest.mark.parametrize("slower", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_trace_is_the_timeline(name, slower):
    plan = plan_for(name)
    timeline = measured(plan) if slower else simulate(plan)
    trace = json.loads(json.dumps(render.perfetto(plan, timeline if slower else None), allow_nan=False))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(plan.microbatches[event.microbatch].cp for event in timeline.events)
    names = {(event["name"], event["pid"], event.get("tid")): event["args"] for event in trace["traceEvents"] if event["ph"] == "M"}
    found = {}
    for event in events:
        lane = int(names["process_name", event["pid"], None]["name"].split()[1])
        stage = int(names["thread_name", event["pid"], event["tid"]]["name"].split()[1])
        key = event["args"]["microbatch"], lane, stage, event["args"].get("chunk", 0), event["cat"]
        assert key not in found
        found[key] = round(event["ts"] * 1000), round(event["dur"] * 1000), event["args"]
    kinds = {"F": "forward", "B": "backward", "FB": "forward and backward"}
    for event in timeline.events:
        one = plan.microbatches[event.microbatch]
        for lane in range(one.lane, one.lane + one.cp):
            begin, duration, args = found[event.microbatch, lane, event.stage, event.chunk, kinds[event.kind]]
            assert begin == round(event.begin * 1e9)
            assert begin + duration == round(event.end * 1e9)
            assert (args["tokens"], args["documents"], args["cp"], args["bytes"]) == (one.tokens, len(one.documents), one.cp, one.bytes)
            assert args["document_lengths"] == [plan.lengths[document] for document in one.documents]
            assert args["recompute"].startswith(one.recompute.level)
    for thread in {event["tid"] for event in events}:
        own = sorted((round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in events if event["tid"] == thread)
        assert all(begin + duration <= following for (begin, duration), (following, _) in itertools.pairwise(own))
        assert len({event["pid"] for event in events if event["tid"] == thread}) == 1
    marks = {event["name"]: event["ts"] / 1e6 for event in trace["traceEvents"] if event["ph"] == "i"}
    assert marks["predicted end"] == pytest.approx(simulate(plan).makespan, abs=1e-9)
    assert ("measured end" in marks) == slower
    assert trace["otherData"]["times"] == ("measured" if slower else "planned")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_counter_reaches_the_peak_of_the_memory_model(name):
    plan = plan_for(name)
    peaks = [0] * plan.layout.pp
    last = {}
    for event in render.perfetto(plan)["traceEvents"]:
        if event["ph"] == "C":
            stage = int(event["name"].split()[-1])
            peaks[stage] = max(peaks[stage], event["args"]["bytes"])
            assert last.get((event["pid"], stage), (-1.0, 0))[0] < event["ts"]
            last[event["pid"], stage] = event["ts"], event["args"]["bytes"]
    assert peaks == pytest.approx(MemoryModel(Basis.of(plan)).peaks(plan.microbatches), abs=1)
    assert {held for _, held in last.values()} == {0}  # everything is freed in the end


# ------------------------------------------------------------------------------------------------------------------ lengths
def test_the_histogram_counts_documents_and_tokens_by_cp():
    plans = [plan_for("32 lanes", seed) for seed in range(2)] + [plan_for("six lanes")]
    documents, tokens = Counter(), Counter()
    for plan in plans:
        for one in plan.microbatches:
            for document in one.documents:
                length = plan.lengths[document]
                key = 2 ** math.floor(math.log2(length)), one.cp
                documents[key] += 1
                tokens[key] += length
    svg = render.lengths_svg(plans)
    root = parse(svg)
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.get("data-bin")]
    assert len(bars) == 2 * len(documents)
    middle = number(root, "width") / 2
    for side, counts in ((False, documents), (True, tokens)):
        total = sum(counts.values())
        own = {(int(bar.get("data-bin")), int(bar.get("data-cp"))): bar for bar in bars if (number(bar, "x") > middle) == side}
        assert set(own) == set(counts)
        scales = [number(own[key], "height") / (counts[key] / total) for key in counts if counts[key] / total > 0.01]
        assert max(scales) == pytest.approx(min(scales), rel=0.01)
        for edge in {edge for edge, _ in counts}:
            stack = sorted((cp, number(bar, "y"), number(bar, "height")) for (at, cp), bar in own.items() if at == edge)
            for (_, upper, _), (_, y, height) in itertools.pairwise(stack):
                assert y + height == pytest.approx(upper, abs=0.02)  # small groups below, no gap
    text = render.lengths_text(plans)
    rows = {}
    for line in text.splitlines()[1:]:
        match = re.match(r" *([\d,]+)(?:-([\d,]+))? +([\d,]+) +([\d.]+)% +([\d.]+)%", line)
        if match:
            rows[int(match[1].replace(",", ""))] = int(match[3].replace(",", "")), float(match[4]), float(match[5])
    for edge in {edge for edge, _ in documents}:
        count = sum(documents[key] for key in documents if key[0] == edge)
        held = sum(tokens[key] for key in tokens if key[0] == edge)
        assert rows[edge] == (
            count,
            pytest.approx(100 * count / sum(documents.values()), abs=0.06),
            pytest.approx(100 * held / sum(tokens.values()), abs=0.06),
        )
    for cp in {cp for _, cp in documents}:
        share = sum(documents[key] for key in documents if key[1] == cp) / sum(documents.values())
        assert f"cp {cp}: {share:.1%} of documents" in text
        assert f"cp {cp}: {share:.1%} of documents" in " ".join(words(svg))


def test_lengths_of_few_documents():
    b = ref.basis(ref.SMALL)
    one = ref.plan_of(b, [1], [Microbatch(0, 0, 1, (0,), (1,))])
    assert "100.0%" in render.lengths_text([one])
    assert parse(render.lengths_svg([one])) is not None
    for plans in ([], [replace(one, microbatches=(), lengths=())]):
        assert render.lengths_text(plans) == "no documents"
        assert "no documents" in words(render.lengths_svg(plans))


def test_one_size_has_one_symbol():
    assert [cp_symbol(1 << power) for power in range(11)] == list("1248abcdefg")


def test_numbers_as_people_read_them():
    assert [seconds_of(value) for value in (0.0, 12.3456, 0.01234, 5e-6)] == ["0 s", "12.35 s", "12.34 ms", "5 µs"]
    assert [bytes_of(value) for value in (61e9, 512e6, 3000, 12)] == ["61 GB", "512 MB", "3 kB", "12 bytes"]
    assert [short(value) for value in (999, 1500, 32768, 131072, 2**20, 999_999)] == ["999", "1.5K", "32K", "128K", "1M", "1M"]
    assert [count_of(1, "microbatch"), count_of(2, "microbatch"), count_of(1024, "lane")] == ["1 microbatch", "2 microbatches", "1,024 lanes"]
    assert [percent(value) for value in (-1e-12, 0.5, 1.0)] == ["0.0%", "50.0%", "100.0%"]
    for high in (1e-5, 0.37, 1.0, 7.7, 12345.6):
        found = ticks(high)
        assert found[0] == 0
        assert high * 0.6 < found[-1] <= high * (1 + 1e-9)
        assert 3 <= len(found) <= 8
        assert re.fullmatch(r"0*[125]0*", f"{found[1]:.10f}".replace(".", ""))
