"""tools/prove.py as a user runs it; engines that are wrong, raise, die or hang are found, named and can be run again."""

import importlib
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from megadcp.config.check import UserError
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.basis import basis_from
from megadcp.plan.verify import verify

TOOLS = Path(__file__).parents[2] / "tools"
NAMES = ("prove", "prove_cases", "prove_compare", "prove_ranks", "prove_run")


@pytest.fixture
def tools(monkeypatch):
    """The tool's modules, fresh."""
    monkeypatch.syspath_prepend(str(TOOLS))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:  # the fixture's end takes them out again
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return found


@pytest.fixture
def prove(tools, tmp_path, capsys):
    def call(*arguments):
        code = tools["prove"].main([*map(str, arguments), "--out", str(tmp_path)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def wrong_gradients(monkeypatch, factor=1 + 1e-7):
    """Several ranks sum gradients a little wrongly; one process does not."""
    finish = GradientBuffers._judge_together

    def wrong(self, pool, losses, targets, clip_norm):
        verdict = finish(self, pool, losses, targets, clip_norm)
        for piece in self.pieces():
            if piece.name.endswith("attention.out.weight"):
                piece.values.mul_(factor)
        return verdict

    monkeypatch.setattr(GradientBuffers, "_judge_together", wrong)


# ------------------------------------------------------------------------------------------------------------------ proofs
def test_cases_are_equal_and_the_worst_can_be_run_again(prove, tmp_path, time_limit):
    code, said, errors = prove("--processes", 2, "--cases", 2, "--seed", 1, "--dtype", "fp64,fp32")
    assert (code, errors) == (0, "")
    assert "all equal to one process: 2 cases" in said
    rows = re.findall(r"(fp64 AdamW|fp32 SGD|fp32 AdamW)((?: +\d\.\de[+-]\d\d){4})", said)
    assert [kind for kind, _ in rows] == ["fp64 AdamW", "fp32 SGD", "fp32 AdamW"] * 2
    for kind, numbers in rows:
        sizes = [float(each) for each in numbers.split()]
        assert max(sizes) < {"fp64 AdamW": 1e-10, "fp32 SGD": 1e-5, "fp32 AdamW": 1.0}[kind]
        assert sizes[2] > 0  # gradients are summed in another order: something was compared
    saved = sorted(set(re.findall(rf"{re.escape(str(tmp_path))}/case-\d-(?:random|joint|static)\.json", said)))
    assert saved
    path = Path(saved[0])
    before = path.read_text()
    code, again, _ = prove("--replay", path, "--dtype", "fp64")
    assert code == 0
    assert "layers, hidden" in again
    assert "all equal to one process: 1 case," in again
    assert path.read_text() == before


def test_bf16_is_shown_beside_the_spread_of_static_layouts(prove, time_limit):
    code, said, _ = prove("--processes", 2, "--case", 0, "--seed", 1, "--dtype", "bf16")
    assert code == 0
    shown = re.search(r"bf16 AdamW gradients +(\S+) +\((\S+)\)", said)
    assert 1e-5 < float(shown[1]) < 1.0
    assert 0 < float(shown[2]) < 1.0
    assert "nothing was judged" in said
    assert "in brackets: the largest difference of two static layouts" in said


def test_one_process_proves_its_plans_too(prove, time_limit):
    code, said, _ = prove("--processes", 1, "--cases", 1, "--dtype", "fp64")
    assert code == 0
    assert "1 lane " in said


@pytest.mark.slow
def test_many_cases(prove):
    assert prove("--processes", 4, "--cases", 16, "--seed", 11)[0] == 0
    assert prove("--processes", 3, "--cases", 4, "--seed", 12)[0] == 0


# ---------------------------------------------------------------------------------------------------------------- failures
def test_a_gradient_that_is_slightly_wrong_is_found(prove, monkeypatch, tmp_path, time_limit):
    with monkeypatch.context() as patch:
        wrong_gradients(patch)
        code, said, _ = prove("--processes", 2, "--case", 0, "--seed", 1, "--dtype", "fp64")
        assert code == 1
        assert re.search(
            r"FAILED case 0, random plans, fp64 AdamW:\n  gradients 1\.0e-07 is above 1e-10, worst at layers\.\d+\.attention\.out\.weight", said
        )
        assert len(re.findall("--replay", said[said.index("failures in 1 case") :])) == 3  # random, joint, static
        path = next(tmp_path.glob("case-0-random.json"))
        assert prove("--replay", path)[0] == 1
    assert prove("--replay", path)[0] == 0


def test_copies_that_differ_are_found(tools):
    held, result, together = tools["prove_compare"].Held, tools["prove_compare"].Result, tools["prove_compare"].together
    ones, other = torch.ones(3).double().numpy(), torch.tensor([1.0, 1.0, 1.5]).double().numpy()
    ranks = [result([1.0], [2.0], [3], [""], [[held("a", None, (3,), 0, ones)]], [held("a", None, (3,), 0, each)]) for each in (ones, other)]
    assert together([ranks[0], ranks[0]]).different == ""
    assert "a: rank 1 holds other values" in together(ranks).different
    ranks[0].losses = [1.0 + 1e-15]
    assert "rank 1 says" in together([ranks[0], ranks[1]]).different


def test_elements_that_nobody_holds_are_an_infinite_error(tools):
    held, compare = tools["prove_compare"].Held, tools["prove_compare"]
    halves = [compare.Result([1.0], [2.0], [3], [""], [[]], [held("a", None, (4,), start, torch.ones(2).double().numpy())]) for start in (0, 2)]
    whole = compare.together(halves)
    assert whole.weights["a"].tolist() == [1.0] * 4
    error = compare._tensors(compare.together(halves[:1]).weights, whole.weights, "")
    assert not error.size <= 1e300
    assert error.where == "a"
    assert compare.largest([compare.Error(1.0, "b"), error]) is error


def broken(how):
    """A rank's work, spoiled on rank 1."""

    def work(rank, job):
        if rank == 1:
            if how == "raise":
                raise ZeroDivisionError("as the test wants")
            if how == "die":
                os._exit(7)
            time.sleep(600)
        return work.real(rank, job)

    return work


EXPECTED = {
    "raise": ("rank 1 of 2: ZeroDivisionError: as the test wants", "Traceback"),
    "die": ("rank 1 of 2: the process left with exit code 7", "exit code 7"),
    "hang": ("hang: not done within 2 s", "in work"),
}


@pytest.mark.parametrize("how", EXPECTED)
def test_a_rank_that_fails_is_shown_and_others_go_on(tools, prove, monkeypatch, how, time_limit):
    work = broken(how)
    work.real = tools["prove_run"].run_job
    monkeypatch.setattr(tools["prove"], "run_job", work)
    code, said, _ = prove("--processes", 2, "--cases", 2, "--seed", 1, "--dtype", "fp64", "--limit", 2 if how == "hang" else 60)
    assert code == 1
    brief, details = EXPECTED[how]
    assert said.count(f"case 0, {brief}") >= 1
    assert details in said
    assert "2 failures in 2 cases" in said
    assert re.search(r"--replay \S+/case-1-random-joint-static\.json", said)


def test_a_planner_that_fails_is_a_failure_of_the_proof(tools, prove, monkeypatch):
    monkeypatch.setattr(tools["prove"], "make_plans", lambda case: 1 // 0)
    code, said, _ = prove("--processes", 2, "--case", 3)
    assert code == 1
    assert "case 3, planning: ZeroDivisionError" in said
    assert "--seed 7 --processes 2 --case 3" in said
    assert "Traceback" in said


# ---------------------------------------------------------------------------------------------------------------- requests
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "0"], "legal here: 1 to 16"),
        (["--dtype", "fp16"], "legal here: fp64, fp32, bf16"),
        (["--cases", "0"], "--cases has to be 1 or more"),
        (["--limit", "nan"], "seconds, above 0"),
        (["--replay", "nowhere.json"], "nowhere.json"),
    ],
)
def test_requests_that_make_no_sense(prove, arguments, said):
    code, _, errors = prove(*arguments)
    assert code == 2
    assert errors.startswith("error: ")
    assert said in errors


