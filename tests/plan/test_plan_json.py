import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import plan_reference as ref
import pytest

from megadcp.config.check import UserError
from megadcp.plan.step_plan import (
    PlanFormatError,
    Predicted,
    StepPlan,
    document_hash,
    from_json,
    plan_hash,
    round_bytes,
    round_down,
    round_seconds,
    to_json,
)
from megadcp.plan.verify import verify

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_v1.json"
GOLDEN_HASH = "ee21d64de07616cb361406d82bb1b3e7f93277e29730af26044888ae5cec819c"


def sample(seed=1, **layout):
    b = ref.basis(ref.GPT_1B, "fp8_current", lanes=8, **layout)
    plan = ref.random_plan(replace(b, lane_speed=(1.0, 0.9, 1 / 3) + (1.0,) * 5), random.Random(seed))
    return replace(plan, predicted=Predicted(1.5, (61000000000,), 1.25, 2.0, "pack"))


def test_golden_file_keeps_loading():
    """Written by the first version. If this fails, plans that people have kept can't be read any more."""
    text = GOLDEN.read_text(encoding="utf-8")
    plan = from_json(text)
    verify(plan)
    assert plan_hash(plan) == GOLDEN_HASH == json.loads(text)["hash"]
    assert json.loads(text) == to_json(plan)
    assert (plan.step, plan.layout.lanes, plan.stage_layers, plan.model.gated, plan.profile.loss_chunk) == (1200, 8, (6,), True, 4096)
    assert {one.cp for one in plan.microbatches} == {1, 2, 4}
    assert {one.recompute.level for one in plan.microbatches} == {"none", "selective", "mlp", "full"}


def test_round_trip_through_text():
    for layout in (dict(), dict(pp=4, virtual_stages=2)):
        for seed in range(5):
            plan = sample(seed, **layout)
            again = from_json(json.dumps(to_json(plan)))
            assert to_json(again) == to_json(plan)
            assert plan_hash(again) == plan_hash(plan)
            assert replace(again, lane_speed=plan.lane_speed) == plan  # lane_speed is rounded to 9 digits on the way
            verify(again)


def test_hash_is_the_one_that_the_contract_describes():
    document = json.loads(json.dumps(to_json(sample())))
    assert document["hash"] == ref.reference_hash(document) == document_hash(document)
    # worked out from the smallest plan, spelled as one string
    tiny = ref.plan_of(ref.basis(ref.SMALL), [3], [ref.Microbatch(0, 0, 1, (0,), (3,))], step=5)
    import hashlib

    text = (
        '{"lane_speed":[],"layout":{"lanes":1,"lanes_per_node":8,"pp":1,"sequence_parallel":true,"tp":1,"virtual_stages":1},"lengths":[3],'
        '"microbatches":[{"cp":1,"cp_comm":"none","documents":[0],"lane":0,"padded":[3],"recompute":{"layers":0,"level":"none"},"slot":0}],'
        '"model":{"ffn":640,"gated":true,"head_dim":32,"heads":8,"hidden":256,"kv_heads":4,"layers":6,"tied":false,"vocab":1000},'
        '"precision":"bf16","profile":{"attention_flops":384000000000000.0,"attention_half_length":600.0,"gemm_flops":480000000000000.0,'
        '"gemm_half_tokens":512.0,"gpus_per_node":8,"layer_overhead_seconds":0.0002,"loss_chunk":4096,"memory_bandwidth":4000000000000.0,'
        '"memory_bytes":141000000000.0,"net_bytes":45000000000.0,"node_bytes":370000000000.0,"node_latency":1e-05,"reduce_bytes":300000000000.0,'
        '"reduce_overlap":0.7,"ring_step_seconds":1.5e-05,"tp_exposed":0.5,"usable_fraction":0.9},"schedule":"none","stage_layers":[6],"step":5,'
        '"unit":1,"version":1}'
    )
    assert plan_hash(tiny) == hashlib.sha256(text.encode()).hexdigest()


