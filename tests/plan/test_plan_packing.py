import random

import pytest

from megadcp.plan.packing import balanced, first_fit, longest_first, pad


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


def test_longest_first_is_stable():
    assert longest_first([3, 7, 3, 9, 7]) == [3, 1, 4, 0, 2]


def test_balanced():
    lengths = [8, 7, 6, 5, 4]
    assert balanced(longest_first(lengths), lengths, 2) == [[0, 3, 4], [1, 2]]
    assert balanced(longest_first(lengths), lengths, 9) == [[0], [1], [2], [3], [4]]  # no empty packs