def test_files_that_are_no_replay_files(tools, prove, tmp_path):
    case = tools["prove_cases"].draw_case(1, 0, 2)
    whole = tools["prove_cases"].case_to_json(case, tools["prove_cases"].make_plans(case), ["fp64"])
    path = tmp_path / "file.json"
    for change, expected in (
        ({"plans": {}}, "holds no plan"),
        ({"config": {"model": {"layer": 3}}}, "model.layer"),
        ({"documents": {"seed": 1, "lengths": [[3]]}}, "with the lengths of `documents`"),
        ({"dtypes": ["fp8"]}, "in fp8; legal here"),
        ({"bucket": None}, "is no replay file"),
    ):
        path.write_text(json.dumps({**whole, **change}))
        code, _, errors = prove("--replay", path)
        assert code == 2
        assert expected in errors
    plan = json.loads(json.dumps(whole))
    plan["plans"]["random"][0]["microbatches"][0]["documents"] = []
    path.write_text(json.dumps(plan))
    assert prove("--replay", path)[0] == 2


# ----------------------------------------------------------------------------------------------------------------- drawing
def test_cases_cover_what_they_promise(tools):
    """Over 60 cases of 8 processes, without running any."""
    cases = [tools["prove_cases"].draw_case(0, number, 8) for number in range(60)]
    models, parallel = [case.config.model for case in cases], [case.config.parallel for case in cases]
    assert {True, False} == {model.tied for model in models} == {model.qk_norm for model in models} == {model.qkv_bias for model in models}
    assert {model.position for model in models} == {"rope", "learned"}
    assert {model.norm for model in models} == {"rmsnorm", "layernorm"}
    assert {model.gated for model in models} == {True, False}
    assert any(model.kv_heads == 1 < each.tp for model, each in zip(models, parallel, strict=True))
    assert any(model.vocab % each.tp for model, each in zip(models, parallel, strict=True))
    assert any(model.residual_dropout for model in models)
    assert {each.tp for each in parallel} == {1, 2, 4}
    assert {1, 2, 4} <= {each.pp for each in parallel}
    assert {each.virtual_stages for each in parallel} == {1, 2}
    assert any(len(set(each.stage_layers)) > 1 for each in parallel)
    assert any(each.tp > 1 and not each.sequence_parallel for each in parallel)
    worlds = [case.world for case in cases]
    assert max(worlds) == 8 > min(worlds)
    lengths = [length for case in cases for step in case.lengths for length in step]
    assert min(lengths) == 1
    assert max(lengths) == 250
    labels = [case.documents.read(1 << 20)[1] for case in cases]
    counts = [int((each >= 0).sum()) for each in labels]
    assert 0 in counts
    assert 1 in counts
    for case in cases:
        for step, own in enumerate(case.lengths):
            documents = case.documents.step(step)
            assert sum(int((case.documents.read(int(one))[1] >= 0).sum()) for one in documents.ids) > 0
            assert documents.lengths.tolist() == list(own)


