"""Pictures of a plan: what is drawn is what was simulated or measured, every microbatch once, and files are well-formed and small."""

import itertools
import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace

import numpy as np
import plan_reference as ref
import pytest

from megadcp.config.check import UserError
from megadcp.plan import render, render_svg, render_text, render_theme
from megadcp.plan.baselines import static_best
from megadcp.plan.basis import Basis
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.memory import MemoryModel
from megadcp.plan.render_common import bytes_of, count_of, cp_symbol, percent, scene, seconds_of, short, ticks
from megadcp.plan.simulate import Event, Timeline, simulate
from megadcp.plan.step_plan import Microbatch, Predicted, Recompute, StepPlan

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = {
    "one lane": dict(),
    "six lanes": dict(lanes=6),
    "32 lanes": dict(lanes=32),
    "pipeline": dict(lanes=4, pp=3, stage_layers=(3, 2, 1)),
    "1f1b of four": dict(lanes=5, pp=4, stage_layers=(2, 2, 1, 1)),
    "interleaved": dict(lanes=4, pp=3, virtual_stages=2),
}


def plan_for(name, seed=0, slots=5):
    return ref.random_plan(ref.basis(ref.SMALL, **LAYOUTS[name]), random.Random(seed), slots=slots)


def measured(plan, seed=5):
    """The plan's timeline as if its lanes were slower than predicted."""
    rng = random.Random(seed)
    return simulate(replace(plan, lane_speed=tuple(0.5 + 0.4 * rng.random() for _ in range(plan.layout.lanes))))


def parse(svg):
    return ElementTree.fromstring(svg)


def words(svg):
    return ["".join(element.itertext()) for element in parse(svg).iter(f"{SVG}text")]


def number(element, name):
    return float(element.get(name))


def seconds_at(root):
    """pixels -> seconds, read off the axis: its last line of tick labels."""
    unit = next(scale for name, scale in (("milliseconds", 1e-3), ("microseconds", 1e-6), ("seconds", 1.0)) if name in "".join(root.itertext()))
    texts = [
        element for element in root.iter(f"{SVG}text") if re.fullmatch(r"[\d,.]+", element.text or "") and element.get("text-anchor") == "middle"
    ]
    base = max(number(element, "y") for element in texts)
    axis = sorted((number(element, "x"), float(element.text.replace(",", ""))) for element in texts if number(element, "y") == base)
    (left, low), (right, high) = axis[0], axis[-1]
    assert low == 0
    assert len(axis) >= 3
    return lambda x: (x - left) * high / (right - left) * unit


def blocks(svg):
    """(stage, class without edge, microbatch, chunk, x, y, width, height) of every block."""
    for group in parse(svg).iter(f"{SVG}g"):
        if group.get("data-stage") is not None:
            for rect in group.iter(f"{SVG}rect"):
                box = [number(rect, name) for name in ("x", "y", "width", "height")]
                yield (int(group.get("data-stage")), rect.get("class").split()[0], int(rect.get("data-m")), int(rect.get("data-c", "0")), *box)


def grounds(svg):
    """(y, height) of the rows of each stage, from the top."""
    found = {}
    for group in parse(svg).iter(f"{SVG}g"):
        if group.get("data-ground") is not None:
            found[int(group.get("data-ground"))] = [(number(rect, "y"), number(rect, "height")) for rect in group.iter(f"{SVG}rect")]
    return found


def mark_lines(svg):
    """class -> x of the vertical marks."""
    return {element.get("class").split()[1]: number(element, "x1") for element in parse(svg).iter(f"{SVG}line") if "mark" in element.get("class")}


