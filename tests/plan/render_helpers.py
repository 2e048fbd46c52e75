"""Plans to draw, and SVG read back, for the tests of pictures."""

import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import plan_reference as ref

from megadcp.plan.simulate import simulate

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


def blocks(svg):
    """(stage, class without edge, microbatch, chunk, x, y, width, height) of every block."""
    for group in parse(svg).iter(f"{SVG}g"):
        if group.get("data-stage") is not None:
            for rect in group.iter(f"{SVG}rect"):
                box = [number(rect, name) for name in ("x", "y", "width", "height")]
                yield (int(group.get("data-stage")), rect.get("class").split()[0], int(rect.get("data-m")), int(rect.get("data-c", "0")), *box)
