"""What ranks say when their plans differ."""

import pytest

from megadcp.engine.agree import PlanMismatch, Row, check_rows

GOOD, OTHER = (11, -22, 33, 44), (55, 66, 77, 88)


def rows(*words, step=7, refused=()):
    return [Row(int(rank in refused), step, 10 * rank, one) for rank, one in enumerate(words)]


def test_equal_plans_pass_whatever_the_targets():
    check_rows(rows(GOOD, GOOD, GOOD))


def test_the_ranks_that_differ_from_most_are_named():
    with pytest.raises(
        PlanMismatch, match=r"differ, nothing was run: ranks 1, 3 have step 7, hash 000000000000; the other 3 have step 7, hash 000000000000"
    ):
        check_rows(rows(GOOD, OTHER, GOOD, OTHER, GOOD))


def test_a_tie_is_decided_for_rank_0():
    with pytest.raises(PlanMismatch, match="rank 1 has step 7"):
        check_rows(rows(OTHER, GOOD))


def test_other_steps_are_told():
    with pytest.raises(PlanMismatch, match=r"rank 2 has step 8, .*; the other 2 have step 7"):
        check_rows([*rows(GOOD, GOOD), Row(0, 8, 0, OTHER)])


def test_three_different_plans():
    with pytest.raises(PlanMismatch, match=r"rank 2 has step 7.*; rank 3 has step 9.*; the other 2"):
        check_rows([*rows(GOOD, GOOD, OTHER), Row(0, 9, 0, GOOD)])


def test_a_refused_plan_is_told_before_a_difference():
    with pytest.raises(PlanMismatch, match="rank 1 refused the plan of step 7; nothing was run"):
        check_rows(rows(GOOD, OTHER, GOOD, refused=[1]))


def test_many_ranks_are_not_all_listed():
    with pytest.raises(PlanMismatch, match=r"ranks 1, 3, 5, 7, 9, 11, 13, 15, \.\. have"):
        check_rows(rows(*[GOOD, OTHER] * 20, GOOD))
