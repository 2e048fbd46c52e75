"""Fits of the cost model's coefficients: against a solver of scipy's, against coefficients that are known, and at their bounds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import plan_reference as ref
import pytest
from scipy.optimize import lsq_linear

from megadcp.plan.basis import basis_from, profile_from
from megadcp.plan.cost import CostModel
from megadcp.plan.fit import Factors, FitError, Parts, fit, fit_factors, fit_saturating, parts_of, relative_moments, scaled, solve
from megadcp.plan.fitted_planner import FittedPlanner
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute, plan_hash
from megadcp.plan.verify import verify


def microbatch(rng, cp=1, kind="none"):
    lengths = [2 * cp * rng.randint(1, 4000) for _ in range(rng.randint(1, 6))]
    level = rng.choice(LEVELS)
    return Microbatch(0, 0, cp, tuple(range(len(lengths))), tuple(lengths), Recompute(level, rng.randint(1, 2) if level != "none" else 0), kind)


# ---------------------------------------------------------------------------------------------------------------- least squares
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_bounded_fit_is_that_of_another_solver(size):
    rng = np.random.default_rng(size)
    for _ in range(20):
        terms = rng.random((12, size)) * 10.0 ** rng.integers(-6, 6, size)
        seconds = rng.random(12) + 0.1
        rest = 0.3 * rng.random(12) * seconds
        scale = 1 / terms.mean(axis=0)
        low, high = rng.random(size) * 0.3 * scale, (0.4 + rng.random(size)) * scale
        x = fit(terms, seconds, rest, low.tolist(), high.tolist())
        rows, aim = terms * scale / seconds[:, None], 1 - rest / seconds
        theirs = lsq_linear(rows, aim, (low / scale, high / scale), method="bvls", tol=1e-14).x * scale
        assert ((low <= x) & (x <= high)).all()
        mine, other = (float(np.sum((rows @ (y / scale) - aim) ** 2)) for y in (x, theirs))
        assert mine <= other * (1 + 1e-9) + 1e-12
        np.testing.assert_allclose(x, theirs, rtol=1e-5, atol=1e-7 * scale.max())


def test_exact_data_gives_the_coefficients_back():
    rng = np.random.default_rng(0)
    terms, truth = rng.random((30, 4)), np.array([2e-9, 3.0, 0.0, 7e3])
    np.testing.assert_allclose(fit(terms, terms @ truth), truth, rtol=1e-9, atol=1e-9 * 7e3)


def test_errors_count_in_proportion_to_what_was_measured():
    """One term for all: the best x minimises sum (a x / y - 1)^2, not sum (a x - y)^2, which the large sample would decide."""
    x = float(fit(np.array([[1.0], [1.0]]), np.array([1.0, 100.0]))[0])
    assert x == pytest.approx((1 + 1 / 100) / (1 + 1 / 100**2))


def test_what_no_sample_tells_stays_at_its_lower_bound():
    terms = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert fit(terms, np.array([3.0, 6.0]), 0.0, [0.0, 0.25], [10.0, 4.0]).tolist() == pytest.approx([3.0, 0.25])


def test_moments_of_two_sets_add_up():
    rng = np.random.default_rng(3)
    terms, seconds = rng.random((8, 2)), rng.random(8) + 0.5
    whole = relative_moments(terms, seconds)
    halves = [relative_moments(terms[part], seconds[part]) for part in (slice(0, 4), slice(4, 8))]
    for place in (0, 1, 2):
        np.testing.assert_allclose(whole[place], (halves[0][place] + halves[1][place]) / 2, rtol=1e-14)


def test_moments_tell_the_error():
    rng = np.random.default_rng(5)
    terms, seconds, rest, x = rng.random((9, 3)), rng.random(9) + 0.5, 0.1 * rng.random(9), rng.random(3)
    expected = np.sqrt(np.mean(((terms @ x + rest) / seconds - 1) ** 2))
    assert relative_moments(terms, seconds, rest).error(x) == pytest.approx(expected, rel=1e-12)


def test_measurements_must_be_positive_and_unknowns_few():
    with pytest.raises(ValueError, match="must be positive"):
        fit(np.ones((2, 1)), np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match="at most 6"):
        solve(np.eye(7), np.ones(7), [0.0] * 7, [1.0] * 7)


# ---------------------------------------------------------------------------------------------------------------- coefficients
def test_a_saturating_rate_is_found():
    sizes = np.array([8.0, 64.0, 512.0, 4096.0])
    work = 1e6 * sizes
    found = fit_saturating(work, sizes, work / 5e10 * (1 + 300 / sizes))
    assert (found.rate, found.half) == pytest.approx((5e10, 300))
    assert found.error.worst < 1e-9


def test_a_rate_without_a_half_has_half_zero():
    sizes = np.array([8.0, 64.0, 512.0])
    assert fit_saturating(sizes, sizes, sizes / 7).half == pytest.approx(0, abs=1e-9)
    growing = fit_saturating(sizes, sizes, sizes**1.1)  # faster when small: no half could be negative
    assert growing.half == 0
    assert growing.rate > 0


def test_what_runs_beside_decides_which_samples_count():
    """Small samples that fit no curve matter less when much other work comes with each of them."""
    sizes = np.array([8.0, 16.0, 1000.0, 4000.0])
    seconds = sizes / 100 * (1 + 50 / sizes)
    seconds[0] *= 3
    alone, beside = fit_saturating(sizes, sizes, seconds), fit_saturating(sizes, sizes, seconds, beside=np.full(4, 5.0))

    def squares(one, other_work):
        return sum(((sizes / one.rate * (1 + one.half / sizes) - seconds) / (seconds + other_work)) ** 2)

    assert squares(alone, 0.0) < 0.9 * squares(beside, 0.0)
    assert squares(beside, 5.0) < 0.9 * squares(alone, 5.0)
    assert beside.among.worst < beside.error.worst
    assert alone.among == alone.error


def test_the_error_is_told():
    error = FitError.of(np.array([1.1, 2.0, 2.0]), np.array([1.0, 2.0, 4.0]))
    assert (error.median, error.worst, error.samples, error.bias) == pytest.approx((0.1, 0.5, 3, 0.0))
    assert str(error) == "median error 10.0%, worst 50.0%, 3 samples"


# ------------------------------------------------------------------------------------------------------------- parts and factors
@pytest.mark.parametrize(("cp", "kind"), [(1, "none"), (2, "ring"), (4, "all_gather"), (2, "ulysses")])
@pytest.mark.parametrize("stages", [(6,), (4, 2)])
def test_parts_add_up_to_the_predicted_seconds_of_each_stage(cp, kind, stages):
    basis = replace(basis_from(ref.config(ref.SMALL, hardware=ref.H200)), stage_layers=stages)
    basis = replace(basis, layout=replace(basis.layout, lanes=4, pp=len(stages)), schedule="1f1b" if len(stages) > 1 else "none")
    basis = replace(basis, model=replace(basis.model, layers=6))
    cost, rng = CostModel(basis), random.Random(7)
    for _ in range(20):
        one = microbatch(rng, cp, kind)
        for stage, seconds in enumerate(cost.stage_seconds(one)):
            parts = parts_of(cost, one, stage)
            assert parts.total == pytest.approx(seconds, rel=1e-12)
            assert min(parts[:3]) > 0
            assert (parts.other > 0) <= (cp > 1)


def test_factors_scale_the_predictions_that_they_say():
    config, rng = ref.config(ref.SMALL, hardware=ref.H200), random.Random(1)
    factors = Factors(1.5, 0.7, 3.0)
    before, after = (CostModel(basis_from(each)) for each in (config, replace(config, hardware=scaled(config.hardware, factors))))
    for _ in range(10):
        one = microbatch(rng)
        old, new = parts_of(before, one), parts_of(after, one)
        assert new[:3] == pytest.approx([part * factor for part, factor in zip(old[:3], factors, strict=True)], rel=1e-8)  # profiles have 9 digits


def test_factors_of_another_machine_are_found():
    config, rng = ref.config(ref.SMALL, hardware=ref.H200), random.Random(2)
    truth = Factors(1.3, 0.6, 1.9)
    cost = CostModel(basis_from(config))
    parts = [parts_of(cost, microbatch(rng)) for _ in range(40)]
    seconds = [part.linear * truth.linear + part.attention * truth.attention + part.overhead * truth.overhead for part in parts]
    found, error = fit_factors(parts, seconds)
    assert found == pytest.approx(truth, rel=1e-6)
    assert error.worst < 1e-7
    bounded, error = fit_factors(parts, seconds, 0.5, 1.5)
    assert max(bounded) == 1.5
    assert error.worst > 1e-3


def test_an_anchor_holds_what_samples_tell_little_of():
    parts = [Parts(1.0, 1e-4, 0.1), Parts(2.0, 1e-4, 0.1), Parts(4.0, 1e-4, 0.1)]
    seconds = [sum(part) + 0.01 for part in parts]
    free, _ = fit_factors(parts, seconds)
    held, error = fit_factors(parts, seconds, anchor=(0.0, 0.01, 0.0))
    assert abs(free.attention - 1) > 0.5
    assert held.attention == pytest.approx(1, abs=0.01)
    assert error.worst < 1e-3


# --------------------------------------------------------------------------------------------------------------------- planner
def test_a_plan_carries_the_profile_it_was_made_with_and_proves_itself():
    config = ref.config(ref.SMALL, hardware=ref.H200)
    planner, lengths = FittedPlanner(config), [900, 40, 7000, 300, 15]
    plain, fitted = planner(3, lengths), planner(3, lengths, Factors(2.0, 0.5, 1.25))
    assert plan_hash(plain) == plan_hash(planner_for(config)(3, lengths)) == plan_hash(planner(3, lengths))
    verify(fitted)
    base = profile_from(config.hardware, config.precision.format)
    assert fitted.profile.gemm_flops == pytest.approx(base.gemm_flops / 2)
    assert fitted.profile.attention_flops == pytest.approx(base.attention_flops * 2)
    assert fitted.profile.layer_overhead_seconds == pytest.approx(base.layer_overhead_seconds * 1.25)
    assert fitted.predicted.seconds > plain.predicted.seconds
    other = FittedPlanner(config)
    assert plan_hash(other(3, lengths, Factors(2.0, 0.5, 1.25))) == plan_hash(fitted)  # whatever was planned before