# -------------------------------------------------------------------------------------------------------------------- Gantt
@pytest.mark.parametrize("slower", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_the_events_of_the_timeline(name, slower):
    plan = plan_for(name)
    timeline = measured(plan) if slower else simulate(plan)
    svg = render.gantt_svg(plan, timeline if slower else None)
    at, rows, pixel = seconds_at(parse(svg)), grounds(svg), 1.1 * timeline.makespan / 900
    drawn = list(blocks(svg))
    assert len(drawn) == len(timeline.events)
    by_key = {(m, stage, chunk, kind.endswith("f")): box for stage, kind, m, chunk, *box in drawn}
    assert len(by_key) == len(drawn)  # nothing twice
    for event in timeline.events:
        one = plan.microbatches[event.microbatch]
        x, y, width, height = by_key[event.microbatch, event.stage, event.chunk, event.kind == "F"]
        assert at(x) == pytest.approx(event.begin, abs=0.05 * pixel)
        assert at(x + width) == pytest.approx(event.end, abs=0.05 * pixel)
        last_y, last_height = rows[event.stage][one.lane + one.cp - 1]
        assert y == pytest.approx(rows[event.stage][one.lane][0])
        assert y + height == pytest.approx(last_y + last_height)  # one block over all lanes of the group


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_lane_has_its_row_on_every_stage(name):
    plan = plan_for(name)
    svg = render.gantt_svg(plan)
    rows = grounds(svg)
    assert sorted(rows) == list(range(plan.layout.pp))
    edges = [edge for stage in sorted(rows) for y, height in rows[stage] for edge in (y, y + height)]
    assert all(len(own) == plan.layout.lanes for own in rows.values())
    assert edges == sorted(edges)
    labels = Counter(words(svg))
    shown = [lane for lane in range(plan.layout.lanes) if labels[str(lane)] >= plan.layout.pp]
    assert 0 in shown
    assert len(shown) >= plan.layout.lanes // 2


def test_marks_stand_at_the_end_and_at_the_bound():
    plan = plan_for("32 lanes")
    end, bound = simulate(plan).makespan, lower_bound(Basis.of(plan), plan.lengths)
    carried = replace(plan, predicted=Predicted(0.9 * end, (), 0.5 * bound, 1.3 * end, "joint"))
    for one, expected in ((plan, (end, bound)), (carried, (0.9 * end, 0.5 * bound))):
        svg = render.gantt_svg(one)
        at, lines = seconds_at(parse(svg)), mark_lines(svg)
        assert sorted(lines) == ["boundline", "endline"]
        assert at(lines["endline"]) == pytest.approx(expected[0], rel=1e-3)
        assert at(lines["boundline"]) == pytest.approx(expected[1], rel=1e-3)
        assert f"predicted end {seconds_of(expected[0])}" in words(svg)
        assert f"lower bound {seconds_of(expected[1])}" in words(svg)
    assert "static-best" in " ".join(words(render.gantt_svg(carried)))


def test_measured_times_keep_the_prediction():
    plan = plan_for("six lanes")
    timeline = measured(plan)
    svg = render.gantt_svg(plan, timeline)
    at, lines = seconds_at(parse(svg)), mark_lines(svg)
    assert at(lines["endline"]) == pytest.approx(simulate(plan).makespan, rel=1e-3)
    assert at(lines["measuredline"]) == pytest.approx(timeline.makespan, rel=1e-3)
    assert timeline.makespan > 1.1 * simulate(plan).makespan
    assert f"({timeline.makespan / simulate(plan).makespan - 1:+.1%})" in " ".join(words(svg))
    faster = Timeline(0.0, tuple(event._replace(begin=event.begin / 2, end=event.end / 2) for event in simulate(plan).events))
    svg = render.gantt_svg(plan, faster)  # the axis still reaches the predicted end
    at, lines = seconds_at(parse(svg)), mark_lines(svg)
    assert at(lines["measuredline"]) == pytest.approx(simulate(plan).makespan / 2, rel=1e-3)
    assert at(lines["endline"]) == pytest.approx(simulate(plan).makespan, rel=1e-3)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (Event(99, 0, 0, "FB", 0.0, 1.0), "names microbatch 99"),
        (Event(0, 1, 0, "FB", 0.0, 1.0), "names stage 1"),
        (Event(0, 0, 0, "W", 0.0, 1.0), "of kind 'W'"),
        (Event(0, 0, 0, "FB", 2.0, 1.0), "from 2.0 to 1.0"),
        (Event(0, 0, 0, "FB", 0.0, math.nan), "to nan"),
        (Event(0, 0, 0, "FB", -1.0, 1.0), "from -1.0"),
    ],
)
@pytest.mark.parametrize("draw", [render.gantt_svg, render.text, render.perfetto])
def test_a_timeline_of_another_plan_is_refused(draw, event, problem):
    plan = plan_for("six lanes")
    with pytest.raises(UserError, match=f"step 7: event 0 .*{problem}"):
        draw(plan, Timeline(1.0, (event,)))
    with pytest.raises(UserError, match="makespan=nan"):
        draw(plan, Timeline(math.nan, ()))


