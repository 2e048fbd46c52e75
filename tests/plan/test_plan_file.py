import json
import random
import sys
from dataclasses import replace

import plan_reference as ref
import pytest
import zstandard

from megadcp.config.check import UserError
from megadcp.plan.plan_file import MAGIC, PlanWriter, find_plans, plans_file, read_plans, record_of
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


# ----------------------------------------------------------------------------------------------------------------- packed
def unpacked(path):
    reader = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True)
    return reader.read()


def test_packed_holds_the_same_lines(tmp_path):
    packed, plain = tmp_path / "plans.jsonl.zst", tmp_path / "plans.jsonl"
    for path in (packed, plain):
        assert write(path, plans(0, 3)) == []
    assert unpacked(packed) == plain.read_bytes()
    assert packed.stat().st_size < 0.7 * plain.stat().st_size
    assert read(packed) == (plans(0, 3), [])
    named = tmp_path / "plans"
    packed.rename(named)
    assert read(named) == (plans(0, 3), [])  # seen from the content


def test_packed_resumes_at_any_step(tmp_path):
    path = tmp_path / "plans.jsonl.zst"
    write(path, plans(0, 3))
    refit = [replace(plan, profile=Profile(**{**vars(plan.profile), "attention_flops": 3e14})) for plan in plans(3, 6)]
    assert write(path, refit, first_step=3) == []
    whole = path.read_bytes()
    everything = plans(0, 3) + refit
    for step in range(7):
        said = write(path, everything[step:], first_step=step)
        assert path.read_bytes() == whole
        assert len(said) == (step < 6)
    with PlanWriter(path, 6) as writer, pytest.raises(ValueError, match="step 5 after step 5"):
        writer.append(everything[5])
    write(path, plans(0, 1), first_step=0)
    assert read(path) == (plans(0, 1), [])


def test_packed_and_interrupted_anywhere(tmp_path):
    path = tmp_path / "plans.jsonl.zst"
    ends = [0]
    for step in range(3):
        write(path, plans(step, step + 1), first_step=step)
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in [*range(0, len(whole), 61), *(end + more for end in ends[1:-1] for more in (-1, 0, 1, 3, 4, 5))]:
        for tail in (b"", b"\0" * 70):
            path.write_bytes(whole[:cut] + tail)
            some, said = read(path)
            frames = sum(end <= cut for end in ends) - 1
            assert some == plans(0, frames)
            assert len(said) == (cut + len(tail) != ends[frames])
            assert all("bytes are not a complete frame (interrupted or damaged); read up to the last complete frame" in one for one in said)
            assert len(write(path, plans(frames, 3), first_step=frames)) == len(said)
            assert path.read_bytes() == whole


def test_packed_and_damaged_before_the_end(tmp_path):
    path = tmp_path / "plans.jsonl.zst"
    write(path, plans(0, 2))
    second = path.stat().st_size
    write(path, plans(2, 4), first_step=2)
    whole = path.read_bytes()
    for at in range(second + 5, second + 400, 37):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with pytest.raises(PlanFormatError, match=f"no whole frame at byte {second}, but one follows"):
            read(path)
        with pytest.raises(PlanFormatError, match=f"from byte {second} on are no frame, but whole frames follow"):
            PlanWriter(path, 1)
        assert path.stat().st_size == len(whole)
    text = zstandard.ZstdCompressor(write_checksum=True).compress(b'{"version":1,"step":1,\n')
    path.write_bytes(whole[:second] + text + whole[second:])
    for use in (read, PlanWriter):
        with pytest.raises(PlanFormatError, match="does not hold lines of JSON objects"):
            use(path)


def test_a_frame_mark_inside_a_frame(tmp_path):
    """Four bytes in the middle of a frame may look like the beginning of one: the whole frame is found, and (here) its content refused."""
    path = tmp_path / "plans.jsonl.zst"
    write(path, plans(0, 1))
    begin, content = path.stat().st_size, b"some " + MAGIC + b" bytes"
    raw = MAGIC + bytes([0x24, len(content)]) + (1 | len(content) << 3).to_bytes(3, "little") + content  # one raw block, checksum after it
    path.write_bytes(path.read_bytes() + raw + zstandard.ZstdCompressor(write_checksum=True).compress(content)[-4:])
    assert unpacked(path).endswith(content)
    with pytest.raises(PlanFormatError, match=f"the frame from byte {begin} to {path.stat().st_size} does not hold lines"):
        PlanWriter(path, 1)


