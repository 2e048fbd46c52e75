"""Changes of a plan's JSON object, by name: MUTATIONS[name](document, random source) changes the document in place."""

import copy
import functools
import json
import random

import naive_simulation as naive
from random_plans import Run, legal_document

RUNS = (
    Run(lanes=8, precision="fp8_current"),
    Run(lanes=6, tp=2, precision="bf16", lane_speed=(1.0, 0.5, 1.0, 1.0, 2.0, 1.0)),
    Run(lanes=8, stage_layers=(3, 2)),
    Run(lanes=4, stage_layers=(4, 3, 2), virtual_stages=2, precision="fp8_block"),
    Run(model=1, lanes=16, stage_layers=(8,), precision="fp32", gpus_per_node=4),
)


@functools.cache
def legal(index: int) -> str:
    """The JSON text of a legal plan with little memory to spare."""
    rng = random.Random(index)
    own = [int(1 + 9000 ** rng.random()) for _ in range(14)]
    doc = legal_document(RUNS[index], own, rng, 1.02)
    assert naive.first_broken(doc) is None
    return json.dumps({**doc, "hash": naive.plan_hash(doc)})


# -------------------------------------------------------------------------------------------------------------- mutations
MUTATIONS = {}


def mutation(name):
    def keep(change):
        MUTATIONS[name] = change
        return change

    return keep


def one_of(doc, rng, wanted=lambda m: True):
    """A microbatch at random; the first one when none is as wanted."""
    fitting = [m for m in doc["microbatches"] if wanted(m)]
    return rng.choice(fitting or doc["microbatches"][:1])


def change_field(name, change, wanted=lambda m: True):
    """A mutation of one field of one microbatch: change(old value, doc, rng, microbatch) -> new value."""

    def mutate(doc, rng):
        m = one_of(doc, rng, wanted)
        m[name] = change(m[name], doc, rng, m)

    return mutate


