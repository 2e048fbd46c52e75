"""Any legal plan: simulator, memory walk, bound, verifier and hash agree with a naive reading of docs/plan.md (naive_simulation.py)."""

import json
import math
import random
from collections import Counter

import naive_simulation as naive
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from random_plans import Run, legal_document, lengths, runs

from megadcp.plan.basis import Basis
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.memory import MemoryModel
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import from_json, plan_hash, to_json
from megadcp.plan.verify import verify

close = pytest.approx
MANY = [HealthCheck.too_slow, HealthCheck.data_too_large]


def check_against_naive(doc, rng):
    """Everything that must hold of a legal plan's JSON object."""
    doc["hash"] = naive.plan_hash(doc)
    assert naive.first_broken(doc) is None
    plan = from_json(json.dumps(doc))
    verify(plan)
    assert to_json(plan) == doc
    assert plan_hash(plan) == doc["hash"]
    makespan, times = naive.simulate(doc, rng)
    timeline = simulate(plan)
    assert timeline.makespan == close(makespan, rel=1e-9)
    check_events(doc, times, timeline.events)
    assert MemoryModel(Basis.of(plan)).peaks(plan.microbatches) == close(naive.peaks(doc), rel=1e-9)
    bound = lower_bound(Basis.of(plan), plan.lengths)
    assert bound <= makespan * (1 + 1e-9)
    return plan, bound


def check_events(doc, times, events):
    """Every action once, each when the naive simulation has it."""
    found = {}
    for one in events:
        for kind in one.kind:
            key = (kind, one.microbatch, one.stage, one.chunk)
            assert key not in found
            found[key] = one.begin, one.end
    assert found.keys() == times.keys()
    for key, (begin, end) in times.items():
        if doc["layout"]["pp"] == 1:  # forward and backward are one event
            begin, end = times["F", *key[1:]][0], times["B", *key[1:]][1]
        assert found[key] == close((begin, end), rel=1e-9, abs=1e-12)


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=MANY)
@given(runs(), lengths(most=60), st.integers(0, 10**6), st.sampled_from((1.0, 1.05, 3.0, 50.0)))
@example(Run(stage_layers=(2, 1, 3), virtual_stages=1, lanes=6, tp=2, precision="fp8_block"), [1] * 30, 5, 1.0)
def test_random_legal_plans(run, own, seed, room):
    rng = random.Random(seed)
    check_against_naive(legal_document(run, own, rng, room), rng)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_pipeline_depth_and_chunk_count(pp, v):
    seen = Counter()
    for seed in range(12):
        rng = random.Random(1000 * pp + 100 * v + seed)
        stages = tuple(rng.randint(v, v + 4) for _ in range(pp))
        run = Run(stage_layers=stages, virtual_stages=v, lanes=rng.choice((1, 2, 3, 8, 13)), precision=rng.choice(("bf16", "fp8_current")))
        doc = legal_document(run, [rng.randint(1, 9000) for _ in range(rng.randint(1, 40))], rng, rng.choice((1.0, 2.0)))
        check_against_naive(doc, rng)
        seen["holes"] += {m["slot"] for m in doc["microbatches"]} != set(range(max(m["slot"] for m in doc["microbatches"]) + 1))
        seen["groups"] += any(m["cp"] > 1 for m in doc["microbatches"])
    assert seen["groups"]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=MANY)
@given(runs(most_lanes=16), lengths(most=12), st.integers(0, 10**6), st.floats(0.02, 1.2))
def test_the_bound_is_that_of_the_page(run, own, seed, room):
    """Memory below what a plan needs included: then documents need recompute, larger groups, or fit nowhere."""
    doc = legal_document(run, own, random.Random(seed), 1.0)
    static = max(naive.static_bytes(doc, stage, 1) for stage in range(len(run.stage_layers)))
    usable = doc["profile"]["usable_fraction"] * doc["profile"]["memory_bytes"]
    doc["profile"]["memory_bytes"] = float(f"{(static + room * max(0.0, usable - static)) / doc['profile']['usable_fraction']:.9g}")
    plan = from_json({**doc, "hash": naive.plan_hash(doc)})
    expected = naive.lower_bound(doc)
    bound = lower_bound(Basis.of(plan), plan.lengths)
    assert bound == expected if math.isinf(expected) else bound == close(expected, rel=1e-9)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=MANY)
@given(runs(), lengths(), st.integers(0, 10**6), st.sampled_from((1.0, 1.001, 1.05, 3.0, 50.0)))
def test_many_random_legal_plans(run, own, seed, room):
    rng = random.Random(seed)
    check_against_naive(legal_document(run, own, rng, room), rng)
