"""What a finished run leaves beside its checkpoints: curves, a sample, result.json, and a few closing lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.data.corpus import open_train_sources
from megadcp.data.pictures import curve_svg, length_histogram_svg
from megadcp.data.tokenizer import Tokenizer
from megadcp.nn.flops import parameters
from megadcp.nn.gpt import GPT
from megadcp.train.checkpoint import Checkpoint, read_weights
from megadcp.train.log import duration, short
from megadcp.train.metrics import read_metrics
from megadcp.train.run_folder import RunFolder, write_json, write_text
from megadcp.train.sample import Sampling, generate
from megadcp.train.state import TrainState, build_model, load_weights

CURVE_POINTS = 400  # more steps than that are averaged in groups
DRAWN_DOCUMENTS = 10_000_000  # of more, every n-th is drawn
WHOLE_PARAMETERS = 500_000_000  # of a model that rank 0 puts together for a sample
LAST_STEPS = 20  # the training loss people are told is their mean: a single step is noisy
Say = Callable[[str], None]


def draw(run: RunFolder, config: Config) -> None:
    """loss.svg and lengths.svg."""
    rows = read_metrics(run.metrics)
    series = {"training": average([(row["step"], row["loss"]) for row in rows if row.get("loss") is not None], CURVE_POINTS)}
    for row in rows:
        if row.get("validation_loss") is not None:
            series.setdefault(f"validation {row['name']}", []).append((float(row["step"]), row["validation_loss"]))
    write_text(run.loss_curve, curve_svg(series, f"Loss of {config.run.name}", "step", "loss (nats per token)"))
    write_text(run.lengths, length_histogram_svg(document_lengths(config)))


def average(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: means of equal groups of neighbours."""
    size = max(1, -(-len(points) // most))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def document_lengths(config: Config) -> np.ndarray:
    """Tokens of the corpus' documents before anything is cut, int64 [n]; empty ones left out."""
    parts = []
    for source in open_train_sources(config.data):
        stride = max(1, source.file.count // DRAWN_DOCUMENTS)
        lengths = source.file.lengths_at(np.arange(0, source.file.count, stride))
        parts.append(lengths[lengths > 0])
    return np.concatenate(parts)


def whole_model(state: TrainState, newest: Callable[[], Checkpoint | None]) -> GPT | None:
    """The model in one piece: the state's own, or one read from the newest checkpoint where each rank has a share; None if it is too large."""
    if state.pool is None:
        return state.model
    saved = newest() if parameters(state.config.model) <= WHOLE_PARAMETERS else None
    if saved is None:
        return None
    model = build_model(state.config, torch.device("cpu"), next(state.model.parameters()).dtype)
    load_weights(model, read_weights(saved))
    return model


def write_sample(run: RunFolder, config: Config, model: GPT, tokenizer: Tokenizer) -> str:
    """sample.txt: the prompt and what the model makes of it, greedy and sampled. Returns the sampled text."""
    prompt = tokenizer.encode(config.run.sample_prompt)
    texts = []
    for title, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8)):
        sampling = Sampling(tokens=config.run.sample_tokens, temperature=temperature, top_p=0.95, seed=config.run.seed)
        made = [token for token in generate(model, prompt, sampling, tokenizer.vocab_size, tokenizer.eod) if token != tokenizer.eod]
        texts.append((title, tokenizer.decode([*prompt, *made])))
    write_text(run.sample, "".join(f"--- {title} ---\n{text}\n" for title, text in texts))
    return texts[-1][1]


def write_result(run: RunFolder, state: TrainState, entropy: dict[str, float], sample: str) -> None:
    """result.json, which marks the run as finished. Times are sums over all steps, whichever process ran them."""
    rows = read_metrics(run.metrics)
    steps = [row for row in rows if "validation_loss" not in row]
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    seconds = sum(row["seconds"] for row in steps)
    write_json(
        run.result,
        {
            "name": state.config.run.name,
            "steps": state.progress.step,
            "tokens": state.progress.tokens,
            "documents": state.progress.documents,
            "skipped": state.progress.skipped,
            "parameters": parameters(state.config.model),
            "final_loss": losses[-1] if losses else None,
            "mean_loss_of_last_steps": sum(losses[-LAST_STEPS:]) / len(losses[-LAST_STEPS:]) if losses else None,
            "validation_loss": {row["name"]: row["validation_loss"] for row in rows if "validation_loss" in row},  # the last of each set
            "unigram_entropy": entropy,
            "seconds": seconds,
            "tokens_per_second": state.progress.tokens / seconds if seconds else None,
            "checkpoint": run.latest.read_text(encoding="utf-8").strip(),
            "sample": sample,
        },
    )


def show_result(folder: Path, say: Say) -> None:
    """The closing lines of a finished run, from its result.json."""
    run = RunFolder(folder)
    try:
        result: dict[str, Any] = json.loads(run.result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{run.result} can't be read ({error}); the run is not finished") from None
    say("")
    say(f"Run {result['name']} is finished: {result['steps']:,} steps, {result['tokens']:,} tokens, {result['documents']:,} documents")
    speed = f", {short(result['tokens_per_second'])} tokens/s" if result.get("tokens_per_second") else ""
    say(f"  time      {duration(result['seconds'])} in training steps{speed}")
    if result.get("mean_loss_of_last_steps") is not None:
        say(f"  training  loss {result['mean_loss_of_last_steps']:.3f} (mean of the last {LAST_STEPS} steps)")
    for name, loss in result["validation_loss"].items():
        entropy = result["unigram_entropy"].get(name)
        beside = f"; knowing token frequencies only: {entropy:.3f}" if entropy is not None else ""
        say(f"  held out  {name}: loss {loss if loss is None else round(loss, 3)}{beside}")
    if result.get("skipped"):
        say(f"  skipped   {result['skipped']} steps with NaN or Inf")
    if result.get("sample"):
        say("  sample    " + str(result["sample"]).replace("\n", "\n            "))
    for label, path in (("pictures", run.loss_curve), ("", run.lengths), ("metrics", run.metrics), ("plans", run.plans)):
        say(f"  {label:<9} {path}")
    say(f"  weights   {run.path / result['checkpoint']}")
    say(f'  next      python tools/generate.py {run.path} --prompt "..." | run.name=NAME starts a new run on the same data')
