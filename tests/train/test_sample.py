import dataclasses

import pytest
import torch
from train_helpers import MODEL

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.check import UserError
from megadcp.nn.gpt import GPT
from megadcp.train.sample import Sampling, choose, generate

LEARNED = dataclasses.replace(MODEL, position="learned", max_position=16, init_std=0.3)
MADE = GPT(dataclasses.replace(MODEL, init_std=0.3), TorchBackend(), 5, 64)
LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))


def text(sampling: Sampling, prompt: list[int] | None = None, stop: int | None = None) -> list[int]:
    return list(generate(MADE, prompt or [1, 2, 3], sampling, 260, stop))


def test_greedy_is_the_largest_logit_of_the_whole_text():
    from megadcp.engine.placement import Placement
    from megadcp.train.sample import one_document

    made = text(Sampling(tokens=12, temperature=0.0))
    ids = [1, 2, 3, *made]
    logits = MADE.logits(one_document(ids, torch.device("cpu")), Placement())
    assert logits.argmax(-1)[2:-1].tolist() == made
    assert len(set(made)) > 1


def test_seeds():
    assert text(Sampling(tokens=20, seed=1)) == text(Sampling(tokens=20, seed=1))
    assert text(Sampling(tokens=20, seed=1)) != text(Sampling(tokens=20, seed=2))
    before = torch.get_rng_state()
    text(Sampling(tokens=2))
    assert torch.equal(before, torch.get_rng_state())


def test_it_ends_after_stop():
    greedy = Sampling(tokens=12, temperature=0.0)
    made = text(greedy)
    assert text(greedy, stop=made[4]) == made[: made.index(made[4]) + 1]


def counts(**settings: float) -> list[float]:
    sampling, generator = Sampling(**settings), torch.Generator().manual_seed(0)
    drawn = torch.tensor([choose(LOGITS, sampling, generator) for _ in range(4000)])
    return (drawn.bincount(minlength=4) / 4000).tolist()


def test_shares_of_samples():
    assert counts(temperature=1.0) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)
    assert counts(temperature=1.0, top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.03)
    assert counts(temperature=1.0, top_k=2)[2:] == [0, 0]
    assert counts(temperature=1.0, top_p=0.8)[3] == 0
    assert counts(temperature=1.0, top_p=0.8) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], abs=0.03)
    assert counts(temperature=1.0, top_p=0.5) == [1, 0, 0, 0]
    assert counts(temperature=0.5)[0] == pytest.approx(0.25 / (0.25 + 0.0625 + 0.0225 + 0.01), abs=0.03)
    assert counts(temperature=0.0, top_k=0) == [1, 0, 0, 0]


def test_ids_beyond_the_tokenizer_are_never_made():
    made = list(generate(MADE, [1], Sampling(tokens=60, temperature=5.0), 10, None))
    assert max(made) < 10


def test_the_model_keeps_its_mode():
    MADE.train()
    text(Sampling(tokens=1))
    assert MADE.training


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        ([1] * 17, 1, "shorten the prompt to at most 16 tokens"),
        ([1] * 10, 8, "ask for at most 7 tokens"),
        ([], 1, "the prompt is empty"),
        ([999], 1, "the prompt has token 999"),
    ],
)
def test_what_can_not_be_done_is_said(prompt, tokens, message):
    model = GPT(LEARNED, TorchBackend(), 5, 64)
    with pytest.raises(UserError, match=message):
        list(generate(model, prompt, Sampling(tokens=tokens), 260, None))


def test_the_last_learned_position_can_be_used():
    model = GPT(LEARNED, TorchBackend(), 5, 64)
    assert len(list(generate(model, [1] * 10, Sampling(tokens=7), 260, None))) == 7


WRONG = [{"tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": float("nan")}]


@pytest.mark.parametrize("settings", WRONG)
def test_wrong_settings_are_named(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        text(Sampling(**settings))
