"""Tokens per second of planning and batch building without a model, against plain references, in one run.

`python tools/benchmark.py loader [--documents N] [--tokens-per-step N] [--max-length N] [--steps N] [--repeats N]`

On a synthetic corpus with a long tail (lognormal lengths, made for the run and removed after it), in turn:
- this: StepLoader with the real planner: order, plan, packs; without a thread (ahead=0), so that all work is in the time. The part
  without planning is told apart, since the others don't plan;
- loop: the same documents packed by the first code one would write: one Python step per document, then concatenation;
- megatron-core (where installed): torch DataLoader over its GPTDataset, fixed samples of max_length, no attention mask.
Index files and order caches are made before the clock starts. Times are per real token (megatron-core: per token of its samples).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmark import interleaved, machine, ratio_line

from megadcp.config.load import compose
from megadcp.config.schema import Config, SourceConfig
from megadcp.data.batch import StepLoader
from megadcp.data.indexed import IndexedWriter
from megadcp.data.order import DocumentSource, StepDocuments, open_training
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan

VOCAB = 50_000


def write_corpus(prefix: Path, documents: int) -> int:
    """Lognormal lengths (median 660, mean about 1,200), uint16 tokens; returns the number of tokens."""
    state = np.random.RandomState(0)
    total = 0
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for begin in range(0, documents, 10_000):
            lengths = np.clip(state.lognormal(6.5, 1.1, min(10_000, documents - begin)), 2, 500_000).astype(np.int32)
            writer.add_many(state.randint(1, VOCAB, size=int(lengths.sum())).astype(np.uint16), lengths)
            total += int(lengths.sum())
        writer.finish()
    return total


def ours(source: DocumentSource, plan_for: Callable[[StepDocuments], StepPlan], steps: range, building: list[float]) -> float:
    """Seconds per real token; those of building alone are appended to `building`."""
    begin, tokens, seconds = time.perf_counter(), 0, 0.0
    with StepLoader(source, plan_for, steps.start, steps.stop, 0) as loader:
        for step in loader:
            tokens += int(step.documents.lengths.sum())
            seconds += step.build_seconds
    building.append(seconds / tokens)
    return (time.perf_counter() - begin) / tokens


def plain_loop(source: DocumentSource, pack_tokens: int, steps: range) -> float:
    """Seconds per real token of first-come packing and per-document arrays."""
    begin, tokens = time.perf_counter(), 0
    for index in steps:
        documents = source.step(index)
        packs: list[list[int]] = [[]]
        room = pack_tokens
        for document, length in zip(documents.ids.tolist(), documents.lengths.tolist(), strict=True):
            if length > room and packs[-1]:
                packs.append([])
                room = pack_tokens
            packs[-1].append(document)
            room -= length
        for pack in packs:
            texts = [source.read(document) for document in pack]
            np.concatenate([text for text, _ in texts])
            np.concatenate([labels for _, labels in texts])
            np.concatenate([np.arange(len(text)) for text, _ in texts])
            np.cumsum([0] + [len(text) for text, _ in texts], dtype=np.int32)
            tokens += sum(len(text) for text, _ in texts)
    return (time.perf_counter() - begin) / tokens


def peer_loader(prefix: str, config: Config, steps: int) -> Callable[[range], float] | None:
    """Seconds per token of torch's DataLoader over megatron-core's GPTDataset; None where it isn't installed."""
    try:
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from torch.utils.data import DataLoader, Subset
    except ImportError:
        return None
    per_step = max(1, config.data.tokens_per_step // config.data.max_length)

    class Numbers:
        """The least that GPTDataset asks of a tokenizer."""

        vocab_size, eod = VOCAB, 0
        unique_identifiers: dict[str, Any] = {}  # noqa: RUF012

    settings = GPTDatasetConfig(
        random_seed=config.data.seed, sequence_length=config.data.max_length, blend=([prefix], None), split="1,0,0", tokenizer=Numbers(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, [steps * per_step, 0, 0], lambda: True, settings).build()[0]

    def run(steps: range) -> float:
        begin, tokens = time.perf_counter(), 0
        for batch in DataLoader(Subset(dataset, range(steps.start * per_step, steps.stop * per_step)), batch_size=per_step):
            tokens += batch["tokens"].numel()
        return (time.perf_counter() - begin) / tokens

    return run


def settings_for(prefix: str, options: argparse.Namespace) -> Config:
    """The 1b model on H200 with the bench's corpus: the plan is the one such a run would get."""
    config = compose(["experiment=gpt_1b", "cluster=local", "run.name=bench_loader"])
    data = dataclasses.replace(
        config.data,
        train=(SourceConfig(prefix, 1.0, "bench"),),
        validation=(),
        split=(1.0, 0.0, 0.0),
        max_length=options.max_length,
        tokens_per_step=options.tokens_per_step,
    )
    return dataclasses.replace(config, data=data)


def main(argv: list[str]) -> int:
    """Print tokens/s of each contestant and the ratios of their times."""
    parser = argparse.ArgumentParser(prog="benchmark.py loader", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--tokens-per-step", type=int, default=1 << 20)
    parser.add_argument("--max-length", type=int, default=131_072)
    parser.add_argument("--steps", type=int, default=8, help="steps per measurement")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="megadcp-bench-") as folder:
        prefix = str(Path(folder) / "corpus")
        tokens = write_corpus(Path(prefix), options.documents)
        config = settings_for(prefix, options)
        total = options.steps * (options.repeats + 1)
        source = open_training(config.data, total)
        planner = planner_for(config)
        parts = {name: itertools.count() for name in ("this", "loop", "megatron-core")}

        def plan(documents: StepDocuments) -> StepPlan:
            return planner(documents.step, documents.lengths.tolist())

        def steps(name: str) -> range:
            at = next(parts[name]) * options.steps
            return range(at, at + options.steps)

        building: list[float] = []
        pack_tokens = max(microbatch.tokens for microbatch in plan(source.step(0)).microbatches)
        contestants: dict[str, Callable[[], float | None]] = {
            "this": lambda: ours(source, plan, steps("this"), building),
            "loop": lambda: plain_loop(source, pack_tokens, steps("loop")),
        }
        peer = peer_loader(prefix, config, total)
        if peer is not None:
            contestants["megatron-core"] = lambda: peer(steps("megatron-core"))
        interleaved(contestants, 1)  # warm the page cache and the imports
        seconds = interleaved(contestants, options.repeats)
        print(f"{machine()}; {options.documents:,} documents, {tokens:,} tokens, packs up to {pack_tokens:,} tokens")
        print(f"{options.repeats} measurements of {options.steps} steps of {options.tokens_per_step:,} tokens")
        seconds = {"this": seconds["this"], "this, building": building[1:], **seconds}
        for name, taken in seconds.items():
            print(f"{name:<14} {1e-6 / statistics.median(taken):8.1f} M tokens/s")
        for name in list(contestants)[1:]:
            print(ratio_line(f"time of this / {name}", seconds["this"], seconds[name]))
            print(ratio_line(f"time of this, building / {name}", seconds["this, building"], seconds[name]))
        if peer is None:
            print("megatron-core is not installed: no comparison with it")
    return 0