for label, field, change in [
    ("slot up", "slot", lambda v, d, r, m: v + 1),
    ("slot far up", "slot", lambda v, d, r, m: v + r.randint(2, 40)),
    ("slot down", "slot", lambda v, d, r, m: v - 1),
    ("slot negative", "slot", lambda v, d, r, m: -1),
    ("slot of another", "slot", lambda v, d, r, m: r.choice(d["microbatches"])["slot"]),
    ("lane up", "lane", lambda v, d, r, m: v + 1),
    ("lane down", "lane", lambda v, d, r, m: v - 1),
    ("lane a group up", "lane", lambda v, d, r, m: v + m["cp"]),
    ("lane a group down", "lane", lambda v, d, r, m: v - m["cp"]),
    ("lane past the end", "lane", lambda v, d, r, m: d["layout"]["lanes"]),
    ("cp twice", "cp", lambda v, d, r, m: 2 * v),
    ("cp half", "cp", lambda v, d, r, m: v // 2),
    ("cp of 3", "cp", lambda v, d, r, m: 3),
    ("cp negative", "cp", lambda v, d, r, m: -v),
    ("document of another", "documents", lambda v, d, r, m: [*v[1:], r.choice(r.choice(d["microbatches"])["documents"])]),
    ("document past the end", "documents", lambda v, d, r, m: [len(d["lengths"]), *v[1:]]),
    ("document negative", "documents", lambda v, d, r, m: [-1, *v[1:]]),
    ("documents dropped", "documents", lambda v, d, r, m: v[:-1]),
    ("documents in another order", "documents", lambda v, d, r, m: v[::-1]),
    ("padded one up", "padded", lambda v, d, r, m: [*v[:-1], v[-1] + 1]),
    ("padded one down", "padded", lambda v, d, r, m: [*v[:-1], v[-1] - 1]),
    ("padded a multiple up", "padded", lambda v, d, r, m: [v[0] + 1024 * m["cp"], *v[1:]]),
    ("padded a multiple down", "padded", lambda v, d, r, m: [v[0] - 1024 * m["cp"], *v[1:]]),
    ("padded a step up", "padded", lambda v, d, r, m: [v[0] + 2 * m["cp"], *v[1:]]),
    ("padded shifted inside", "padded", lambda v, d, r, m: [v[0] + 2 * m["cp"], *v[1:-1], v[-1] - 2 * m["cp"]] if len(v) > 1 else v),
    ("padded half a step up", "padded", lambda v, d, r, m: [v[0] + m["cp"], *v[1:]]),
    ("padded half steps", "padded", lambda v, d, r, m: [v[0] + m["cp"], *v[1:-1], v[-1] + 1023 * m["cp"]] if len(v) > 1 else v),
    ("padded negative", "padded", lambda v, d, r, m: [-v[0], *v[1:]]),
    ("padded one too few", "padded", lambda v, d, r, m: v[:-1]),
    ("padded one too many", "padded", lambda v, d, r, m: [*v, 1024 * m["cp"]]),
    ("padded turned round", "padded", lambda v, d, r, m: v[::-1]),
    ("padded huge", "padded", lambda v, d, r, m: [2**50, *v[1:]]),
    ("recompute other level", "recompute", lambda v, d, r, m: {**v, "level": r.choice(naive.LEVELS)}),
    ("recompute unknown level", "recompute", lambda v, d, r, m: {**v, "level": "some"}),
    ("recompute layer more", "recompute", lambda v, d, r, m: {**v, "layers": v["layers"] + 1}),
    ("recompute layer less", "recompute", lambda v, d, r, m: {**v, "layers": v["layers"] - 1}),
    ("recompute all", "recompute", lambda v, d, r, m: {"level": "full", "layers": min(d["stage_layers"])}),
    ("recompute past the stage", "recompute", lambda v, d, r, m: {"level": "mlp", "layers": min(d["stage_layers"]) + 1}),
    ("recompute nothing", "recompute", lambda v, d, r, m: {"level": "none", "layers": 0}),
    ("cp_comm other", "cp_comm", lambda v, d, r, m: r.choice([kind for kind in ("none", *naive.KINDS) if kind != v])),
    ("cp_comm unknown", "cp_comm", lambda v, d, r, m: "pigeon"),
    ("seconds within tolerance", "seconds", lambda v, d, r, m: v * (1 + r.choice((-5e-5, 5e-5)))),
    ("seconds beyond tolerance", "seconds", lambda v, d, r, m: v * (1 + r.choice((-2e-4, 2e-4)))),
    ("seconds zero", "seconds", lambda v, d, r, m: 0.0),
    ("seconds negative", "seconds", lambda v, d, r, m: -v),
    ("bytes within tolerance", "bytes", lambda v, d, r, m: int(v * (1 + r.choice((-5e-5, 5e-5))))),
    ("bytes beyond tolerance", "bytes", lambda v, d, r, m: int(v * (1 + r.choice((-2e-4, 2e-4))))),
    ("bytes zero", "bytes", lambda v, d, r, m: 0),
]:
    MUTATIONS[label] = change_field(field, change)
    MUTATIONS[label + ", in a group"] = change_field(field, change, lambda m: m["cp"] > 1)
    MUTATIONS[label + ", of many documents"] = change_field(field, change, lambda m: len(m["documents"]) > 1)


@mutation("swap the slots of two")
def swap_slots(doc, rng):
    a, b = one_of(doc, rng), one_of(doc, rng)
    a["slot"], b["slot"] = b["slot"], a["slot"]


@mutation("swap the lanes of two")
def swap_lanes(doc, rng):
    a, b = one_of(doc, rng), one_of(doc, rng)
    a["lane"], b["lane"] = b["lane"], a["lane"]


@mutation("swap the documents of two")
def swap_documents(doc, rng):
    a, b = one_of(doc, rng), one_of(doc, rng)
    a["documents"], b["documents"] = b["documents"], a["documents"]


@mutation("another order of the microbatches")
def shuffle(doc, rng):
    rng.shuffle(doc["microbatches"])


@mutation("another order inside a microbatch")
def turn_round(doc, rng):
    m = one_of(doc, rng, lambda m: len(m["documents"]) > 1)
    m["documents"], m["padded"] = m["documents"][::-1], m["padded"][::-1]


@mutation("a document moves to another microbatch")
def move(doc, rng):
    a, b = one_of(doc, rng, lambda m: len(m["documents"]) > 1), one_of(doc, rng)
    if a is not b:
        b["documents"].append(a["documents"].pop())
        b["padded"].append(a["padded"].pop())


@mutation("a microbatch twice")
def duplicate(doc, rng):
    m = copy.deepcopy(one_of(doc, rng))
    doc["microbatches"].append({**m, "slot": m["slot"] + 50})


@mutation("a microbatch less")
def drop(doc, rng):
    doc["microbatches"].pop(rng.randrange(len(doc["microbatches"])))


@mutation("an empty microbatch more")
def add_empty(doc, rng):
    doc["microbatches"].append({**one_of(doc, rng), "slot": 60, "documents": [], "padded": []})


@mutation("no microbatches")
def none_left(doc, rng):
    doc["microbatches"] = []


@mutation("nothing at all")
def nothing(doc, rng):
    doc["microbatches"], doc["lengths"] = [], []


@mutation("all slots later")
def later(doc, rng):
    for m in doc["microbatches"]:
        m["slot"] += 7


for step in (1, -1, 5000):

    @mutation(f"length {step:+}")
    def longer(doc, rng, step=step):
        doc["lengths"][rng.randrange(len(doc["lengths"]))] += step


@mutation("length of 0")
def no_length(doc, rng):
    doc["lengths"][rng.randrange(len(doc["lengths"]))] = 0


@mutation("a length more")
def one_more(doc, rng):
    doc["lengths"].append(5)


@mutation("a length less")
def one_less(doc, rng):
    doc["lengths"].pop()


def scale(path, name, factor):
    def mutate(doc, rng):
        value = doc[path][name] * factor
        doc[path][name] = int(value) if type(doc[path][name]) is int else value

    return mutate


PROFILE = sorted(json.loads(legal(0))["profile"])
for name in PROFILE:
    for factor in (0, -1, 0.5, 2, 1.001, 1 + 1e-6, 0.9999, 1 + 1e-13):
        MUTATIONS[f"profile.{name} x {factor}"] = scale("profile", name, factor)
for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
    for factor in (0, -1, 0.5, 2):
        MUTATIONS[f"model.{name} x {factor}"] = scale("model", name, factor)
for name in ("lanes", "lanes_per_node", "tp", "pp", "virtual_stages"):
    for factor in (0, -1, 0.5, 2):
        MUTATIONS[f"layout.{name} x {factor}"] = scale("layout", name, factor)


def assign(*path, values):
    def mutate(doc, rng):
        node = doc
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = rng.choice([value for value in values if value != node[path[-1]]])

    return mutate


for name in ("gated", "tied"):
    MUTATIONS[f"model.{name}"] = assign("model", name, values=(True, False))
MUTATIONS["layout.sequence_parallel"] = assign("layout", "sequence_parallel", values=(True, False))
MUTATIONS["schedule"] = assign("schedule", values=("none", "1f1b", "interleaved"))
MUTATIONS["schedule unknown"] = assign("schedule", values=("zero",))
MUTATIONS["precision"] = assign("precision", values=tuple(naive.UNITS))
MUTATIONS["precision unknown"] = assign("precision", values=("int8",))
MUTATIONS["unit"] = assign("unit", values=(1, 16, 128, 0, -1, 2))
MUTATIONS["step"] = assign("step", values=(0, 4, 10**9))
MUTATIONS["step negative"] = assign("step", values=(-1,))
MUTATIONS["lane_speed"] = lambda doc, rng: doc.update(lane_speed=[rng.choice((1.0, 0.7)) for _ in range(doc["layout"]["lanes"])])
MUTATIONS["lane_speed of 0"] = lambda doc, rng: doc.update(lane_speed=[0.0] + [1.0] * (doc["layout"]["lanes"] - 1))
MUTATIONS["lane_speed one too many"] = lambda doc, rng: doc.update(lane_speed=[1.0] * (doc["layout"]["lanes"] + 1))
for name in ("seconds", "lower_bound_seconds", "static_seconds"):
    MUTATIONS[f"predicted.{name}"] = assign("predicted", name, values=(1.0,))
MUTATIONS["predicted.peak_bytes"] = assign("predicted", "peak_bytes", values=([7],))
MUTATIONS["predicted.policy"] = assign("predicted", "policy", values=("luck",))


@mutation("a layer to another stage")
def shift_layer(doc, rng):
    a, b = rng.randrange(len(doc["stage_layers"])), rng.randrange(len(doc["stage_layers"]))
    doc["stage_layers"][a] -= 1
    doc["stage_layers"][b] += 1


@mutation("a layer more")
def layer_more(doc, rng):
    doc["stage_layers"][0] += 1


@mutation("a layer more in the model too")
def deeper(doc, rng):
    doc["stage_layers"][0] += 1
    doc["model"]["layers"] += 1


@mutation("a stage of the layers less")
def stage_less(doc, rng):
    doc["stage_layers"].pop()


@mutation("less memory than needed")
def less_memory(doc, rng):
    doc["profile"]["memory_bytes"] *= 0.97


@mutation("unit and precision")
def coarser(doc, rng):
    doc["precision"], doc["unit"] = rng.choice([pair for pair in naive.UNITS.items() if pair[0] != doc["precision"]])
