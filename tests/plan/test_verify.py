import json
import random
from dataclasses import replace

import plan_reference as ref
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig
from megadcp.plan import verify as verify_module
from megadcp.plan.actions import Action, dense_actions, topological_order
from megadcp.plan.basis import Basis
from megadcp.plan.memory import MemoryModel
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import Microbatch, PlanFormatError, Recompute, document_hash, from_json, to_json
from megadcp.plan.verify import INVARIANTS, PlanError, verify

LAYOUTS = [
    dict(),
    dict(lanes=8),
    dict(lanes=8, precision="fp8_current", tp=2),
    dict(lanes=6, pp=2),
    dict(lanes=4, pp=3, stage_layers=(3, 2, 1)),
    dict(lanes=4, pp=2, virtual_stages=3),
    dict(lanes=4, pp=3, virtual_stages=2, precision="fp8_block"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_legal_plans_pass(layout):
    for seed in range(5):
        verify(ref.random_plan(ref.basis(ref.SMALL, **layout), random.Random(seed)))


def base():
    """Eight lanes, fp8: groups of 1, 2 and 4, every level."""
    lengths = [30000, 20, 700, 5000, 1, 333, 8000, 2000, 64]
    b = ref.basis(ref.SMALL, "fp8_current", lanes=8)

    def one(slot, lane, cp, documents, level="none", layers=0, kind="none"):
        return Microbatch(slot, lane, cp, documents, ref.pad([lengths[k] for k in documents], cp, b.align), Recompute(level, layers), kind)

    return ref.plan_of(
        b,
        lengths,
        [
            one(0, 0, 4, (0, 4), "selective", 2, "ulysses"),
            one(0, 4, 2, (6,), "mlp", 6, "all_gather"),
            one(0, 6, 1, (3, 2)),
            one(1, 2, 2, (7, 1), "none", 0, "ring"),
            one(1, 5, 1, (8, 5), "full", 3),
        ],
    )


def changed(plan, index, **fields):
    return replace(plan, microbatches=tuple(replace(one, **fields) if k == index else one for k, one in enumerate(plan.microbatches)))


def rescored(plan):
    """The same arrangement with the seconds and bytes that belong to it."""
    b = ref.Basis.of(plan)
    return replace(plan, microbatches=ref.score(b, plan.microbatches))


def padded(plan, index, *values):
    return rescored(changed(plan, index, padded=values))


MUTATIONS = [
    ("version", 0, lambda p: replace(p, version=2)),
    ("negative step", 0, lambda p: replace(p, step=-1)),
    ("no documents", 0, lambda p: replace(p, lengths=(), microbatches=())),
    ("a length of 0", 0, lambda p: replace(p, lengths=(*p.lengths[:-1], 0))),
    ("schedule", 0, lambda p: replace(p, schedule="1f1b")),
    ("stage layers", 0, lambda p: replace(p, stage_layers=(5,))),
    ("lane speed of too few lanes", 0, lambda p: replace(p, lane_speed=(1.0,))),
    ("lane speed of 0", 0, lambda p: replace(p, lane_speed=(0.0,) * 8)),
    ("rate of 0", 0, lambda p: replace(p, profile=replace(p.profile, net_bytes=0.0))),
    ("document twice", 1, lambda p: changed(p, 4, documents=(8, 2))),
    ("document in no place", 1, lambda p: replace(p, lengths=(*p.lengths, 5))),
    ("document that is not there", 1, lambda p: changed(p, 4, documents=(8, 9))),
    ("negative document", 1, lambda p: changed(p, 4, documents=(8, -1))),
    ("empty microbatch", 1, lambda p: changed(p, 4, documents=(), padded=())),
    ("no microbatch", 1, lambda p: replace(p, microbatches=())),
    ("cp of 3", 2, lambda p: changed(p, 0, cp=3)),
    ("cp of 0", 2, lambda p: changed(p, 2, cp=0)),
    ("group off its grid", 2, lambda p: changed(p, 1, lane=5)),
    ("group past the end", 2, lambda p: changed(p, 1, lane=8)),
    ("negative lane", 2, lambda p: changed(p, 2, lane=-1)),
    ("lane twice in a slot", 3, lambda p: changed(p, 3, slot=0)),
    ("negative slot", 3, lambda p: changed(p, 3, slot=-1)),
    ("shorter than the document", 4, lambda p: padded(p, 2, 4996, 708)),
    ("no multiple of 2 cp", 4, lambda p: padded(p, 3, 2002, 46)),
    ("no multiple of the unit", 4, lambda p: padded(p, 2, 5000, 705)),
    ("one padded length too few", 4, lambda p: changed(p, 2, padded=(5712,))),
    ("another unit", 4, lambda p: replace(p, unit=128)),
    ("unit of another precision", 4, lambda p: rescored(replace(p, precision="bf16"))),
    ("less memory", 5, lambda p: replace(p, profile=replace(p.profile, memory_bytes=2e8))),
    ("less usable memory", 5, lambda p: replace(p, profile=replace(p.profile, usable_fraction=0.001))),
    ("recompute without layers", 7, lambda p: changed(p, 1, recompute=Recompute("mlp", 0))),
    ("layers without recompute", 7, lambda p: changed(p, 2, recompute=Recompute("none", 1))),
    ("more layers than the stage has", 7, lambda p: changed(p, 1, recompute=Recompute("mlp", 7))),
    ("negative layers", 7, lambda p: changed(p, 1, recompute=Recompute("mlp", -1))),
    ("unknown level", 7, lambda p: changed(p, 1, recompute=Recompute("some", 1))),
    ("seconds", 8, lambda p: changed(p, 3, seconds=p.microbatches[3].seconds * 1.0002)),
    ("no seconds", 8, lambda p: changed(p, 3, seconds=float("nan"))),
    ("bytes", 8, lambda p: changed(p, 3, bytes=int(p.microbatches[3].bytes * 0.9998))),
    ("other level", 8, lambda p: changed(p, 1, recompute=Recompute("full", 6))),
    ("fewer layers", 8, lambda p: changed(p, 1, recompute=Recompute("mlp", 5))),
    ("other kind", 8, lambda p: changed(p, 0, cp_comm="ring")),
    ("slower device", 8, lambda p: replace(p, profile=replace(p.profile, gemm_flops=7e14))),
    ("more padding", 8, lambda p: changed(p, 2, padded=(5000, 728))),
    ("another model", 8, lambda p: replace(p, model=replace(p.model, ffn=704))),
    ("another node size", 8, lambda p: replace(p, layout=replace(p.layout, lanes_per_node=2))),
    ("group without communication", 9, lambda p: changed(p, 0, cp_comm="none")),
    ("communication without group", 9, lambda p: changed(p, 2, cp_comm="ring")),
    ("2d with A = P", 9, lambda p: changed(p, 0, cp_comm="2d")),
    ("unknown kind", 9, lambda p: changed(p, 0, cp_comm="pigeon")),
]


def test_the_base_is_legal():
    verify(base())


@pytest.mark.parametrize(("name", "invariant", "mutate"), MUTATIONS, ids=[name for name, *_ in MUTATIONS])
def test_every_mutation_is_refused_by_name(name, invariant, mutate):
    plan = mutate(base())
    with pytest.raises(PlanError) as caught:
        verify(plan)
    assert (caught.value.invariant, caught.value.name) == (invariant, INVARIANTS[invariant]), str(caught.value)
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value)
    document = json.loads(json.dumps(to_json(plan)))
    if invariant in (0, 7, 8, 9) and (plan.version != 1 or "NaN" in json.dumps(document) or "unknown" in name):
        return  # refused while loading, whatever the hash
    if name not in ("seconds", "bytes"):  # predictions are not in the hash
        with pytest.raises(PlanFormatError, match="hash"):
            from_json({**document, "hash": to_json(base())["hash"]})
    with pytest.raises(PlanError) as caught:
        verify(from_json({**document, "hash": document_hash(document)}))
    assert caught.value.invariant == invariant


def test_ulysses_needs_heads_for_every_lane():
    plan = ref.plan_of(ref.basis(ref.SMALL, lanes=8), [64], [Microbatch(0, 0, 8, (0,), (64,), cp_comm="ring")])
    verify(plan)
    with pytest.raises(PlanError, match=r"invariant 9 .*cp_comm=ulysses with cp=8.*legal here: ring, all_gather, 2d"):
        verify(changed(plan, 0, cp_comm="ulysses"))


def test_memory_is_that_of_every_stage():
    b = ref.basis(ref.SMALL, pp=2, hardware=replace(ref.H200, memory_bytes=3e8, loss_chunk=64))
    tokens = [4000, 4000]
    plan = ref.plan_of(b, tokens, [Microbatch(slot, 0, 1, (slot,), (count,)) for slot, count in enumerate(tokens)])
    _, peaks = ref.event_simulation(b, plan.microbatches)
    assert peaks[0] > peaks[1]  # two microbatches in flight on the first stage
    room = max(peaks[stage] + ref.stage_static(b, stage, 0) for stage in (0, 1)) / 0.9
    verify(replace(plan, profile=replace(plan.profile, memory_bytes=room * 1.001)))
    with pytest.raises(PlanError, match=r"invariant 5 \(memory budget\): stage 0 needs"):
        verify(replace(plan, profile=replace(plan.profile, memory_bytes=room * 0.999)))


def test_communicators_take_memory():
    def need(*groups):
        b = ref.basis(ref.SMALL, lanes=8)
        ones = [Microbatch(slot, 0, cp, (slot,), (64 * cp,), cp_comm="ring" if cp > 1 else "none") for slot, cp in enumerate(groups)]
        plan = ref.plan_of(b, [64 * cp for cp in groups], ones)
        low, high = 0.0, 1e11
        for _ in range(60):
            middle = (low + high) / 2
            try:
                verify(replace(plan, profile=replace(plan.profile, memory_bytes=middle)))
                high = middle
            except PlanError:
                low = middle
        return high * 0.9

    assert need(2, 4) - need(2, 2) == pytest.approx(0.5e9, rel=1e-6)
    assert need(2, 1) - need(1, 1) == pytest.approx(0.5e9, rel=1e-6)


def test_cyclic_lists_are_refused(monkeypatch):
    b = ref.basis(ref.SMALL, lanes=2, pp=2)
    plan = ref.random_plan(b, random.Random(1), slots=2)
    verify(plan)
    good = dense_actions(2, 2, 1)
    bad = ((Action("F", 0, 0), Action("B", 0, 0), Action("B", 1, 0), Action("F", 1, 0)), good[1])
    monkeypatch.setattr(verify_module, "used_actions", lambda *_: bad)
    monkeypatch.setattr(verify_module, "used_order", lambda *_: topological_order(bad, 1))
    with pytest.raises(PlanError, match=r"invariant 6 \(deadlock freedom\).*the microbatch at slot 1, lane \d waits for ever"):
        verify(plan)


def test_the_wait_for_graph_finds_compact_lists():
    """Each lane making its own compact list deadlocks: the smallest case of docs/plan.md, sorted by the same code."""
    b = ref.basis(ref.SMALL, lanes=4, pp=2)
    ones = [
        Microbatch(0, 0, 2, (0,), (64,), cp_comm="ring"),
        Microbatch(0, 2, 2, (1,), (64,), cp_comm="ring"),
        Microbatch(1, 2, 1, (2,), (64,)),
        Microbatch(2, 0, 2, (3,), (64,), cp_comm="ring"),
    ]
    plan = ref.plan_of(b, [64] * 4, ones)
    verify(plan)
    dense = dense_actions(3, 2, 1)
    assert verify_module._unsorted(b, plan.microbatches, dense) == ""
    swapped = (dense[0], (Action("F", 2, 0), Action("B", 2, 0), *(action for action in dense[1] if action.slot != 2)))
    assert "waits for ever" in verify_module._unsorted(b, plan.microbatches, swapped)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(LAYOUTS))
