import pytest

from megadcp.config.check import UserError
from megadcp.config.schema import LogConfig
from megadcp.train.log import PlainConsole, RichConsole, StepLog, duration, flops_text, open_console, short
from megadcp.train.run_folder import finite


@pytest.mark.parametrize(
    ("value", "text"), [(12.4, "12"), (9999.0, "9999"), (41_234, "41.2k"), (412_345, "412k"), (1_300_000, "1.3M"), (2.5e9, "2.5G")]
)  # fmt: skip
def test_short(value, text):
    assert short(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.31, "0.3s"), (12.2, "12s"), (187, "3m07s"), (39_720, "11h02m"), (59.9, "1m00s")])
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(507e12, "507 TFLOP/s"), (9.97e12, "10 TFLOP/s"), (1.23e12, "1.2 TFLOP/s"), (42e9, "42 GFLOP/s"), (7.1e9, "7.1 GFLOP/s")]
)
def test_flops_text(value, text):
    assert flops_text(value) == text


def test_the_line_of_a_gpu_run():
    from train_helpers import config

    setup = config("x", run={"steps": 50_000}, hardware={"memory_bytes": 141 * 2**30, "peak_flops": 989e12})
    log = StepLog(setup, lambda lengths: 0, 989e12)
    log._recent.extend([(412_000, 1.0, 0.004, 0.0005, 0.97, 1.0, 0.05), (412_000, 1.0, 0.004, 0.0001, 0.97, 1.0, 0.034)])
    row = {
        "step": 1200, "loss": 2.4172, "grad_norm": 0.8311, "lr": 3e-4, "mfu": 0.513, "tflops": 507.0, "memory_bytes": int(118.2 * 2**30),
        "plan_seconds": 0.0031, "padded_share": 0.012, "recompute": {"none": 61, "selective": 30, "full": 9}, "microbatches": 100, "skipped": False,
    }  # fmt: skip
    assert log.line(row) == (
        "step 1200/50000 | loss 2.417 | gnorm 0.83 | lr 3.0e-04 | 412k tok/s | 51.3% mfu | 507 TFLOP/s | mem 118.2/141.0 GiB | data 0.4% | "
        "plan 3.1 ms | wait 0.3 ms | pred/meas 0.97 | bubble 4.2% | pad 1.2% | rc none:61% selective:30% full:9% | eta 13h33m"
    )


def test_consoles(monkeypatch, capsys):
    assert isinstance(open_console(LogConfig(console="auto"), 1), PlainConsole)  # stdout is no terminal here
    with pytest.raises(UserError, match="legal here: auto, rich, plain"):
        open_console(LogConfig(console="tui"), 1)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    console = open_console(LogConfig(console="auto"), 10)
    assert isinstance(console, RichConsole)
    console.progress(3, "loss 1.0")
    console.say("a [bold]line[/bold] with brackets")
    console.close()
    assert "a [bold]line[/bold] with brackets" in capsys.readouterr().out


def test_finite():
    value = {"a": float("nan"), "b": [1.0, float("-inf"), {"c": (float("inf"), 2)}], "d": "x", "e": None, "f": True}
    assert finite(value) == {"a": None, "b": [1.0, None, {"c": [None, 2]}], "d": "x", "e": None, "f": True}
