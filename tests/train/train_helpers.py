"""A small corpus of bytes and the config of a run on it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from megadcp.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    GemmFlops,
    HardwareConfig,
    HealthConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PlanConfig,
    PrecisionConfig,
    RunConfig,
    SourceConfig,
    TokenizerConfig,
)  # fmt: skip
from megadcp.data.indexed import IndexedWriter
from megadcp.data.tokenizer import open_tokenizer

HARDWARE = HardwareConfig(
    name="test", gemm_flops=GemmFlops(60e9, 120e9, 60e9), gemm_half_tokens=16, attention_flops=40e9, attention_half_length=300,
    node_bytes=4e9, net_bytes=1e9, node_latency=1e-3, ring_step_seconds=1e-3, layer_overhead_seconds=2e-3, tp_exposed=1.0, memory_bytes=8e9,
    usable_fraction=0.8, loss_chunk=64, gpus_per_node=8, reduce_bytes=2e9, reduce_overlap=0.0, memory_bandwidth=20e9,
)  # fmt: skip
MODEL = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=260, tied=True)
WORDS = ("def ", "return ", "the ", "plan ", "of ", "a ", "step ", "x + 1\n", "if ", "else:\n")


def write_corpus(folder: Path, documents: int = 120) -> str:
    """Sentences of few words, of 5 to 200 bytes; returns the prefix."""
    rng, tokenizer = np.random.default_rng(0), open_tokenizer("bytes", "")
    prefix = folder / "corpus"
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(documents):
            text = "".join(rng.choice(WORDS, int(rng.integers(1, 40))))
            writer.add(np.array([*tokenizer.encode(text), tokenizer.eod]))
        writer.finish()
    return str(prefix)


def config(prefix: str, **changes: Any) -> Config:
    """changes: a group's name and what is different in it, as in run={"steps": 5}."""
    groups = {
        "run": RunConfig(name="test", steps=20, validate_every=10, validate_tokens=512, sample_prompt="def ", sample_tokens=8),
        "model": dataclasses.replace(MODEL, residual_dropout=0.1),
        "data": DataConfig(
            train=(SourceConfig(prefix, 1.0, "words"),), split=(0.9, 0.1, 0.0), max_length=128, tokens_per_step=256,
            tokenizer=TokenizerConfig("bytes", ""),
        ),
        "parallel": ParallelConfig(),
        "plan": PlanConfig(pack_tokens=200),
        "precision": PrecisionConfig("fp32"),
        "optim": OptimConfig(lr=1e-2, warmup_steps=3),
        "checkpoint": CheckpointConfig(every=5, keep_last=2),
        "log": LogConfig(every=10, console="plain"),
        "health": HealthConfig(straggler_factor=0.0),
        "cluster": ClusterConfig(device="cpu", threads=1),
        "hardware": HARDWARE,
    }  # fmt: skip
    assert set(changes) <= set(groups)
    return Config(**{name: dataclasses.replace(group, **changes.get(name, {})) for name, group in groups.items()})
