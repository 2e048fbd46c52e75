import plan_reference as ref
import pytest

from megadcp.plan.actions import Action, Deadlock, dense_actions, dense_order, lane_actions, slot_count, stage_actions, topological_order, waits_for
from megadcp.plan.step_plan import Microbatch


def short(actions):
    return " ".join(f"{kind}{slot}" + (f".{chunk}" if chunk else "") for kind, slot, chunk in actions)


def test_1f1b_by_hand():
    assert short(stage_actions(4, 3, 1, 0)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert short(stage_actions(4, 3, 1, 1)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert short(stage_actions(4, 3, 1, 2)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert short(stage_actions(1, 3, 1, 0)) == "F0 B0"  # fewer slots than warm-up forwards


def test_interleaved_by_hand():
    # p = 2, v = 2, S = 2: warm-up 2 (p-1-s) + (v-1) p = 4 on stage 0 (all forwards), 2 on stage 1.
    assert short(stage_actions(2, 2, 2, 0)) == "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"
    assert short(stage_actions(2, 2, 2, 1)) == "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"
    with pytest.raises(ValueError, match="multiple of 2"):
        stage_actions(3, 2, 2, 0)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8, 9])
def test_dense_lists_hold_everything_once_and_are_acyclic(slots, p, v):
    if p == 1 and v > 1:
        return
    rounded = slots if v == 1 else -(-slots // p) * p
    for stage, actions in enumerate(dense_actions(rounded, p, v)):
        assert list(actions) == ref.lane_list(slots, p, v, stage)
        assert sorted(actions) == sorted((kind, slot, chunk) for kind in "FB" for slot in range(rounded) for chunk in range(v))
    order = dense_order(rounded, p, v)
    place = {node: number for number, node in enumerate(order)}
    assert len(place) == len(order) == 2 * rounded * p * v
    for stage, action in order:
        needed = waits_for(action, stage, p, v)
        assert needed is None or place[needed] < place[stage, action]


def test_a_cycle_is_found():
    lists = [
        [Action("F", 1, 0), Action("F", 0, 0), Action("B", 0, 0), Action("B", 1, 0)],
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0), Action("B", 1, 0)],
    ]
    assert len(topological_order(lists, 1)) == 8
    lists[0] = [Action("F", 0, 0), Action("B", 0, 0), Action("B", 1, 0), Action("F", 1, 0)]
    with pytest.raises(Deadlock, match="stage 0"):
        topological_order(lists, 1)


def test_a_lane_deletes_and_moves_nothing():
    dense = stage_actions(4, 3, 1, 0)
    assert short(lane_actions(dense, {1: None, 3: None})) == "F1 F3 B1 B3"
    assert short(lane_actions(dense, {})) == ""


def test_slots_are_rounded_up_for_chunks_only():
    one = [Microbatch(4, 0, 1, (0,), (8,))]
    assert slot_count(ref.basis(ref.SMALL), one) == 5
    assert slot_count(ref.basis(ref.SMALL, pp=3), one) == 5
    assert slot_count(ref.basis(ref.SMALL, pp=3, virtual_stages=2), one) == 6
