"""The same lengths give the same plan: whatever was planned before, in which process, with how many threads, from which kind of numbers."""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from random_plans import Run

from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import plan_hash, to_json

TESTS = Path(__file__).parent
RUNS = {
    "one lane": Run(precision="fp8_current", memory=0.6e9),
    "lanes": Run(model=2, stage_layers=(16,), lanes=32, precision="bf16"),
    "odd lanes": Run(lanes=13, gpus_per_node=6, tp=2, precision="fp8_block", memory=0.5e9),
    "slow lanes": Run(lanes=8, lane_speed=(1.0, 0.9, 1 / 3, 1.0, 1.25, 1.0, 0.5, 1.0)),
    "1f1b": Run(model=2, stage_layers=(4, 4, 4, 4), lanes=4),
    "interleaved, uneven": Run(model=2, stage_layers=(5, 5, 4), virtual_stages=2, lanes=3, precision="fp8_current", memory=20e9),
}


def lengths_of(seed: int, count: int = 40) -> list[int]:
    """Skewed, with ties: many documents are equally long."""
    rng = random.Random(seed)
    return [rng.choice((64, 512, 4096, int(1 + 2000 * rng.lognormvariate(0, 1.2)))) for _ in range(count)]


def plans(name: str, seeds) -> dict[int, dict]:
    """Step -> plan as JSON, predictions included, by one planner in this order."""
    planner = planner_for(RUNS[name].config())
    return {seed: to_json(planner(seed, lengths_of(seed))) for seed in seeds}


@pytest.mark.parametrize("name", RUNS)
def test_a_planner_remembers_nothing(name):
    """Steps in another order, the same step twice, another planner in between: nothing changes."""
    first, backwards = plans(name, range(4)), plans(name, range(3, -1, -1))
    assert first == backwards
    planner, other = planner_for(RUNS[name].config()), planner_for(replace(RUNS[name], precision="fp32", memory=141e9).config())
    for seed in (2, 2, 0, 2):
        assert to_json(planner(seed, lengths_of(seed))) == first[seed]
        other(seed, lengths_of(seed))


CODE = """
import json, sys
sys.path.insert(0, {folder!r})
import test_determinism as t
print(json.dumps({{name: t.plans(name, range(3)) for name in t.RUNS}}))
"""


@pytest.mark.parametrize(
    ("hash_seed", "threads", "flags"),
    [("77", "1", ()), ("4000000000", "4", ("-O",))],
)
def test_the_same_plans_in_another_process(hash_seed, threads, flags, tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    environment |= {"PYTHONHASHSEED": hash_seed, "LC_ALL": "C"}
    environment |= {f"{library}_NUM_THREADS": threads for library in ("OMP", "OPENBLAS", "MKL")}
    command = [sys.executable, *flags, "-c", CODE.format(folder=str(TESTS))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    here = json.loads(json.dumps({name: plans(name, range(3)) for name in RUNS}))
    assert json.loads(done.stdout) == here


@pytest.mark.parametrize("name", ["lanes", "1f1b"])
def test_one_planner_in_many_threads(name):
    """No state that one call could change under another."""
    expected = plans(name, range(4))
    planner = planner_for(RUNS[name].config())
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda seed: to_json(planner(seed, lengths_of(seed))), [0, 1, 2, 3, 3, 2, 1, 0]))
    finally:
        sys.setswitchinterval(switch)
    assert found == [expected[seed] for seed in (0, 1, 2, 3, 3, 2, 1, 0)]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", ["tuple", "int32", "uint64", "numpy list"])
def test_any_kind_of_integers(name, kind):
    own = lengths_of(9, 12)
    given = {
        "tuple": tuple(own),
        "int32": np.array(own, dtype=np.int32),
        "uint64": np.array(own, dtype=np.uint64),
        "numpy list": [np.int64(length) for length in own],
    }[kind]
    planner = planner_for(RUNS[name].config())
    plan = planner(5, given)
    assert plan == planner(5, own)
    assert plan_hash(plan) == plan_hash(planner(5, own))
    assert {type(length) for length in plan.lengths} == {int}
    json.dumps(to_json(plan))


@pytest.mark.parametrize("name", RUNS)
def test_lengths_are_not_changed_and_the_step_is_only_a_name(name):
    own = lengths_of(4)
    kept = list(own)
    planner = planner_for(RUNS[name].config())
    plan = planner(0, own)
    assert own == kept
    later = planner(12345, own)
    assert replace(later, step=0) == plan
    assert plan_hash(later) != plan_hash(plan)


@pytest.mark.parametrize("name", RUNS)
def test_sampler_order_only_names_the_documents(name):
    """The same lengths in another order: the same blocks with the same lengths in them, at the same predicted time."""
    own = lengths_of(6)
    planner = planner_for(RUNS[name].config())
    plan = planner(0, own)
    order = list(range(len(own)))
    random.Random(3).shuffle(order)
    other = planner(0, [own[document] for document in order])
    assert other.predicted == plan.predicted

    def shape(one):
        return [
            (m.slot, m.lane, m.cp, [one.lengths[document] for document in m.documents], m.padded, m.recompute, m.cp_comm) for m in one.microbatches
        ]

    assert shape(other) == shape(plan)
