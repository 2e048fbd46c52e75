import itertools

import pytest
import torch

from megadcp.nn.part import parts_of, recomputed, whole
from megadcp.nn.shard import by_parts, contiguous, put, take


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1)])
def test_qkv_rows_go_to_the_ranks_of_their_heads(ranks, heads, kv_heads):
    d = 3
    parts = ((heads * d, d), (kv_heads * d, d), (kv_heads * d, d))
    rows = (heads + 2 * kv_heads) * d
    weight = torch.arange(rows * 2.0).view(rows, 2)
    back = torch.full_like(weight, -1)
    counted = torch.zeros(rows)
    for index in range(ranks):
        shard = by_parts((rows, 2), parts, ranks, index)
        local = take(weight, shard)
        assert local.shape == shard.local_shape
        # a rank's query heads and the kv heads they attend with
        own = heads // ranks
        first = index * own
        queries = local[: own * d]
        assert torch.equal(queries, weight[first * d : (first + own) * d])
        kv = max(1, kv_heads // ranks)
        key = local[own * d : (own + kv) * d]
        group = heads // kv_heads
        assert torch.equal(key, weight[(heads + first // group) * d : (heads + first // group + kv) * d])
        put(back, shard, local)
        held = torch.cat([torch.arange(*piece) for piece in shard.pieces])
        for start, stop in shard.owned:
            counted[held[start:stop]] += 1
        assert bool(shard.shared) == (kv_heads < ranks)
    assert torch.equal(back, weight)
    assert torch.equal(counted, torch.ones(rows))


def test_what_can_not_be_divided():
    with pytest.raises(ValueError, match="12 rows in units of 4 can't be divided among 2 ranks"):
        by_parts((12, 1), ((12, 4),), 2, 0)
    with pytest.raises(ValueError, match="the parts hold 4 rows, the parameter 5"):
        by_parts((5, 1), ((4, 1),), 2, 0)


@pytest.mark.parametrize(("rows", "ranks"), [(10, 1), (10, 4), (7, 8), (8, 4), (9, 2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_contiguous_shards_with_padding(rows, ranks, dim):
    shape = (rows, 3) if dim == 0 else (3, rows)
    weight = torch.randn(shape)
    back = torch.zeros(shape)
    for index in range(ranks):
        shard = contiguous(shape, dim, ranks, index)
        local = take(weight, shard)
        assert local.shape == shard.local_shape
        assert shard.local == -(-rows // ranks)
        real = sum(stop - start for start, stop in shard.pieces)
        assert not local.narrow(dim, real, shard.local - real).any()
        put(back, shard, local)
    assert torch.equal(back, weight)


@pytest.mark.parametrize(("stage_layers", "chunks"), [((4, 4), 1), ((9, 9, 8, 6), 2), ((3, 5), 3), ((6,), 1)])
def test_parts_cover_every_layer_once_in_model_order(stage_layers, chunks):
    parts = parts_of(stage_layers, chunks)
    assert [len(part.layers) for part in parts] == list(stage_layers)
    order = [layer for chunk, part in itertools.product(range(chunks), parts) for layer in part.chunk_layers[chunk]]
    assert order == list(range(sum(stage_layers)))
    assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    sizes = [len(chunk) for part in parts for chunk in part.chunk_layers]
    assert all(
        size in (count // chunks, count // chunks + 1) for size, count in zip(sizes, [n for n in stage_layers for _ in range(chunks)], strict=True)
    )


def test_part_of_a_whole_model_and_errors():
    assert whole(3).chunk_layers == ((0, 1, 2),)
    assert (whole(3).first, whole(3).last) == (True, True)
    with pytest.raises(ValueError, match="stage 1 has 1 layers: too few for 2 chunks"):
        parts_of((2, 1), 2)
    assert [recomputed(layers, 2) for layers in (0, 1, 2, 5)] == [0, 1, 1, 3]