def test_any_single_change_is_refused_or_harmless(seed, layout):
    """Change one number of a legal plan: either an invariant is named, or the plan is still legal by an independent check."""
    rng = random.Random(seed)
    b = ref.basis(ref.SMALL, **layout)
    plan = ref.random_plan(b, rng)
    index = rng.randrange(len(plan.microbatches))
    one = plan.microbatches[index]
    field = rng.choice(["slot", "lane", "cp", "documents", "padded", "recompute", "cp_comm"])
    value = {
        "slot": rng.randint(-1, 4),
        "lane": rng.randint(-1, b.layout.lanes),
        "cp": rng.randint(0, 8),
        "documents": tuple(rng.randrange(len(plan.lengths)) for _ in one.documents),
        "padded": tuple(length + rng.choice([-1, 0, 1, 16]) for length in one.padded),
        "recompute": Recompute(rng.choice(["none", "mlp", "full"]), rng.randint(0, 4)),
        "cp_comm": rng.choice(["none", "ring", "ulysses", "2d"]),
    }[field]
    mutated = changed(plan, index, **{field: value})
    try:
        verify(mutated)
    except PlanError:
        return
    ref.event_simulation(b, mutated.microbatches)  # fails on a deadlock
    seconds, new = max(ref.stage_seconds(b, mutated.microbatches[index])), mutated.microbatches[index]
    assert new.seconds == pytest.approx(seconds, rel=1e-4)
    taken = [(m.slot, lane) for m in mutated.microbatches for lane in range(m.lane, m.lane + m.cp)]
    assert len(taken) == len(set(taken))
    assert sorted(k for m in mutated.microbatches for k in m.documents) == list(range(len(plan.lengths)))
    assert all(p >= plan.lengths[k] for m in mutated.microbatches for k, p in zip(m.documents, m.padded, strict=True))


def test_bytes_of_a_tiny_microbatch_may_be_rounded():
    """90.5 bytes are stored as 90: more than 1e-4 of them, but no other prediction."""
    tiny = ModelConfig(layers=1, hidden=10, heads=4, kv_heads=2, head_dim=4, ffn=7, vocab=30)
    plan = planner_for(ref.config(tiny, tp=4, sequence_parallel=False))(0, [1])
    assert MemoryModel(Basis.of(plan)).bytes(plan.microbatches[0]) == 90.5
    verify(plan)
    with pytest.raises(PlanError, match="bytes=88"):
        verify(replace(plan, microbatches=(replace(plan.microbatches[0], bytes=88),)))
