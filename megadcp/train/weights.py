"""The weights of a model, wherever they lie: a run, one of its checkpoints, a Hugging Face folder, or what tools/convert_checkpoint.py imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadcp.backends.choose import make_backend
from megadcp.config.check import UserError
from megadcp.config.run_file import from_dict, load_run
from megadcp.config.schema import Config, ModelConfig, PrecisionConfig, TokenizerConfig
from megadcp.engine.placement import Placement
from megadcp.interop import hf
from megadcp.interop.hf_files import read_tensors
from megadcp.interop.tensors import LazyTensors, mismatches
from megadcp.mesh.groups import Group
from megadcp.nn.gpt import GPT
from megadcp.nn.shard import shard_of, take
from megadcp.parallel.boxes import weight_pieces
from megadcp.parallel.gradients import FIRST_TABLE, LAST_TABLE
from megadcp.parallel.replicas import Piece
from megadcp.train import checkpoint
from megadcp.train.exchange import kind_of, read_import, refuse_other_model
from megadcp.train.run_folder import RunFolder
from megadcp.train.sample import one_document
from megadcp.train.state import TrainState
from megadcp.train.together import ALONE

STEM = "weights"  # of an import's files
Say = Callable[[str], None]


@dataclass(frozen=True)
class Weights:
    """Weights under our names, and what belongs to them.

    where: for people. context: longest text in tokens. tokenizer: None where none is named. fingerprint: of the tokenizer that made the data it
    was trained on ("" unknown). source: where they come from, as JSON values. config: the settings of the run, if it is one.
    """

    model: ModelConfig
    tensors: LazyTensors
    where: str
    context: int
    tokenizer: TokenizerConfig | None
    fingerprint: str
    source: dict[str, Any]
    config: Config | None = None
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Format to run them in: bf16 where they are stored so, fp32 otherwise."""
        return torch.bfloat16 if hf.format_of(self.tensors) == "bfloat16" else torch.float32


# ------------------------------------------------------------------------------------------------------------------- open
def open_weights(path: Path, step: int | None = None, ignored: Iterable[str] = (), group: Group = ALONE) -> Weights:
    """Find out what `path` is, and read what describes it; tensors are read when they are used.

    step: of a run, instead of its newest undamaged checkpoint. ignored: unknown fields of a Hugging Face config.json that do no harm.
    group: ranks that call it together share the work of checking a checkpoint.

    Raises:
        UserError: nothing of the kind is there, or it is damaged; says what would work.
    """
    kind = kind_of(path)
    if kind == "run":
        config = load_run(path)
        return _of_checkpoint(_find(RunFolder(path), step, group), config)
    if step is not None:
        raise UserError(f"{path} is no run, so it has no checkpoint of step {step}")
    if kind == "import":
        model, context, tokenizer, source = read_import(path)
        return Weights(model, read_tensors(path, STEM), str(path), context, tokenizer, "", source)
    if kind == "hugging face":
        return _of_hugging_face(path, ignored)
    found = checkpoint.open_checkpoint(path, group)
    return _of_checkpoint(found, from_dict(found.meta["config"]))


def _find(run: RunFolder, step: int | None, group: Group) -> checkpoint.Checkpoint:
    paths = {int(path.name.removeprefix(checkpoint.PREFIX)): path for path in checkpoint.saved(run)}
    if not paths:
        raise UserError(f"{run.path} has no checkpoint yet; train it first, or wait for its first save (checkpoint.every)")
    if step is None:
        found = checkpoint.newest(run, lambda text: print(text, file=sys.stderr), group=group)
        assert found is not None
        return found
    if step not in paths:
        raise UserError(f"{run.path} has no checkpoint of step {step}; there are: {', '.join(map(str, paths))}")
    return checkpoint.open_checkpoint(paths[step], group)


def _of_checkpoint(found: checkpoint.Checkpoint, config: Config) -> Weights:
    model, named = config.model, config.data.tokenizer.path or config.data.tokenizer.kind == "bytes"
    return Weights(
        model=model,
        tensors=LazyTensors(found.shapes("model"), lambda name: found.tensors("model", [name])[name]),
        where=str(found.path),
        context=model.max_position if model.position == "learned" else config.data.max_length,
        tokenizer=config.data.tokenizer if named else None,
        fingerprint=str(found.meta.get("tokenizer") or ""),
        source={"run": config.run.name, "step": found.step, "tokens": found.meta.get("tokens")},
        config=config,
    )