def test_a_bad_theme_is_refused():
    plan = plan_for("one lane")
    for draw in (lambda: render.gantt_svg(plan, theme="sepia"), lambda: render.lengths_svg([plan], theme="sepia")):
        with pytest.raises(UserError, match=r"theme='sepia'.*auto, light, dark"):
            draw()


def test_themes():
    plan = plan_for("pipeline")
    for draw in (lambda theme: render.gantt_svg(plan, theme=theme), lambda theme: render.lengths_svg([plan], theme=theme)):
        light, dark, auto = (draw(theme) for theme in ("light", "dark", "auto"))
        assert "prefers-color-scheme" in auto
        assert "prefers-color-scheme" not in light + dark
        for theme, svg, other in ((render_theme.LIGHT, light, dark), (render_theme.DARK, dark, light)):
            rule = f".paper {{ fill: {theme['paper']} }}"
            assert rule in svg
            assert rule in auto
            assert rule not in other
        assert re.sub("<style>.*?</style>", "", light, flags=re.S) == re.sub("<style>.*?</style>", "", dark, flags=re.S)


def test_recompute_is_hatched_to_its_share_of_the_layers():
    b = ref.basis(ref.SMALL, lanes=4)
    kinds = [Recompute(), Recompute("selective", 6), Recompute("mlp", 3), Recompute("full", 1)]
    plan = ref.plan_of(b, [3000] * 4, [Microbatch(0, lane, 1, (lane,), (3000,), kind) for lane, kind in enumerate(kinds)])
    svg = render.gantt_svg(plan)
    bands = [element for element in parse(svg).iter(f"{SVG}path") if element.get("class") == "again"]
    heights = {element.get("fill"): float(re.search(r"v([\d.]+)", element.get("d"))[1]) for element in bands}
    block = max(height for *_, height in blocks(svg))
    assert len(heights) == 3
    for level, share in (("selective", 1.0), ("mlp", 0.5), ("full", 1 / 6)):
        assert next(height for fill, height in heights.items() if level in fill) == pytest.approx(share * block, abs=0.01)
    defined = {pattern.get("id") for pattern in parse(svg).iter(f"{SVG}pattern")}
    assert {re.search(r"#([\w-]+)", fill)[1] for fill in heights} <= defined
    assert not any(
        element.get("class") == "again" for element in parse(render.gantt_svg(plan_for("one lane", slots=1), theme="dark")).iter("nothing")
    )
    plain = ref.plan_of(b, [3000], [Microbatch(0, 0, 1, (0,), (3000,))])
    assert "pattern" not in render.gantt_svg(plain)
    assert "recompute" not in " ".join(words(render.gantt_svg(plain)))


def test_with_pipelines_the_backward_is_hatched():
    b = ref.basis(ref.SMALL, pp=3, stage_layers=(3, 2, 1))
    plan = ref.plan_of(b, [3000], [Microbatch(0, 0, 1, (0,), (3000,), Recompute("full", 1))])
    svg = render.gantt_svg(plan)
    backward = sorted(x for _, kind, _, _, x, *_ in blocks(svg) if kind == "c1")
    bands = [element.get("d") for element in parse(svg).iter(f"{SVG}path") if element.get("class") == "again"]
    assert sorted(float(x) for path in bands for x in re.findall(r"M([\d.]+)", path)) == backward
    row = grounds(svg)[0][0][1]
    assert sorted(float(v) for path in bands for v in re.findall(r"v([\d.]+)", path)) == pytest.approx([row / 3, row / 2, row], abs=0.01)


def test_tooltips_say_what_a_block_holds():
    b = ref.basis(ref.SMALL, lanes=2)
    plan = ref.plan_of(b, [1001, 500], [Microbatch(3, 0, 2, (0, 1), (1004, 500), Recompute("mlp", 2), "ring")])
    one = plan.microbatches[0]
    rect = next(element for element in parse(render.gantt_svg(plan)).iter(f"{SVG}rect") if element.get("data-m"))
    for said in (
        "slot 3, lanes 0-1, cp 2 (ring)",
        "2 documents, 1,504 tokens (3 of them padding)",
        "recompute mlp, 2 of 6 layers",
        seconds_of(one.seconds),
        bytes_of(one.bytes),
    ):
        assert said in rect[0].text