def test_random_plans_mix_and_leave_holes(tools):
    cases, draw = tools["prove_cases"], [tools["prove_cases"].draw_case(0, number, 8) for number in range(60)]
    mixed, holes, padded, sizes, kinds, levels = 0, 0, 0, set(), set(), set()
    for case in draw:
        plan = cases.random_plan(case, 0)
        verify(plan)
        assert plan == cases.random_plan(case, 0)
        used = plan.microbatches
        sizes |= {one.cp for one in used}
        kinds |= {one.cp_comm for one in used}
        levels |= {one.recompute.level for one in used}
        mixed += len({one.cp for one in used}) > 1 and len({one.recompute.level for one in used}) > 1
        slots = {one.slot for one in used}
        holes += max(slots) + 1 > len(slots)
        padded += any(size - plan.lengths[each] > 2 * one.cp for one in used for each, size in zip(one.documents, one.padded, strict=True))
    assert sizes == {1, 2, 4, 8}
    assert kinds == {"none", "ring", "all_gather", "ulysses", "2d"}
    assert levels == {"none", "selective", "mlp", "full"}
    assert min(mixed, holes, padded) >= 5


def test_plans_of_the_planner_share_documents_and_recompute(tools):
    cases = [tools["prove_cases"].draw_case(0, number, 8) for number in range(12)]
    plans = [tools["prove_cases"].make_plans(case) for case in cases]
    assert all(list(each) == ["random", "joint", "static"] for each in plans)
    used = [one for each in plans for plan in each["joint"] for one in plan.microbatches]
    assert {1, 2} <= {one.cp for one in used}
    assert len({one.recompute.level for one in used}) > 1
    for each in plans:
        for plan in (*each["joint"], *each["static"]):
            verify(plan)


def test_a_case_survives_its_file(tools):
    cases = tools["prove_cases"]
    case = cases.draw_case(2, 5, 4)
    plans = cases.make_plans(case)
    text = json.dumps(cases.case_to_json(case, plans, ["fp64"]))
    again, read, dtypes = cases.case_from_json(json.loads(text), "here")
    assert again == case
    assert dtypes == ("fp64",)
    assert json.dumps(cases.case_to_json(again, read, dtypes)) == text
    assert basis_from(again.alone().config).layout.lanes == 1
    with pytest.raises(UserError, match="here is no replay file"):
        cases.case_from_json([], "here")
