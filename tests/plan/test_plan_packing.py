import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadcp.plan.packing import LongestFirst, PackSizes, balanced, first_fit, longest_first, pad


def test_padding_by_hand():
    assert pad([5, 3], 1, 1) == (5, 3)
    assert pad([5, 3], 1, 16) == (5, 11)  # the last one grows until the sum is a multiple of 16
    assert pad([5, 3], 2, 1) == (8, 4)  # multiples of 2 cp
    assert pad([5, 3], 2, 16) == (8, 24)  # 32 tokens on two lanes: 16 each
    assert pad([1], 4, 128) == (512,)
    assert pad([16], 1, 16) == (16,)
    assert pad([3], 2, 3) == (12,)  # tp = 3: a multiple of 4 with halves that 3 divides


@pytest.mark.parametrize("align", [1, 3, 16, 128, 1024])
@pytest.mark.parametrize("cp", [1, 2, 8])
def test_padding_is_the_least(cp, align):
    rng = random.Random(cp * align)
    for _ in range(50):
        lengths = [rng.randint(1, 500) for _ in range(rng.randint(1, 5))]
        step = 2 * cp if cp > 1 else 1
        least = [next(n for n in range(length, length + step) if n % step == 0) for length in lengths]
        while sum(least) % (cp * align):
            least[-1] += step
        assert pad(lengths, cp, align) == tuple(least)


def naive_first_fit(order, lengths, capacity):
    packs = []
    for document in order:
        for pack in packs:
            if lengths[document] <= capacity and sum(lengths[one] for one in pack) + lengths[document] <= capacity:
                pack.append(document)
                break
        else:
            packs.append([document])
    return packs


def test_first_fit_equals_a_naive_search():
    rng = random.Random(0)
    for _ in range(400):
        lengths = [rng.choice([1, 2, 3, 50, rng.randint(1, 100)]) for _ in range(rng.randint(1, 60))]
        capacity = rng.choice([0, 1, 10, 60, 99, 100, 101, 300, 10**6])
        order = longest_first(lengths) if rng.random() < 0.7 else list(range(len(lengths)))
        assert first_fit(order, lengths, capacity) == naive_first_fit(order, lengths, capacity)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.integers(1, 8), st.integers(1, 200)), min_size=1, max_size=80), st.lists(st.integers(0, 400), min_size=1, max_size=3))
def test_filling_one_pack_after_the_other_is_first_fit(lengths, capacities):
    order = longest_first(lengths)
    packing = LongestFirst(order, lengths)
    for capacity in capacities:  # one object serves them all
        assert packing.packs(capacity) == naive_first_fit(order, lengths, capacity)


@pytest.mark.parametrize("large", [1, 2**31])
@pytest.mark.parametrize(("cp", "align"), [(1, 1), (1, 16), (2, 1), (4, 3), (8, 128), (2, 1024)])
def test_padded_sums_of_many_packs(cp, align, large):
    rng = random.Random(cp * align)
    lengths = [rng.randint(1, 300) * large for _ in range(60)]
    packs = naive_first_fit(longest_first(lengths), lengths, 700 * large)
    tokens, squares = PackSizes(packs, np.array(lengths)).padded(cp, align)
    padded = [pad([lengths[document] for document in pack], cp, align) for pack in packs]
    assert tokens.tolist() == [sum(one) for one in padded]
    assert squares.tolist() == [float(sum(length * length for length in one)) for one in padded]


def test_longest_first_is_stable():
    assert longest_first([3, 7, 3, 9, 7]) == [3, 1, 4, 0, 2]


def test_balanced():
    lengths = [8, 7, 6, 5, 4]
    assert balanced(longest_first(lengths), lengths, 2) == [[0, 3, 4], [1, 2]]
    assert balanced(longest_first(lengths), lengths, 9) == [[0], [1], [2], [3], [4]]  # no empty packs