def test_text_is_escaped():
    plan = plan_for("one lane")
    title = 'a <b> & "c" \x00 ]]> step'
    svg = render.gantt_svg(plan, title=title)
    assert parse(svg).find(f"{SVG}title").text == title.replace("\x00", "\ufffd")
    assert render.gantt_svg(plan, title=title * 40)  # cut, not wider than the picture
    policy = replace(plan, predicted=Predicted(1.0, (), 0.5, 0.0, "</text><script>"))
    assert "<script>" not in render.gantt_svg(policy)


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_leaves_the_picture(name):
    for seed in range(3):
        plan = plan_for(name, seed)
        svg = render.gantt_svg(plan, measured(plan) if seed == 1 else None)
        root = parse(svg)
        width, height = number(root, "width"), number(root, "height")
        for rect in root.iter(f"{SVG}rect"):
            if rect.get("width") != "100%":
                x, y, wide, high = (number(rect, side) for side in ("x", "y", "width", "height"))
                assert x >= 0 <= y
                assert wide >= 0 < high
                assert x + wide <= width
                assert y + high <= height
        for line in root.iter(f"{SVG}text"):
            needed = render_theme.width_of(line.text) * (1.5 if "title" in line.get("class", "") else 1)
            begin = number(line, "x") - needed * {"middle": 0.5, "end": 1.0}.get(line.get("text-anchor", ""), 0.0)
            assert begin >= 0
            assert begin + needed <= width
            assert 0 < number(line, "y") < height


def test_labels_fit_their_blocks_and_never_touch():
    plan = plan_for("32 lanes", slots=8)
    root = parse(render.gantt_svg(plan))
    labels = []
    for line in root.iter(f"{SVG}text"):
        if re.match(r"label t\d", line.get("class", "")):
            half = render_theme.width_of(line.text) / 2
            labels.append((number(line, "x") - half, number(line, "x") + half, number(line, "y")))
    assert len(labels) > 20
    for left, right, y in labels:
        assert any(x <= left + 0.1 and right <= x + w + 0.1 and top <= y <= top + h for *_, x, top, w, h in blocks(render.gantt_svg(plan)))
    for place, (left, right, y) in enumerate(labels):
        assert not any(abs(y - other) < 10 and left < there and begin < right for begin, there, other in labels[:place])


@pytest.mark.parametrize(
    ("lanes", "pp", "slots", "cp", "most"),
    [(32, 4, 64, 1, 3e6), (1024, 1, 4, 1, 1.5e6), (1024, 1, 4, 1024, 1e5), (96, 2, 3, 32, 1e5)],
)
def test_large_steps_stay_small_files(lanes, pp, slots, cp, most):
    b = ref.basis(ref.SMALL, lanes=lanes, pp=pp, stage_layers=(3, 3) if pp == 2 else (2, 2, 1, 1) if pp == 4 else ())
    recompute, comm = Recompute("mlp", 1), "none" if cp == 1 else "ring"
    ones = [Microbatch(slot, lane, cp, (0,), (2048 * cp,), recompute, comm) for slot in range(slots) for lane in range(0, lanes, cp)]
    ones = [replace(one, documents=(document,)) for document, one in enumerate(ones)]
    plan = ref.plan_of(b, [2048 * cp] * len(ones), ones)
    svg = render.gantt_svg(plan, theme="light")
    assert len(svg) < most
    assert number(parse(svg), "height") < 2600
    assert len(list(blocks(svg))) == len(simulate(plan).events)
    assert svg == render.gantt_svg(plan, theme="light")
    if cp == 1:
        assert 0 < svg.count("<title>") - 1 <= render_svg.MOST_TOOLTIPS


def test_beyond_a_number_the_smallest_blocks_are_one_path(monkeypatch):
    plan = plan_for("pipeline")
    monkeypatch.setattr(render_svg, "MOST_BLOCKS", 10)
    svg = render.gantt_svg(plan)
    kept = list(blocks(svg))
    assert len(kept) == 10
    events = simulate(plan).events
    paths = [path.get("d") for group in parse(svg).iter(f"{SVG}g") if group.get("data-stage") for path in group.iter(f"{SVG}path")]
    boxes = [[float(part) for part in found] for path in paths for found in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h", path)]
    assert len(boxes) == len(events) - 10
    assert max(w * h for *_, w, h in boxes) <= min(w * h for *_, w, h in kept) + 0.1
    monkeypatch.setattr(render_svg, "MOST_BLOCKS", 10**6)
    everything = sorted(tuple(box) for *_, x, y, w, h in blocks(render.gantt_svg(plan)) for box in [(x, y, w, h)])
    assert sorted([tuple(box) for box in boxes] + [(x, y, w, h) for *_, x, y, w, h in kept]) == everything


def test_a_step_without_microbatches_is_an_empty_picture():
    plan = replace(plan_for("six lanes"), microbatches=(), lengths=())
    assert list(blocks(render.gantt_svg(plan))) == []
    assert "idle" in render.text(plan)
    assert [event for event in render.perfetto(plan)["traceEvents"] if event["ph"] == "X"] == []


# ------------------------------------------------------------------------------------------------------------------- colour
# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency", 2009: severity 1.0
SEEN = {
    "everything": np.eye(3),
    "no red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "no green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "no blue": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
TO_CONES = np.array(
    [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]]
)
TO_LAB = np.array(
    [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099], [0.0259040371, 0.7827717662, -0.8086757660]]
)


