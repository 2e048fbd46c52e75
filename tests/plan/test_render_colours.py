"""Colours of pictures: group sizes, words and idle time stay apart for every eye."""

import numpy as np
import pytest
from render_helpers import SVG, blocks, parse, plan_for

from megadcp.plan import render, render_theme

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