def _of_hugging_face(path: Path, ignored: Iterable[str]) -> Weights:
    folder = hf.open_folder(path, ignored)
    noted, source = folder.about.get("tokenizer"), folder.about.get("source")
    known = noted if isinstance(noted, dict) and folder.tokenizer is not None and noted.get("kind") == folder.tokenizer.kind else {}
    return Weights(
        model=folder.model,
        tensors=folder.tensors,
        where=str(path),
        context=folder.described.context,
        tokenizer=folder.tokenizer,
        fingerprint=str(known.get("fingerprint") or ""),
        source={"folder": path.resolve().name, **(source if isinstance(source, dict) else {})},
        notes=folder.described.notes,
    )


# -------------------------------------------------------------------------------------------------------------------- use
def load(weights: Weights, device: torch.device, dtype: torch.dtype, loss_chunk: int = 1024) -> GPT:
    """The model in one piece, with these weights. UserError names missing, extra and misshapen tensors."""
    precision = PrecisionConfig("fp32" if dtype == torch.float32 else "bf16")
    gpt = GPT(weights.model, make_backend(precision, dtype, device), 0, loss_chunk).eval()
    _require_match({name: tuple(parameter.shape) for name, parameter in gpt.named_parameters()}, weights)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(weights.tensors[name])
    return gpt


def _require_match(expected: dict[str, tuple[int, ...]], weights: Weights) -> None:
    if wrong := mismatches(expected, weights.tensors.metas):
        raise UserError(f"{weights.where} does not fit the model. {wrong}")


@torch.no_grad()
def logits_of(model: ModelConfig, tensors: LazyTensors, ids: Tensor) -> Tensor:
    """Logits [t, V] in fp32 for one text, ids [t], on the CPU."""
    gpt = load(Weights(model, tensors, "the weights", 0, None, "", {}), torch.device("cpu"), torch.float32)
    return gpt.logits(one_document(ids.tolist(), torch.device("cpu")), Placement())


def export_of(weights: Weights, context: int | None = None) -> hf.Export:
    """What interop writes; context: another longest text, in tokens."""
    if context is not None and weights.model.position == "learned" and context != weights.context:
        raise UserError(f"--context {context}: the model has {weights.context} learned positions, no more and no fewer")
    return hf.Export(weights.model, weights.tensors, context or weights.context, weights.tokenizer, weights.source)


def start_from(state: TrainState, say: Say) -> None:
    """Give a new run the weights that run.init_from names, if it does; all ranks call it, and each reads what it holds.

    Weights alone: the optimizer, the learning rate, the data and all counters start anew. fp32 masters take the values as they are stored.

    Raises:
        UserError: the weights are of another model; names settings or tensors.
    """
    config, tied = state.config, state.config.model.tied
    if not config.run.init_from:
        return
    weights = open_weights(Path(config.run.init_from), group=state.world)
    differing = refuse_other_model(config, weights.model)
    _require_match({name: tuple(meta.shape) for name, meta in state.shapes()["model"].items()}, weights)
    state.optimizer.wait()
    for pieces in (weight_pieces(state.model), state.optimizer.state()["master"]):
        _fill(pieces, weights.tensors, tied)
    told = ", ".join(f"{name} {value}" for name, value in weights.source.items() if value is not None)
    say(f"starting from the weights of {weights.where} ({told}); optimizer, learning rate, data and counters start anew")
    for line in differing:
        say(f"WARNING: {line}: meant only where the context is to change")
    if weights.fingerprint and state.tokenizer and weights.fingerprint != state.tokenizer:
        say("WARNING: the weights were trained with another tokenizer than this run's; the same id may mean other text")


@torch.no_grad()
def _fill(pieces: Iterable[Piece], tensors: LazyTensors, tied: bool) -> None:
    """Copy what pieces hold out of whole tensors, one after the other."""
    for piece in pieces:
        name = FIRST_TABLE if tied and piece.name == LAST_TABLE else piece.name
        local = take(tensors[name], shard_of(piece.parameter)).reshape(-1)
        piece.values.copy_(local[piece.start : piece.stop])


def device_of(wanted: str) -> torch.device:
    """auto, cpu or cuda."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no GPU here; use cpu or auto")
    return torch.device("cuda", 0) if wanted != "cpu" and torch.cuda.is_available() else torch.device("cpu")