def oklab(colours, eye):
    """Colours as an eye sees them, in Ottosson's OKLab: [n, 3]; a distance of 0.02 is about the least that is noticed."""
    channels = np.array([[int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)] for colour in colours])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return np.cbrt(np.clip(linear @ eye.T, 0, 1) @ TO_CONES.T) @ TO_LAB.T


def test_group_sizes_stay_apart_for_every_eye():
    sizes = [1 << power for power in range(11)]
    colours = [render_theme.colour_of(cp) for cp in sizes]
    assert len(set(colours)) == 11
    for eye in SEEN.values():
        lab = oklab(colours, eye)
        apart = np.linalg.norm(lab[:, None] - lab[None], axis=2) + np.eye(11)
        assert apart.min() > 0.09
        assert np.diag(apart, 1).min() > 0.14  # neighbours in size
    red_and_green = oklab(["#d62728", "#2ca02c"], SEEN["no green"])
    assert np.linalg.norm(red_and_green[0] - red_and_green[1]) < 0.09  # such a pair would fail


def test_words_read_on_their_ground():
    for theme in (render_theme.LIGHT, render_theme.DARK):
        for name in ("title", "text", "note", "bound", "end", "measured"):
            assert render_theme.contrast(theme[name], theme["paper"]) >= 4.5, name
        for cp in (1 << power for power in range(11)):
            full, forward = render_theme.colour_of(cp), render_theme.forward_colour(cp)
            for ground in (full, forward):
                assert render_theme.contrast(render_theme.ink_on(ground), ground) >= 4.5
                for eye in SEEN.values():
                    seen = oklab([ground, theme["idle"]], eye)
                    assert np.linalg.norm(seen[0] - seen[1]) > 0.06, (cp, ground)
            for eye in SEEN.values():
                seen = oklab([full, forward], eye)
                assert np.linalg.norm(seen[0] - seen[1]) > 0.08, cp
    assert render_theme.contrast("#000000", "#ffffff") == pytest.approx(21)


def test_a_group_size_has_one_colour_everywhere():
    plan = plan_for("32 lanes")
    kinds = {plan.microbatches[m].cp: kind for _, kind, m, *_ in blocks(render.gantt_svg(plan))}
    assert len(kinds) >= 4
    assert kinds == {cp: f"c{cp}" for cp in kinds}
    for svg in (render.gantt_svg(plan), render.lengths_svg([plan])):
        for cp in kinds:
            assert f".c{cp} {{ fill: {render_theme.colour_of(cp)} }}" in svg
    assert {f"c{cp}" for cp in kinds} == {rect.get("class") for rect in parse(render.lengths_svg([plan])).iter(f"{SVG}rect") if rect.get("data-cp")}


def test_one_size_has_one_symbol():
    assert [cp_symbol(1 << power) for power in range(11)] == list("1248abcdefg")


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


# ---------------------------------------------------------------------------------------------------------------- the rest
def test_a_static_layout_of_a_real_model_is_drawn():
    b = ref.basis(ref.GPT_8B, lanes=8)
    rng = random.Random(3)
    lengths = [min(131072, max(16, int(rng.lognormvariate(6.5, 1.6)))) for _ in range(300)]
    static = static_best(b, lengths, 131072)
    plan = StepPlan(0, b.layout, b.schedule, b.stage_layers, b.model, b.precision, b.unit, b.profile, tuple(lengths), static.microbatches)
    for draw in (render.gantt_svg, render.text, render.perfetto):
        assert draw(plan) == draw(plan)
    assert sorted(m for _, _, m, *_ in blocks(render.gantt_svg(plan))) == list(range(len(plan.microbatches)))
    assert scene(plan).end == pytest.approx(static.makespan)


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
