"""Everything that a run is at one moment: what a checkpoint holds, and how it comes back bit for bit."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megadcp.backends.choose import make_backend
from megadcp.config.check import UserError
from megadcp.config.run_file import to_dict
from megadcp.config.schema import Config
from megadcp.engine.refit import Refit
from megadcp.engine.step import Engine
from megadcp.mesh.groups import GroupPool
from megadcp.nn.gpt import GPT
from megadcp.nn.part import parts_of
from megadcp.parallel.assemble import fill, weight_pieces, whole_shapes, whole_tensors
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.basis import stage_layers_from
from megadcp.train.checkpoint import Checkpoint, CheckpointError, require_match
from megadcp.train.optim import Optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Progress:
    """Counters of a run. `skipped` counts steps that were not applied, `skipped_in_a_row` those since the last good one."""

    step: int = 0
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class TrainState:
    """The model (or this rank's share of it), its optimizer and how far they are.

    `order` and `tokenizer` are fingerprints of the data ("" is unknown). pool: the groups of all ranks; None: this process runs alone.
    """

    config: Config
    device: torch.device
    model: GPT
    optimizer: Optimizer
    gradients: GradientBuffers
    progress: Progress
    order: str = ""
    tokenizer: str = ""
    pool: GroupPool | None = None
    refit: Refit | None = None

    @property
    def engine(self) -> Engine:
        """What the engine needs of it."""
        return Engine(self.model, self.gradients, self.optimizer, self.device, self.config.optim.clip_norm, self.pool)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What to save, by file and name. On one rank the live tensors; with several all of them call it, and rank 0 gets whole tensors."""
        self.optimizer.wait()
        return {"model": whole_tensors(weight_pieces(self.model), self.pool, self._tied), "optimizer": self.optimizer.tensors()}

    def shapes(self) -> dict[str, dict[str, Tensor]]:
        """The names of `tensors` with meta tensors, on every rank. All ranks call it."""
        return {"model": whole_shapes(weight_pieces(self.model), self.pool, self._tied), "optimizer": self.optimizer.shapes()}

    @property
    def _tied(self) -> bool:
        return self.config.model.tied

    def meta(self) -> dict[str, Any]:
        """The rest, as JSON values."""
        return {
            **asdict(self.progress),
            "updates": self.optimizer.updates,
            "order": self.order,
            "tokenizer": self.tokenizer,
            "config": to_dict(self.config),
            "random": random_states(self.device),
            "torch": torch.__version__,
            **({} if self.refit is None else {"refit": self.refit.to_dict()}),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. CheckpointError names what does not fit.

        Random states come back too, so call it when everything that may draw numbers has been made.
        """
        meta, found = checkpoint.meta, {name: checkpoint.tensors(name) for name in ("model", "optimizer")}
        for key, here, what in (("order", self.order, "the data order"), ("tokenizer", self.tokenizer, "the tokenizer")):
            if here and meta.get(key) and meta[key] != here:
                raise CheckpointError(
                    f"{checkpoint.path} was trained with other data: {what} has changed (fingerprint {str(meta[key])[:12]}, now {here[:12]}); "
                    "put the data settings and files back, or start a new run with another run.name"
                )
        for name, tensors in self.shapes().items():
            require_match(tensors, found[name], checkpoint.path / f"{name}.safetensors")
        counters: dict[str, Any] = {name: meta.get(name) for name in (*(item.name for item in fields(Progress)), "updates")}
        for key, value in counters.items():
            if type(value) is not int or value < 0:
                raise CheckpointError(f"{checkpoint.path}/meta.json: {key} is {value!r}, expected a whole number")
        self.optimizer.wait()
        fill(weight_pieces(self.model), found["model"], self._tied)
        self.optimizer.load(found["optimizer"], counters.pop("updates"))
        self.progress = Progress(**counters)
        restore_random_states(meta.get("random"), self.device, str(checkpoint.path))


def new_state(config: Config, device: torch.device, order: str = "", tokenizer: str = "", pool: GroupPool | None = None) -> TrainState:
    """The state of a run before its first step. Initial weights depend on run.seed alone; masters keep them unrounded.

    With a pool all ranks call it, and each gets its share of the model.
    """
    dtype = model_dtype(config)
    model = build_model(config, device, dtype, pool)
    masters: Mapping[str, Tensor] = {}
    if dtype != torch.float32:
        masters = weights(build_model(config, device, torch.float32, pool))
    gradients = GradientBuffers(model.named_parameters(), pool, config.model.tied)
    optimizer = Optimizer(model, gradients, make_backend(config.precision, dtype, device), config.optim, masters)
    return TrainState(config, device, model, optimizer, gradients, Progress(), order, tokenizer, pool)


def build_model(config: Config, device: torch.device, dtype: torch.dtype, pool: GroupPool | None = None) -> GPT:
    """The model with its initial weights; with a pool this rank's share of it."""
    parallel = config.parallel
    tp = None if pool is None else pool.tp
    part = parts_of(stage_layers_from(parallel, config.model.layers), parallel.virtual_stages)[pool.coords.pp] if pool is not None else None
    backend = make_backend(config.precision, dtype, device, tp, parallel.sequence_parallel)
    return GPT(config.model, backend, config.run.seed, int(config.hardware.loss_chunk), part)


def model_dtype(config: Config) -> torch.dtype:
    """Format of the parameters."""
    if config.precision.format not in DTYPES:
        raise UserError(f"precision.format={config.precision.format} needs a backend that this version doesn't have; legal here: {', '.join(DTYPES)}")
    return DTYPES[config.precision.format]


def choose_device(config: Config) -> torch.device:
    """The device that cluster.device asks for."""
    wanted = config.cluster.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("cluster.device=cuda, but torch sees no GPU here; use cluster.device=cpu or auto")
    return torch.device("cuda", 0) if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else torch.device("cpu")


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameter name -> live tensor, detached. A tied head is the embedding and appears once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors`, which were checked to match, into the model."""
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])


# --------------------------------------------------------------------------------------------------------- random states
def seed_random(seed: int) -> None:
    """Start python's, numpy's and torch's generators. Nothing here draws from them; what a user adds may."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of python's, numpy's and torch's generators as JSON values."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return states


def restore_random_states(states: Any, device: torch.device, where: str) -> None:
    """Undo of `random_states`. A GPU's state is taken over where both runs have one."""
    try:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode(states["torch"]))
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(_decode(states["cuda"]), device)
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{where}/meta.json: the random states can't be restored ({error})") from None


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
