"""A checkpoint of any layout goes on in any other: state bit for bit, and the next steps as the unbroken run."""

import random
import shutil

import pytest
import torch
from ranks import run_ranks
from resharding import LAYOUTS, ONE, Layout, assembled, live, pool_of, settings
from train_helpers import write_corpus

from megadcp.train.checkpoint import newest
from megadcp.train.run_folder import RunFolder

SAVED = 3
DRAWN = random.Random(0).sample([(a, b) for a in LAYOUTS for b in LAYOUTS if ONE not in (a, b) and a != b], 8)
SAME = [(a, a) for a in LAYOUTS[1:]]
PAIRS = [(a, ONE) for a in LAYOUTS] + [(ONE, b) for b in LAYOUTS[1:]]
FEW = [(Layout(2), ONE), (ONE, Layout(1, 1, 4)), (Layout(1, 2, 1, 2), Layout(2, 1, 2)), (Layout(2, 1, 2), Layout(2, 1, 2))]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    made = write_corpus(tmp_path_factory.mktemp("data"))
    live(settings(made, ONE), None, tmp_path_factory.mktemp("warm"), 1)  # what torch imports late is imported before any rank is forked
    return made


def unbroken(rank, world, layout, prefix, folder, steps, kinds):
    """Save after some steps, and go on; per kind what happened."""
    with pool_of(layout, rank) as pool:
        return [live(settings(prefix, layout, *kind), pool, folder / str(layout) / "-".join(kind), steps, [SAVED]) for kind in kinds]


def resumed(rank, world, layout, sources, prefix, folder, steps, kinds):
    with pool_of(layout, rank) as pool:
        return {
            source: [live(settings(prefix, layout, *kind), pool, folder / str(source) / "-".join(kind), steps, load=True) for kind in kinds]
            for source in sources
        }


def check_pairs(pairs, prefix, folder, steps, kinds):
    """Every pair: what was loaded is what was saved; losses after it are those of the layout that saved it, going on."""
    whole = {source: run_ranks(source.world, unbroken, source, prefix, folder, steps, kinds) for source in dict.fromkeys(a for a, _ in pairs)}
    for target in dict.fromkeys(b for _, b in pairs):
        sources = [a for a, b in pairs if b == target]
        ranks = run_ranks(target.world, resumed, target, sources, prefix, folder, steps, kinds, timeout_s=120)
        for source in sources:
            for number, kind in enumerate(kinds):
                lives = [each[source][number] for each in ranks]
                compare(lives, [each[number] for each in whole[source]], folder / str(source) / "-".join(kind), source == target, kind[1])


def compare(lives, unbroken, folder, same_layout, precision):
    found = newest(RunFolder(folder), pytest.fail)
    saved = {f"model.{name}": tensor for name, tensor in found.tensors("model").items()} | found.tensors("optimizer")
    loaded = assembled([each.loaded for each in lives], saved)
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
    losses, expected = lives[0].losses, unbroken[0].losses[SAVED:]
    assert all(each.losses == losses for each in lives)
    if same_layout:
        assert losses == expected
        assert all(torch.equal(mine.end[key], tensor) for mine, theirs in zip(lives, unbroken, strict=True) for key, tensor in theirs.end.items())
    else:
        assert losses == pytest.approx(expected, rel=2e-5 if precision == "fp32" else 1e-2)


def test_some_pairs_of_layouts(prefix, tmp_path):
    check_pairs(FEW, prefix, tmp_path, SAVED + 3, [("tied", "fp32"), ("untied", "bf16")])


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "kind"), [(PAIRS + SAME, ("tied", "fp32")), (DRAWN, ("untied", "fp32"))], ids=["tied", "untied"])
def test_the_matrix_of_layouts(prefix, tmp_path, pairs, kind):
    check_pairs(pairs, prefix, tmp_path, SAVED + 20, [kind])
    shutil.rmtree(tmp_path)
