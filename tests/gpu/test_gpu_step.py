"""The engine on a GPU against the fp64 reference on the CPU. Skips without a device."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "engine"), str(ROOT / "train")]
import engine_helpers as helpers  # noqa: E402
import train_helpers  # noqa: E402

from megadcp.backends.torch_backend import TorchBackend  # noqa: E402
from megadcp.engine.step import Engine, run_step  # noqa: E402
from megadcp.nn.gpt import GPT  # noqa: E402
from megadcp.parallel.gradients import GradientBuffers  # noqa: E402
from megadcp.plan.step_plan import Recompute  # noqa: E402
from megadcp.train import checkpoint, loop  # noqa: E402
from megadcp.train.metrics import read_metrics  # noqa: E402
from megadcp.train.run_folder import RunFolder  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GROUPS, LEVELS = [[2], [4, 0], [5, 3, 1]], [Recompute("full", 3), Recompute(), Recompute("selective", 2)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_gradients_and_measures(dtype, bound):
    device = torch.device("cuda", 0)
    documents, plan = helpers.RandomDocuments(), helpers.plan_of(GROUPS, LEVELS)
    loss, targets, expected = helpers.reference(documents)
    model = GPT(helpers.MODEL, TorchBackend(dtype, device), seed=3, loss_chunk=16)
    engine = Engine(model, GradientBuffers(model.named_parameters()), helpers.NoUpdate(), device)
    result = run_step(engine, plan, helpers.packs_of(plan, documents), lr=0.1)
    assert (result.targets, result.updated) == (targets, True)
    assert result.loss_sum == pytest.approx(loss, rel=bound)
    for name, gradient in helpers.gradients(engine).items():
        assert gradient.dtype == torch.float32
        assert float((gradient.cpu().double() - expected[name]).abs().max() / expected[name].abs().max()) < bound, name
    assert all(one.seconds > 0 and one.bytes > 0 for one in result.microbatches)
    assert result.memory_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_stops_and_goes_on(tmp_path, precision):
    setup = train_helpers.config(train_helpers.write_corpus(tmp_path), cluster={"device": "cuda"}, precision={"format": precision})
    assert loop.train(setup, tmp_path / "whole") == loop.FINISHED
    save = checkpoint.Saver.save

    def once(saver, step, *arguments):
        save(saver, step, *arguments)
        if step == 10:
            saver.finish()
            raise OSError("stop here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Saver, "save", once)
        assert loop.train(setup, tmp_path / "run") == loop.FAILED
    assert loop.train(setup, tmp_path / "run") == loop.FINISHED
    assert checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail).step == 20
    losses = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in ("whole", "run")]
    assert len(losses[1]) == 20
    assert losses[1] == pytest.approx(losses[0], rel=0.02)  # attention's backward adds in no fixed order there
