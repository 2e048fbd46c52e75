"""Slow lanes: found from what ranks measured, told alike on all of them, and handed to the planner by a rule."""

import numpy as np
import pytest

from megadcp.config.check import UserError
from megadcp.engine.stragglers import LaneSpeeds, SpeedRules
from megadcp.mesh.coords import Mesh


def table(mesh: Mesh, seconds: dict[int, float], predicted: float = 1.0) -> np.ndarray:
    """[ranks, 2]: 1 second everywhere, except on the ranks named."""
    rows = np.array([[1.0, predicted]] * mesh.world)
    for rank, value in seconds.items():
        rows[rank, 0] = value
    return rows


def fed(mesh: Mesh, rows: np.ndarray, steps: int = 12, ahead: int = 1, **named) -> LaneSpeeds:
    speeds = LaneSpeeds(mesh, ahead, **named)
    for step in range(steps):
        speeds.observe(step, rows)
    return speeds


def test_a_slow_lane_is_found_and_gets_less_work():
    mesh = Mesh(lanes=4)
    speeds = fed(mesh, table(mesh, {2: 1.6}))
    assert speeds.slowness() == pytest.approx([1.0, 1.0, 1.6, 1.0])
    assert speeds.speeds(14) == (1.0, 1.0, 0.62, 1.0)


def test_of_a_lanes_ranks_the_one_that_does_not_wait_tells():
    """tp: its ranks wait for each other, so the least counts; stages: the slowest counts."""
    mesh = Mesh(lanes=2, tp=2, pp=2)
    waiting = table(mesh, {mesh.rank(0, 0, 1): 3.0})  # waits for the other tp rank, which took 1 s
    assert LaneSpeeds(mesh, 1).observe(0, waiting) == [1.0, 1.0]
    slow_stage = table(mesh, {mesh.rank(1, 1, 0): 2.0, mesh.rank(1, 1, 1): 2.5})
    assert LaneSpeeds(mesh, 1).observe(0, slow_stage) == [1.0, 2.0]


def test_nothing_is_told_before_enough_steps_and_nothing_follows_noise():
    mesh = Mesh(lanes=2)
    assert fed(mesh, table(mesh, {1: 2.0}), steps=9).slowness() == [1.0, 1.0]
    assert fed(mesh, table(mesh, {1: 1.04}), steps=50).speeds(52) == ()
    rng, speeds = np.random.default_rng(0), LaneSpeeds(mesh, 1)
    for step in range(200):
        speeds.observe(step, table(mesh, {0: rng.uniform(0.95, 1.05), 1: rng.uniform(0.95, 1.05)}))
    assert {speeds.speeds(step) for step in range(199, 203)} == {()}


def test_a_lane_without_own_microbatches_keeps_what_is_known_of_it():
    mesh = Mesh(lanes=2)
    speeds = fed(mesh, table(mesh, {1: 2.0}))
    silent = table(mesh, {})
    silent[1] = 0.0
    assert speeds.observe(12, silent) == [1.0, 0.0]
    assert speeds.slowness() == pytest.approx([1.0, 2.0])
    nothing = LaneSpeeds(mesh, 1)
    for step in range(20):
        nothing.observe(step, np.zeros((2, 2)))
    assert nothing.slowness() == [1.0, 1.0]
    assert nothing.speeds(22) == ()


def test_when_speeds_change_is_a_rule():
    """The plan of step s is made with what was known after s - lag; who asks earlier is told, and older steps keep their speeds."""
    mesh, rules = Mesh(lanes=2), SpeedRules(least=3)
    speeds = LaneSpeeds(mesh, ahead=1, rules=rules)
    for step in range(10):
        speeds.observe(step, table(mesh, {1: 2.0}))
        assert speeds.lag == 3
        assert speeds.speeds(step + 3) == ((1.0, 0.5) if step >= 2 else ())
        with pytest.raises(ValueError, match="lane speeds of step"):
            speeds.speeds(step + 4)
    late = LaneSpeeds(mesh, ahead=1, rules=rules)
    for step in range(10):
        late.observe(step, table(mesh, {1: 2.0}))
    assert late.speeds(10) == speeds.speeds(10)


def test_a_lane_that_recovers_is_believed():
    mesh = Mesh(lanes=2)
    speeds = fed(mesh, table(mesh, {1: 2.0}))
    for step in range(12, 80):
        speeds.observe(step, table(mesh, {}))
    assert min(speeds.speeds(82) or (1.0,)) >= 0.95
    assert speeds.slowness() == pytest.approx([1.0, 1.0], abs=0.01)


def test_a_checkpoint_brings_it_back():
    mesh = Mesh(lanes=2)
    whole = fed(mesh, table(mesh, {1: 1.5}), steps=30)
    first = fed(mesh, table(mesh, {1: 1.5}), steps=20)
    second = LaneSpeeds(mesh, 1, first=20)
    assert second.load(first.to_dict()) == ""
    assert [second.speeds(step) for step in range(20, 23)] == [whole.speeds(step) for step in range(20, 23)]
    for step in range(20, 30):
        second.observe(step, table(mesh, {1: 1.5}))
    assert second.to_dict() == whole.to_dict()


def test_other_lanes_drop_it_and_damage_is_named():
    state = fed(Mesh(lanes=2), table(Mesh(lanes=2), {})).to_dict()
    assert "2 lanes is dropped: there are 4 now" in LaneSpeeds(Mesh(lanes=4), 1, first=12).load(state)
    for broken in ({}, {**state, "sums": "x"}, {**state, "sums": [[1.0, float("nan")], [1.0, 1.0]]}, {**state, "history": [[3, [1.0]]]}):
        with pytest.raises(UserError):
            LaneSpeeds(Mesh(lanes=2), 1, first=12).load(broken)


def test_bounds_and_what_is_configured():
    mesh = Mesh(lanes=2)
    assert fed(mesh, table(mesh, {1: 50.0})).speeds(14) == (1.0, 0.5)
    configured = LaneSpeeds(mesh, 1, configured=(1.0, 0.7))
    assert configured.speeds(2) == (1.0, 0.7)
