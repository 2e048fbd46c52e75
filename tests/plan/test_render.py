"""The Gantt picture: what is drawn is what was simulated or measured, every microbatch once, and files are well-formed and small."""

import math
import random
import re
from collections import Counter
from dataclasses import replace

import plan_reference as ref
import pytest
from render_helpers import LAYOUTS, SVG, blocks, measured, number, parse, plan_for, words

from megadcp.config.check import UserError
from megadcp.plan import render, render_svg, render_theme
from megadcp.plan.baselines import static_best
from megadcp.plan.basis import Basis
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.render_common import bytes_of, scene, seconds_of
from megadcp.plan.simulate import Event, Timeline, simulate
from megadcp.plan.step_plan import Microbatch, Predicted, Recompute, StepPlan


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
