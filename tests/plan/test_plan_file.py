import json
import random
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.plan.plan_file import PlanWriter, read_plans
from megadcp.plan.step_plan import PlanFormatError, Profile, plan_hash, sha256_of, to_json


def plans(first, last):
    b = ref.basis(ref.SMALL, lanes=4)
    return [replace(ref.random_plan(b, random.Random(step)), step=step) for step in range(first, last)]


def write(path, some, first_step=0):
    said = []
    with PlanWriter(path, first_step, said.append) as writer:
        for plan in some:
            writer.append(plan)
    return said


def read(path, **options):
    said = []
    return list(read_plans(path, said.append, **options)), said


def test_what_never_changes_stands_once(tmp_path):
    path = tmp_path / "plans.jsonl"
    assert write(path, plans(0, 3)) == []
    assert read(path) == (plans(0, 3), [])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [("sha256" in line) for line in lines] == [True] * 3 + [False] * 3
    for line in lines[3:]:
        assert [set(line[name]) for name in ("model", "profile", "stage_layers")] == [{"ref"}] * 3
        assert line["hash"] == plan_hash(plans(0, 3)[line["step"]])  # of the plan with its values in place
    for line in lines[:3]:
        assert line["sha256"] == sha256_of(line["value"])


def test_a_new_profile_gets_its_own_header(tmp_path):
    path = tmp_path / "plans.jsonl"
    first, second, third = plans(0, 3)
    refit = replace(second, profile=Profile(**{**vars(second.profile), "attention_flops": 3e14}))
    write(path, [first, refit, third])
    assert [plan.profile.attention_flops for plan in read(path)[0]] == [384e12, 3e14, 384e12]
    assert sum("sha256" in line for line in path.read_text().splitlines()) == 4


def test_resuming_leaves_each_step_once(tmp_path):
    path = tmp_path / "plans.jsonl"
    write(path, plans(0, 6))
    whole = path.read_bytes()
    said = write(path, plans(3, 6), first_step=3)
    assert path.read_bytes() == whole
    assert said == [f"{path}: 3 plans from step 3 on will be written again"]
    write(path, plans(6, 8), first_step=6)
    assert read(path) == (plans(0, 8), [])
    write(path, plans(0, 2), first_step=0)  # a new start
    assert read(path) == (plans(0, 2), [])


def test_a_step_is_written_once_and_in_order(tmp_path):
    with PlanWriter(tmp_path / "plans.jsonl") as writer:
        writer.append(plans(3, 4)[0])
        for step in (3, 2):
            with pytest.raises(ValueError, match=f"step {step} after step 3"):
                writer.append(plans(step, step + 1)[0])
    with PlanWriter(tmp_path / "plans.jsonl", 4) as writer, pytest.raises(ValueError, match="step 3 after step 3"):
        writer.append(plans(3, 4)[0])


def test_interrupted_anywhere(tmp_path):
    path, complete = tmp_path / "plans.jsonl", tmp_path / "complete.jsonl"
    write(complete, plans(0, 3))
    whole = complete.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [*range(0, len(whole), 97), *ends, *(end - 1 for end in ends)]:
        path.write_bytes(whole[:cut])
        lines = sum(end <= cut for end in ends)
        torn = cut not in (0, *ends)
        some, said = read(path)
        assert some == plans(0, max(0, lines - 3))
        assert len(said) == torn
        if torn:
            assert f"line {lines + 1} is not a complete JSON object" in said[0]
            assert "read up to the last complete line" in said[0]
        said = write(path, plans(len(some), 3), first_step=len(some))
        assert path.read_bytes() == whole
        assert len(said) == torn


def test_a_last_line_of_zeros_counts_as_interrupted(tmp_path):
    path = tmp_path / "plans.jsonl"
    write(path, plans(0, 2))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 40 + b"\n")
    assert read(path)[0] == plans(0, 2)
    assert len(write(path, plans(2, 3), first_step=2)) == 1
    assert read(path) == (plans(0, 3), [])


def test_damage_before_the_end_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "plans.jsonl"
    write(path, plans(0, 3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + b'{"step": 1, \n' + lines[5])
    with pytest.raises(PlanFormatError, match=r"plans.jsonl:5: not a complete JSON object"):
        read(path)
    with pytest.raises(PlanFormatError, match=r"plans.jsonl:5"):
        PlanWriter(path)
    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(PlanFormatError, match=r"plans.jsonl:3: model: no header line"):
        read(path)
    path.write_bytes(lines[0].replace(b'"layers":6', b'"layers":7') + b"".join(lines[1:]))
    with pytest.raises(PlanFormatError, match=r"plans.jsonl:1: header line does not hash"):
        read(path)
    path.write_bytes(b"".join(lines[:3]) + lines[3].replace(b'"lane":0', b'"lane":1', 1) + b"".join(lines[4:]))
    with pytest.raises(PlanFormatError, match=r"plans.jsonl:4: hash: the plan was changed"):
        read(path)
    assert len(read(path, check_hash=False)[0]) == 3


def test_plans_without_references_are_read_too(tmp_path):
    path = tmp_path / "plans.jsonl"
    path.write_text("".join(json.dumps(to_json(plan)) + "\n" for plan in plans(0, 2)))
    assert read(path) == (plans(0, 2), [])
