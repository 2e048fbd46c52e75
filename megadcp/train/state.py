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

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.check import UserError
from megadcp.config.run_file import to_dict
from megadcp.config.schema import Config
from megadcp.engine.step import Engine
from megadcp.nn.gpt import GPT
from megadcp.parallel.gradients import GradientBuffers
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
    """The model, its optimizer and how far they are. `order` and `tokenizer` are fingerprints of the data ("" is unknown)."""

    config: Config
    device: torch.device
    model: GPT
    optimizer: Optimizer
    gradients: GradientBuffers
    progress: Progress
    order: str = ""
    tokenizer: str = ""

    @property
    def engine(self) -> Engine:
        """What the engine needs of it."""
        return Engine(self.model, self.gradients, self.optimizer, self.device, self.config.optim.clip_norm)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors to save, by file and name."""
        return {"model": weights(self.model), "optimizer": self.optimizer.tensors()}

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
        for name, tensors in self.tensors().items():
            require_match(tensors, found[name], checkpoint.path / f"{name}.safetensors")
        counters: dict[str, Any] = {name: meta.get(name) for name in (*(item.name for item in fields(Progress)), "updates")}
        for key, value in counters.items():
            if type(value) is not int or value < 0:
                raise CheckpointError(f"{checkpoint.path}/meta.json: {key} is {value!r}, expected a whole number")
        load_weights(self.model, found["model"])
        self.optimizer.load(found["optimizer"], counters.pop("updates"))
        self.progress = Progress(**counters)
        restore_random_states(meta.get("random"), self.device, str(checkpoint.path))


def new_state(config: Config, device: torch.device, order: str = "", tokenizer: str = "") -> TrainState:
    """The state of a run before its first step. Initial weights depend on run.seed alone; masters keep them unrounded."""
    dtype = model_dtype(config)
    model = build_model(config, device, dtype)
    masters: Mapping[str, Tensor] = {}
    if dtype != torch.float32:
        masters = weights(build_model(config, device, torch.float32))
    gradients = GradientBuffers(model.named_parameters())
    optimizer = Optimizer(model, gradients, TorchBackend(dtype, device), config.optim, masters)
    return TrainState(config, device, model, optimizer, gradients, Progress(), order, tokenizer)


def build_model(config: Config, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model with its initial weights."""
    return GPT(config.model, TorchBackend(dtype, device), config.run.seed, int(config.hardware.loss_chunk))


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
