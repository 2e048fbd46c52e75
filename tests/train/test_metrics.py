import json
import os

import pytest

from megadcp.train.metrics import MetricsFile, read_metrics


def test_rows_are_json_even_with_nan(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl", 0)
    metrics.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "list": [1.0, float("-inf")]})
    text = (tmp_path / "m.jsonl").read_text()  # there before close
    assert json.loads(text, parse_constant=lambda name: 1 / 0) == {"step": 1, "loss": None, "grad_norm": None, "list": [1.0, None]}


def test_a_resumed_run_has_each_step_once(tmp_path):
    path = tmp_path / "m.jsonl"
    metrics = MetricsFile(path, 0)
    for step in range(1, 8):
        metrics.write({"step": step, "life": 1})
        if step % 2 == 0:
            metrics.write({"step": step, "validation_loss": 2.0, "name": "held out"})
    metrics.close()
    with open(path, "a") as file:
        file.write('{"step": 8, "li')  # died while writing
    said = []
    metrics = MetricsFile(path, 5, said.append)
    assert metrics.validated == {(2, "held out"), (4, "held out")}
    for step in (6, 7):
        metrics.write({"step": step, "life": 2})
    metrics.close()
    steps = [(row["step"], row["life"]) for row in read_metrics(path) if "life" in row]
    assert steps == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 2)]
    assert len(said) == 1
    assert "4 rows after step 5" in said[0]


def test_nothing_to_cut_says_nothing(tmp_path):
    said = []
    MetricsFile(tmp_path / "m.jsonl", 3, said.append).close()
    assert said == []
    assert read_metrics(tmp_path / "m.jsonl") == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_names_the_file_and_closing_says_no_more(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    metrics._file.close()
    metrics._file = open("/dev/full", "a")  # noqa: SIM115 - closed below
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        metrics.write({"step": 1})
    metrics.close()
