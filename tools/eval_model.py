"""How good a model is: python tools/eval_model.py runs/quickstart, or exported/quickstart --data runs/quickstart.

Prints the loss (nats per token) and the perplexity of every validation set of the run's data settings: those of the model's own run, or for a
Hugging Face folder or an import those of --data RUN. With --lm-eval TASKS the tasks of EleutherAI's harness follow, on the model exported as a
Hugging Face folder (pip install "lm-eval[hf]"). Exit codes: 0 done, 1 can't be written, 2 the request can't be carried out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megadcp.config.check import UserError
from megadcp.config.run_file import load_run
from megadcp.config.schema import Config
from megadcp.data.batch import build_pack
from megadcp.data.manifest import refuse_other_tokenizers
from megadcp.data.order import open_validation
from megadcp.data.step_documents import ValidationSet
from megadcp.data.tokenizer import open_tokenizer
from megadcp.engine.placement import Placement
from megadcp.engine.transfer import to_device
from megadcp.interop import hf
from megadcp.nn.backend import IGNORE
from megadcp.nn.gpt import GPT
from megadcp.plan.step_plan import Microbatch
from megadcp.train.evaluate import Validation
from megadcp.train.weights import Weights, device_of, export_of, load, open_weights

ALL = 1 << 62  # tokens: the whole set
PACK_TOKENS = 16384


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", type=Path, help="run, checkpoint, Hugging Face folder or import")
    parser.add_argument("--step", type=int, help="the run's checkpoint of this step (default: the newest)")
    parser.add_argument("--data", type=Path, help="run whose data settings are taken (default: the model's own run)")
    parser.add_argument("--tokens", type=int, help="most tokens of each set; 0 takes all (default: the run's run.validate_tokens)")
    parser.add_argument("--lm-eval", default="", metavar="TASKS", help="tasks of lm-eval, as in hellaswag,piqa")
    parser.add_argument("--num-fewshot", type=int, help="lm-eval: examples before each question (default: the task's)")
    parser.add_argument("--limit", type=float, help="lm-eval: only so many questions of each task (below 1: this share); for trying out")
    parser.add_argument("--batch-size", type=int, default=8, help="lm-eval: texts at a time (default 8)")
    parser.add_argument("--skip-loss", action="store_true", help="lm-eval only")
    parser.add_argument("--json", type=Path, help="write the results to this file, too")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------------------------------------------- loss
def settings_of(weights: Weights, data: Path | None) -> Config:
    """The run whose validation sets are meant. UserError where none is, or where its data was made with another tokenizer."""
    config = load_run(data) if data is not None else weights.config
    if config is None:
        raise UserError(f"{weights.where} is no run, so it has no validation sets; name a run that has: --data runs/NAME (or --skip-loss)")
    fingerprint = weights.fingerprint
    if not fingerprint and weights.tokenizer is not None:
        fingerprint = open_tokenizer(weights.tokenizer.kind, weights.tokenizer.path).fingerprint
    if fingerprint:
        refuse_other_tokenizers(config.data, fingerprint)
    if weights.model.position == "learned" and config.data.max_length > weights.model.max_position:
        raise UserError(f"data.max_length={config.data.max_length} is longer than the model's {weights.model.max_position} learned positions")
    return config


@torch.no_grad()
def loss_of(model: GPT, held_out: ValidationSet, max_tokens: int, pack_tokens: int, device: torch.device) -> Validation:
    """Mean token loss over as many whole documents as `max_tokens` hold; packs of about pack_tokens, which does not change it."""
    begin = time.perf_counter()
    documents = held_out.documents(max_tokens)
    total, targets = torch.zeros((), dtype=torch.float64, device=device), 0
    for slot, chosen in enumerate(packs_of(documents.lengths, pack_tokens)):
        pack = build_pack(held_out, documents, Microbatch(slot, 0, 1, tuple(chosen), tuple(int(documents.lengths[index]) for index in chosen)))
        largest = int(pack.tokens.max())
        if largest >= model.config.vocab:
            raise UserError(f"{held_out.name} has token {largest}, but the model knows {model.config.vocab}: was it trained with this tokenizer?")
        total += model(to_device(pack, device), Placement()).double()
        targets += int((pack.labels != IGNORE).sum())
    loss = float(total) / targets if targets else float("nan")
    return Validation(held_out.name, loss, targets, time.perf_counter() - begin)


def packs_of(lengths: np.ndarray, pack_tokens: int) -> Iterator[list[int]]:
    """Indices of documents in their order, as many at a time as pack_tokens hold, but at least one."""
    pack: list[int] = []
    size = 0
    for index, length in enumerate(lengths.tolist()):
        if pack and size + length > pack_tokens:
            yield pack
            pack, size = [], 0
        pack.append(index)
        size += length
    if pack:
        yield pack


def losses(weights: Weights, options: argparse.Namespace) -> dict[str, Any]:
    """Name of each set -> loss, perplexity, targets; printed, too."""
    config = settings_of(weights, options.data)
    held_out = open_validation(config.data)
    if not held_out:
        raise UserError("the data settings have no validation set; give data.split a second share above 0, or data.validation")
    device = device_of(options.device)
    model = load(weights, device, weights.dtype, int(config.hardware.loss_chunk))
    most = config.run.validate_tokens if options.tokens is None else options.tokens or ALL
    found: dict[str, Any] = {}
    print(f"{weights.where} on {device}, {hf.format_of(weights.tensors)}; documents of up to {config.data.max_length:,} tokens")
    for each in held_out:
        one = loss_of(model, each, most, PACK_TOKENS, device)
        found[one.name] = {"loss": one.loss, "perplexity": math.exp(min(one.loss, 700)), "targets": one.targets}
        print(f"{one.name}: loss {one.loss:.4f} | perplexity {found[one.name]['perplexity']:.2f} | {one.targets:,} targets | {one.seconds:.1f} s")
    return found


# ---------------------------------------------------------------------------------------------------------------- lm-eval
def need_lm_eval() -> Any:
    """The package; UserError when it is not installed."""
    try:
        import lm_eval
    except ImportError:
        raise UserError('--lm-eval needs the package lm-eval: pip install "lm-eval[hf]"') from None
    return lm_eval


@contextmanager
def as_hugging_face(weights: Weights, path: Path) -> Iterator[Path]:
    """The model as a Hugging Face folder: the one it is, or a temporary export."""
    if hf.is_folder(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="megadcp-") as temporary:
        folder = Path(temporary) / "model"
        hf.write_folder(export_of(weights), folder, hf.Options())
        yield folder


def tasks(weights: Weights, options: argparse.Namespace) -> dict[str, Any]:
    """Results of lm-eval, by task; printed, too."""
    lm_eval = need_lm_eval()
    names = [name.strip() for name in options.lm_eval.split(",") if name.strip()]
    with as_hugging_face(weights, options.model) as folder:
        if not (folder / "tokenizer.json").is_file():
            raise UserError("--lm-eval needs a tokenizer.json, which this model's tokenizer does not have (tools/convert_checkpoint.py says why)")
        dtype = str(weights.dtype).removeprefix("torch.")
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": dtype, "trust_remote_code": False},
            tasks=names,
            num_fewshot=options.num_fewshot,
            batch_size=options.batch_size,
            device=device_of(options.device).type,
            limit=options.limit,
        )
    found: dict[str, Any] = {}
    for task, values in results["results"].items():
        found[task] = {name.removesuffix(",none"): value for name, value in values.items() if isinstance(value, (int, float))}
        print(f"{task}: " + " | ".join(f"{name} {value:.4f}" for name, value in found[task].items()))
    return found


# ------------------------------------------------------------------------------------------------------------------- main
def run(options: argparse.Namespace) -> None:
    """Carry out one request."""
    if options.lm_eval:
        need_lm_eval()
    elif options.skip_loss:
        raise UserError("--skip-loss leaves nothing to do; name tasks: --lm-eval TASKS")
    if options.tokens is not None and options.tokens < 0:
        raise UserError(f"--tokens {options.tokens}: 1 and above, or 0 for all")
    if options.threads:
        torch.set_num_threads(options.threads)
    weights = open_weights(options.model, options.step)
    result: dict[str, Any] = {"model": weights.where, "source": weights.source}
    if not options.skip_loss:
        result["validation"] = losses(weights, options)
    if options.lm_eval:
        result["lm_eval"] = tasks(weights, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Exit code of one call."""
    try:
        run(arguments(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
