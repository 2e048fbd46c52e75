import math

import pytest

from megadcp.config.check import UserError
from megadcp.config.schema import OptimConfig
from megadcp.train.schedule import describe_schedule, learning_rate


def rates(optim: OptimConfig, steps: int, per_step: int = 10) -> list[float]:
    return [learning_rate(optim, step, step * per_step, steps, steps * per_step) for step in range(1, steps + 1)]


def test_cosine():
    found = rates(OptimConfig(lr=1.0, min_lr_share=0.1, schedule="cosine", warmup_steps=4), 20)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[11] == pytest.approx(0.55)  # half-way between warmup and end
    assert found[-1] == pytest.approx(0.1)
    assert found[9] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 6 / 16)))


def test_linear():
    found = rates(OptimConfig(lr=2.0, min_lr_share=0.0, schedule="linear"), 10)
    assert found == pytest.approx([2 * (1 - step / 10) for step in range(1, 11)])


def test_wsd_falls_over_its_last_share():
    found = rates(OptimConfig(lr=1.0, min_lr_share=0.0, schedule="wsd", decay_share=0.2, warmup_steps=2), 20)
    assert found[0] == 0.5
    assert found[1:16] == [1.0] * 15
    assert found[16:] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_constant():
    assert rates(OptimConfig(lr=3.0, schedule="constant", warmup_steps=2), 5) == [1.5, 3.0, 3.0, 3.0, 3.0]


def test_warmup_in_tokens_puts_the_whole_schedule_on_tokens():
    by_tokens = OptimConfig(lr=1.0, min_lr_share=0.0, schedule="linear", warmup_tokens=40)
    by_steps = OptimConfig(lr=1.0, min_lr_share=0.0, schedule="linear", warmup_steps=4)
    assert rates(by_tokens, 20) == pytest.approx(rates(by_steps, 20))
    assert learning_rate(by_tokens, 7, 20, 20, 200) == 0.5  # the step does not count
    assert learning_rate(by_tokens, 20, 230, 20, 200) == 0.0  # documents may exceed the budget a little


def test_warmup_over_the_whole_run():
    assert rates(OptimConfig(lr=1.0, schedule="cosine", warmup_steps=4), 4) == [0.25, 0.5, 0.75, 1.0 * 0.1 + 0.9]


def test_unknown_name():
    with pytest.raises(UserError, match="legal here: cosine, linear, wsd, constant"):
        learning_rate(OptimConfig(schedule="step"), 1, 1, 10, 10)


def test_description_names_what_holds():
    text = describe_schedule(OptimConfig(lr=3e-4, schedule="wsd", warmup_steps=10), 100, 1000)
    assert text == "learning rate: wsd, warmup 10 of 100 steps, peak 0.0003, falling to 3e-05 over the last 20%"
