"""The nine length presets: quantiles as documented, clipping, and the same values everywhere."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from megadcp.config.check import UserError
from megadcp.plan import presets
from megadcp.plan.step_plan import sha256_of

K = 1024
MANY = 3_000_000  # tokens of the draws that are looked at as a sample

# docs/plan.md, appendix: written down here a second time.
POINTS = {
    "wikipedia": [(0.01, 39), (0.05, 67), (0.1, 87), (0.25, 146), (0.5, 347), (0.75, 862), (0.9, 2112), (0.95, 3721), (0.99, 10921),
                  (0.999, 37367), (0.9999, 101537)],
    "byted": [(0.5, 1200), (0.8, 4096), (0.95, 24000), (0.99, 131072), (0.9995, 2097152)],
}  # fmt: skip
BUCKETS = {
    "web": ([32, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 192 * K], [71.38, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14]),
    "midtrain": ([128, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 125 * K], [15.96, 15.79, 31.95, 33.93, 1.04, 0.45, 0.36, 0.53]),
    "prolong": (
        [128, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 340 * K],
        [14.97, 38.41, 26.95, 14.41, 4.27, 0.78, 0.146, 0.038, 0.022],
    ),
}
NORMAL = statistics.NormalDist()


def test_there_are_nine() -> None:
    assert presets.PRESETS == ("wikipedia", "web", "midtrain", "prolong", "longsft", "byted", "mcore", "uniform", "constant")


@pytest.mark.parametrize("name", POINTS)
def test_tables_of_quantiles_are_met_and_joined_in_log_length(name: str) -> None:
    shares, lengths = map(list, zip(*POINTS[name], strict=True))
    assert presets.quantile(name, np.array(shares)).tolist() == lengths
    between = [((a + b) / 2, round(math.sqrt(x * y))) for (a, x), (b, y) in zip(POINTS[name], POINTS[name][1:], strict=False)]
    assert presets.quantile(name, np.array([share for share, _ in between])) == pytest.approx([length for _, length in between], abs=1)
    lowest, highest = presets.quantile(name, np.array([1e-9, 1 - 1e-12]))
    assert (lowest, highest) == {"wikipedia": (20, 1823777), "byted": (64, 4000000)}[name]


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_hold_their_share_log_uniformly(name: str) -> None:
    edges, percent = BUCKETS[name]
    below = 0.0
    for low, high, share in zip(edges, edges[1:], percent, strict=False):
        for part in (0.0001, 0.5, 0.9999):
            at = (below + part * share) / sum(percent)
            expected = low * (high / low) ** part
            assert presets.quantile(name, np.array([at]))[0] == pytest.approx(expected, abs=0.51)
        below += share


@pytest.mark.parametrize("share", [0.001, 0.02, 0.31, 0.5, 0.77, 0.999])
def test_lognormals(share: float) -> None:
    z = NORMAL.inv_cdf(share)
    mcore = min(max(math.exp(math.log(1024) - 1.125 + 1.5 * z), 128), 8192)
    assert presets.quantile("mcore", np.array([share]))[0] == pytest.approx(mcore, abs=0.51)
    rare = math.exp(math.log(37000) - 0.32 + 0.8 * z)
    usual = math.exp(math.log(1000) - 0.5 + z)
    assert presets.quantile("longsft", np.array([0.0011 * share]))[0] == pytest.approx(rare, abs=0.51)
    assert presets.quantile("longsft", np.array([0.0011 + (1 - 0.0011) * share]))[0] == pytest.approx(usual, abs=0.51)


def test_own_functions_agree_with_the_library() -> None:
    x = np.exp(np.linspace(-36, 16, 4001))
    assert presets._log(x) == pytest.approx(np.log(x), rel=1e-15, abs=1e-15)
    y = np.linspace(-8, 16, 4001)
    assert presets._exp(y) == pytest.approx(np.exp(y), rel=1e-15)
    shares = np.concatenate([np.linspace(0.001, 0.999, 999), 2.0 ** -np.arange(2, 54), 1 - 2.0 ** -np.arange(2, 53)])
    assert presets._normal(shares) == pytest.approx([NORMAL.inv_cdf(share) for share in shares.tolist()], rel=1e-13, abs=1e-15)


def test_uniform_reaches_both_ends_and_is_flat() -> None:
    ends = presets.quantile("uniform", np.array([2.0**-53, 1 - 2.0**-53]))
    assert ends.tolist() == [64, 32767]
    lengths = presets.draw("uniform", 30_000_000, 131072, 1)
    assert statistics.fmean(lengths) == pytest.approx((64 + 32767) / 2, rel=0.03)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_draw_stops_at_the_document_that_reaches_the_tokens(name: str) -> None:
    for tokens in (1, 8192, 8193, 1_000_003):
        lengths = presets.draw(name, tokens, 131072, 7)
        assert sum(lengths[:-1]) < tokens <= sum(lengths)
        assert all(type(length) is int and 16 <= length <= 131072 for length in lengths)


@pytest.mark.parametrize("name", ["wikipedia", "web", "byted", "uniform"])
def test_draws_follow_their_quantiles(name: str) -> None:
    lengths = sorted(presets.draw(name, 30 * MANY, 131072, 3))
    for share in (0.1, 0.5, 0.9):
        low, high = (presets.quantile(name, np.array([share + off]))[0] for off in (-0.015, 0.015))
        assert low <= lengths[round(share * len(lengths))] <= high


def test_clipping_at_both_ends() -> None:
    short = presets.draw("longsft", MANY, 512, 1)
    assert max(short) == 512
    assert short.count(512) > len(short) / 3
    assert min(presets.draw("longsft", 10 * MANY, 131072, 1)) == 16  # exp(ln 1000 - 0.5 + z) goes below
    assert set(presets.draw("constant", 100, 16, 1)) == {16}
    mcore = presets.draw("mcore", MANY, 131072, 1)
    assert (min(mcore), max(mcore)) == (128, 8192)


def test_constant_is_all_8192() -> None:
    assert presets.draw("constant", 10 * 8192 + 1, 131072, 5) == [8192] * 11


def test_steps_are_streams_of_their_own() -> None:
    three = presets.steps("web", 200_000, 131072, 11, 3)
    assert three[0] == presets.draw("web", 200_000, 131072, 11)
    assert three[2] == presets.draw("web", 200_000, 131072, 11, step=2)
    assert three[0][:5] != three[1][:5] != three[2][:5]
    assert presets.steps("web", 200_000, 131072, 11, 5)[:3] == three
    assert presets.draw("web", 200_000, 131072, 12)[:5] != three[0][:5]
    assert presets.draw("web", 900_000, 131072, 11)[: len(three[0])] == three[0]  # more tokens only add documents


def test_golden_values() -> None:
    """What reports of earlier versions were made of stays available: these lengths never change."""
    first = {name: presets.draw(name, 4_000_000, 131072, 1) for name in presets.PRESETS}
    assert {name: lengths[:5] for name, lengths in first.items()} == FIRST_FIVE
    assert {name: sha256_of(lengths)[:16] for name, lengths in first.items()} == DIGESTS


@pytest.mark.parametrize(
    ("name", "tokens", "longest", "told"),
    [
        ("wiki", 1000, 131072, "legal here: wikipedia, web, midtrain, prolong, longsft, byted, mcore, uniform, constant"),
        ("web", 0, 131072, "at least 1"),
        ("web", 1000, 15, "shortest document has 16"),
    ],
)
def test_wrong_requests(name: str, tokens: int, longest: int, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        presets.draw(name, tokens, longest, 1)
    assert "\n" not in str(caught.value)


FIRST_FIVE = {
    "wikipedia": [193, 93, 500, 926, 823],
    "web": [717, 40, 182, 236, 5395],
    "midtrain": [1558, 405, 6276, 4532, 3771],
    "prolong": [4073, 134, 130, 143, 5591],
    "longsft": [765, 163, 1037, 473, 63],
    "byted": [243, 1997, 2038, 177, 7950],
    "mcore": [633, 128, 128, 141, 378],
    "uniform": [5617, 21726, 4524, 30093, 24823],
    "constant": [8192, 8192, 8192, 8192, 8192],
}
DIGESTS = {
    "wikipedia": "257b1808b7fa92dc",
    "web": "09ee71de135cda72",
    "midtrain": "aca06fd4de4603de",
    "prolong": "8ebafc683c65a867",
    "longsft": "c282f7807fb6c5c3",
    "byted": "a311d6aa841a2dc2",
    "mcore": "4831a949314fec7a",
    "uniform": "09d56c72b7d8f98f",
    "constant": "bed5a143ab5cecae",
}