def test_hash_leaves_predictions_out_and_nothing_else():
    document = to_json(sample())
    same = copy.deepcopy(document)
    same["predicted"]["seconds"] = 9.0
    same["microbatches"][0]["seconds"] *= 2
    same["microbatches"][0]["bytes"] += 1
    assert document_hash(same) == document["hash"]
    from_json(same)

    def leaves(node, path=()):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            yield from leaves(value, (*path, key))
        if not isinstance(node, (dict, list)):
            yield path

    changed = 0
    for path in leaves(document):
        if path[0] in ("hash", "predicted", "version") or path[-1] in ("seconds", "bytes"):
            continue
        mutated = copy.deepcopy(document)
        node = mutated
        for key in path[:-1]:
            node = node[key]
        value = node[path[-1]]
        choices = {"level": "mlp", "cp_comm": "ring", "precision": "bf16", "schedule": "1f1b"}
        node[path[-1]] = (
            (not value)
            if isinstance(value, bool)
            else choices[path[-1]]
            if isinstance(value, str)
            else value * 1.5 + (value == 0)
            if isinstance(value, float)
            else value + 1
        )
        if node[path[-1]] == value:
            continue
        with pytest.raises(PlanFormatError, match="hash: the plan was changed"):
            from_json(mutated)
        from_json(mutated, check_hash=False)
        changed += 1
    assert changed > 60


def test_a_float_written_as_an_integer_is_the_same_plan():
    document = to_json(sample())
    document["profile"]["gemm_half_tokens"] = 512
    document["lane_speed"][0] = 1
    assert from_json(document) == from_json(to_json(sample()))  # keeping its hash
    document["hash"] = document_hash(document)
    assert from_json(document).profile.gemm_half_tokens == 512.0  # or hashed as it is written


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "version: this program reads plans of version 1, found int 2"),
        (("version",), True, "version: .* found bool True"),
        (("step",), 1.0, "step: expected an integer, found float 1.0"),
        (("step",), True, "step: expected an integer, found bool True"),
        (("layout", "lanes"), "8", "layout.lanes: expected an integer, found str '8'"),
        (("layout", "sequence_parallel"), 1, "layout.sequence_parallel: expected true or false, found int 1"),
        (("layout",), [], "layout: expected an object, found list"),
        (("lengths",), "12", "lengths: expected a list, found str"),
        (("lengths", 2), None, r"lengths\[2\]: expected an integer, found NoneType None"),
        (("profile", "gemm_flops"), float("nan"), "profile.gemm_flops: expected a finite number, found float nan"),
        (("profile", "gemm_flops"), 10**400, "profile.gemm_flops: expected a finite number, found int 1000"),
        (("schedule",), "gpipe", "schedule: 'gpipe' is not known; legal here: none, 1f1b, interleaved"),
        (("microbatches", 1, "recompute", "level"), "some", r"microbatches\[1\].recompute.level: 'some' is not known; legal here: none, selective"),
        (("microbatches", 1, "cp_comm"), 3, r"microbatches\[1\].cp_comm: expected a string, found int 3"),
        (("predicted", "policy"), None, "predicted.policy: expected a string"),
    ],
)
def test_wrong_types_are_named(path, value, message):
    document = to_json(sample())
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(PlanFormatError, match=message) as caught:
        from_json(document)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError)


def test_missing_and_unknown_fields_are_named():
    def nodes(document):
        one = document["microbatches"][0]
        named = {f"{name}.": document[name] for name in ("layout", "profile", "predicted")}
        return {"": document, "microbatches[0].": one, "microbatches[0].recompute.": one["recompute"], **named}

    for prefix, node in nodes(to_json(sample())).items():
        for name in node:
            document = to_json(sample())
            del nodes(document)[prefix][name]
            with pytest.raises(PlanFormatError) as caught:
                from_json(document)
            assert str(caught.value).startswith(f"{prefix}{name}: ")
        document = to_json(sample())
        nodes(document)[prefix]["colour"] = 1
        with pytest.raises(PlanFormatError) as caught:
            from_json(document)
        assert str(caught.value).startswith(f"{prefix}colour: unknown field; known here: ")


def test_what_is_no_plan_at_all():
    for text in ("{", "[1]", "3", b"\xff\xfe", '"plan"'):
        with pytest.raises(PlanFormatError, match=r"plan: |not a plan"):
            from_json(text)


def test_rounding():
    assert round_seconds(1.23456789) == 1.23457
    assert round_bytes(61234567890.5) == 61234600000
    assert round_down(1.23456789) == 1.23456
    assert round_down(1.23456) == 1.23456
    assert round_down(0.583336) == 0.583336  # stays what it is when it is rounded again
    assert round_down(0.0) == 0.0
    rng = random.Random(0)
    for _ in range(1000):
        value = 10 ** rng.uniform(-9, 6)
        assert value * (1 - 1e-5) < round_down(value) <= value
        assert round_down(round_down(value)) == round_down(value)


def test_a_plan_is_a_value():
    assert sample() == sample()
    assert hash(sample()) == hash(sample())
    assert isinstance(sample(), StepPlan)
    with pytest.raises(AttributeError):
        sample().step = 3