def test_names_that_do_not_fit_the_content(tmp_path):
    packed, plain = tmp_path / "plans.jsonl.zst", tmp_path / "plans.jsonl"
    write(packed, plans(0, 1))
    write(plain, plans(0, 1))
    packed.rename(tmp_path / "other")
    plain.rename(packed)
    (tmp_path / "other").rename(plain)
    for path, kind in ((packed, "zstd"), (plain, "text")):
        before = path.read_bytes()
        with pytest.raises(PlanFormatError, match=f"its name says {kind}"):
            PlanWriter(path, 1)
        assert path.read_bytes() == before
        assert read(path) == (plans(0, 1), [])


def test_one_file_a_run(tmp_path, monkeypatch):
    packed, plain, said = tmp_path / "plans.jsonl.zst", tmp_path / "plans.jsonl", []
    with pytest.raises(UserError, match=r"holds no plans; give a run folder with plans\.jsonl or plans\.jsonl\.zst"):
        find_plans(tmp_path)
    assert plans_file(tmp_path, False, 0, said.append) == plain
    assert plans_file(tmp_path, True, 0, said.append) == packed
    assert said == []
    write(plain, plans(0, 4))
    assert find_plans(tmp_path) == find_plans(plain) == plain
    assert plans_file(tmp_path, True, 4, said.append) == plain  # goes on as it began
    assert said.pop() == f"plan.compress=true holds for new runs: this one goes on with {plain}"
    assert plans_file(tmp_path, True, 0, said.append) == packed  # begins anew
    assert said.pop() == f"{plain}: removed; this run begins at step 0 and writes its plans to plans.jsonl.zst"
    assert not plain.exists()
    write(packed, plans(0, 4))
    assert find_plans(tmp_path) == packed
    assert list(read_plans(tmp_path)) == plans(0, 4)
    assert plans_file(tmp_path, False, 4, said.append) == packed
    assert said.pop() == f"plan.compress=false holds for new runs: this one goes on with {packed}"
    write(plain, plans(0, 4))
    assert plans_file(tmp_path, False, 4, said.append) == plain
    assert "has both" in said.pop()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert plans_file(tmp_path, False, 4, said.append) == plain
    with pytest.raises(UserError, match=r"pip install zstandard, or set plan\.compress=false"):
        plans_file(tmp_path / "new", True, 0)
    plain.unlink()
    with pytest.raises(UserError, match=r"pip install zstandard$"):
        plans_file(tmp_path, False, 4)  # it has begun packed


def test_opening_reads_the_end_only(tmp_path):
    """Damage far before the step that a run goes on from is nothing to it; who reads all plans hears of it."""
    path = tmp_path / "plans.jsonl"
    write(path, plans(0, 6))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b"x" * 40 + b"\n", *lines[5:]]))
    assert write(path, plans(5, 6), first_step=5) == [f"{path}: 1 plans from step 5 on will be written again"]
    assert path.read_bytes().splitlines(keepends=True)[5:] == lines[5:]
    with pytest.raises(PlanFormatError, match=r"plans.jsonl:5: not a complete JSON object"):
        read(path)
    path.write_bytes(b"".join([*lines[:7], lines[7][:-20] + b"}\n", lines[8]]))  # the last plan that is kept is read whole
    with pytest.raises(PlanFormatError, match=r"plans.jsonl:8: not a complete JSON object"):
        PlanWriter(path, 5)


def test_a_record_made_elsewhere_is_what_is_written(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, plans(0, 3))
    with PlanWriter(two) as writer:
        for plan in plans(0, 3):
            writer.append(plan, record_of(plan))
    assert one.read_bytes() == two.read_bytes()
    assert record_of(plans(1, 2)[0]).hash == plan_hash(plans(1, 2)[0])
