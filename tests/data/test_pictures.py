"""Pictures: the numbers in them are the numbers of the data, and the file is well-formed for any input."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadcp.data.pictures import HEIGHT, WIDTH, _apart, _short, _ticks, curve_svg, histogram, length_histogram_svg, length_histogram_text, summarise

SVG = "{http://www.w3.org/2000/svg}"
LENGTHS = st.lists(st.integers(0, 3_000_000), max_size=60)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def words(svg: str) -> list[str]:
    return [element.text or "" for element in parse(svg).iter(f"{SVG}text")]


def inside(svg: str) -> bool:
    """All bars and lines lie in the picture and every coordinate is a number."""
    assert "nan" not in re.sub(r"<(text|title)[^>]*>[^<]*", "", svg)
    for element in parse(svg).iter():
        if element.tag == f"{SVG}rect" and element.get("width") != "100%":
            x, y, width, height = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
            if not (x >= 0 and y >= 0 and width > 0 and height > 0 and x + width <= WIDTH + 6 and y + height <= HEIGHT):
                return False
        for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", element.get("points", "")):
            if not (0 <= float(x) <= WIDTH and math.isfinite(float(y))):
                return False
    return True


def test_summary_of_known_lengths() -> None:
    lengths = np.array([*range(1, 101), 0, 0], np.int32)
    assert summarise(lengths) == {"documents": 102, "tokens": 5050, "p50": 49, "p90": 90, "p99": 99, "max": 100, "empty": 2}
    assert summarise([]) == {"documents": 0, "tokens": 0, "p50": 0, "p90": 0, "p99": 0, "max": 0, "empty": 0}
    assert summarise(np.full(3, 2**31 - 1, np.int32))["tokens"] == 3 * (2**31 - 1)


@given(LENGTHS)
@settings(max_examples=60, deadline=None)
def test_bins_hold_what_their_edges_say(lengths: list[int]) -> None:
    found = histogram(lengths)
    for low, high, count, share in zip(found.edges, found.edges[1:], found.counts, found.token_shares, strict=False):
        members = [length for length in lengths if low <= length < high]
        assert count == len(members)
        assert share == pytest.approx(sum(members) / max(1, sum(lengths)))
    assert sum(found.counts) == len(lengths)
    assert all(high == 2 * low or (low, high) in ((0, 1), (1, 2)) for low, high in zip(found.edges, found.edges[1:], strict=False))


@given(LENGTHS)
@settings(max_examples=60, deadline=None)
def test_the_histogram_is_well_formed_for_any_lengths(lengths: list[int]) -> None:
    assert inside(length_histogram_svg(lengths))
    text = length_histogram_text(lengths, width=20)
    assert len({len(line) for line in text.splitlines()[:-1]}) <= 1


def test_the_histogram_says_what_it_shows() -> None:
    lengths = [3, 3, 700, 0]
    svg = length_histogram_svg(lengths, "Lengths of <my> data & more")
    said = words(svg)
    assert "Lengths of <my> data & more" in said
    assert "4 documents, 706 tokens; length p50 3, p90 700, p99 700, max 700, 1 empty" in said
    assert {"share of documents", "share of tokens", "share, %", "document length, tokens (bins double)", "p50 3", "p90 = p99 = max 700"} <= set(said)
    tips = [title.text for rect in parse(svg).iter(f"{SVG}rect") for title in rect]
    assert "2-3 tokens: 50.0% (2 documents)" in tips
    assert "512-1,023 tokens: 99.2% (tokens)" in tips
    assert "prefers-color-scheme: dark" in svg
    rows = length_histogram_text(lengths).splitlines()
    assert re.fullmatch(r"\s+2-3\s+2\s+█{40}\s+50.0%\s+0.8%", rows[3])
    assert rows[-1].startswith("4 documents, 706 tokens")
    assert length_histogram_text([]) == "no documents"
    assert "no documents" in words(length_histogram_svg([]))


def test_bar_heights_are_in_proportion() -> None:
    svg = length_histogram_svg([1] * 30 + [2] * 60 + [4] * 10)
    heights = [float(rect.get("height", "0")) for rect in parse(svg).iter(f"{SVG}rect") if rect.get("class") == "fill0" and len(rect)]
    assert heights == pytest.approx([heights[0], 2 * heights[0], heights[0] / 3], abs=0.2)


POINTS = st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])), max_size=30)


@given(st.dictionaries(st.text(max_size=12), POINTS, max_size=8))
@settings(max_examples=60, deadline=None)
def test_curves_are_well_formed_for_any_points(series: dict[str, list[tuple[float, float]]]) -> None:
    svg = curve_svg({name: sorted(points, key=lambda point: point[0]) for name, points in series.items()}, "t & <t>", "x", "y")
    assert inside(svg)
    drawn = [element for element in parse(svg).iter(f"{SVG}polyline")]
    assert len(drawn) == sum(any(math.isfinite(y) for _, y in points) for points in series.values())


def test_curves_say_what_they_show() -> None:
    loss = [(float(step), 4.0 + 4.0 / step) for step in range(1, 801)]
    svg = curve_svg({"training loss": loss, "validation loss": [(400.0, 4.1), (800.0, 4.05)]}, "Loss", "step", "nats per token")
    said = words(svg)
    assert {"Loss", "step", "nats per token", "training loss", "validation loss", "0", "400", "800"} <= set(said)
    assert "last values: training loss 4.005 · validation loss 4.05" in said
    assert "last values: tokens/s 1,394,000" in words(curve_svg({"tokens/s": [(1.0, 1_393_800.0)]}, "Speed", "step", "tokens/s"))
    styles = [element.get("class") for element in parse(svg).iter(f"{SVG}polyline")]
    assert styles == ["faint line0", "line line0", "line line1"]
    assert len(svg) < 60_000
    assert "no data" in words(curve_svg({"a": [(0.0, math.nan)]}, "Loss", "x", "y"))


def test_rounding_is_no_range() -> None:
    assert "0.8" in words(curve_svg({"a": [(0.0, 0.8), (1.0, 0.8 + 1e-16), (2.0, 0.8 - 1e-16)]}, "t", "x", "y"))


def test_a_spike_does_not_flatten_the_curve() -> None:
    points = [(float(step), 1000.0 if step == 150 else 5.0 - step / 300) for step in range(300)]
    ticks = [float(word) for word in words(curve_svg({"loss": points}, "", "", "")) if re.fullmatch(r"[\d.]+K?", word) and "K" not in word]
    assert max(ticks) < 1000


@given(st.floats(-1e7, 1e7), st.floats(1e-6, 1e7))
@settings(max_examples=100, deadline=None)
def test_ticks_are_round_and_cover_the_range(low: float, width: float) -> None:
    if low + width <= low + 1e-9 * abs(low):
        return
    ticks = _ticks(low, low + width)
    slack = 1e-6 * width + 1e-11 * abs(low)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + width - slack
    assert 3 <= len(ticks) <= 12


@given(st.lists(st.tuples(st.floats(70, 730), st.integers(40, 120)), min_size=1, max_size=4))
def test_labels_do_not_touch(boxes: list[tuple[float, int]]) -> None:
    boxes.sort()
    widths = [float(width) for _, width in boxes]
    placed = _apart([centre for centre, _ in boxes], widths)
    edges = [edge for centre, width in zip(placed, widths, strict=True) for edge in (centre - width / 2, centre + width / 2)]
    assert all(b >= a - 1e-6 for a, b in itertools.pairwise(edges))
    assert edges[0] >= 3.9
    assert edges[-1] <= WIDTH - 3.9


def test_short_numbers() -> None:
    assert [_short(value) for value in (0, 999, 1000, 1024, 12_289, 131_072, 2**20, 3_000_000, 5 * 10**9)] == [
        *("0", "999", "1K", "1K", "12.3K", "128K", "1M", "3M", "5G")
    ]
