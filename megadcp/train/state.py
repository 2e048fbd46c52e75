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
from megadcp.engine.graphs import Graphs
from megadcp.engine.refit import Refit
from megadcp.engine.step import Engine
from megadcp.engine.stragglers import LaneSpeeds
from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.gpt import GPT
from megadcp.nn.part import parts_of
from megadcp.parallel.boxes import Box, boxes_of, boxes_once, weight_pieces
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.basis import stage_layers_from
from megadcp.train.checkpoint import Checkpoint, CheckpointError, require_match
from megadcp.train.health import BadSteps
from megadcp.train.optim import Optimizer
from megadcp.train.resume import may_reorder, may_retokenize
from megadcp.train.together import gather

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8_current": torch.bfloat16, "fp8_block": torch.bfloat16}


@dataclass
class Progress:
    """Counters of a run. `skipped` counts steps that were not applied, `skipped_in_a_row` those since the last good one.

    place: step of the document order that comes next, which is `step` unless a rollback left some out or the step size has changed.
    """

    step: int = 0
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    place: int = 0
    rollbacks: int = 0


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
    lanes: LaneSpeeds | None = None
    bad_steps: BadSteps | None = None
    graphs: Graphs | None = None

    @property
    def engine(self) -> Engine:
        """What the engine needs of it."""
        return Engine(self.model, self.gradients, self.optimizer, self.device, self.config.optim.clip_norm, self.pool, self.graphs)

    @property
    def world(self) -> Group:
        """All ranks of the run."""
        return Group.single() if self.pool is None else self.pool.world

    def boxes(self) -> list[Box]:
        """What this rank writes into a checkpoint, as views of the live tensors: all ranks together have every element once."""
        self.optimizer.wait()
        return boxes_to_save(self.model, self.optimizer, self.pool, self._tied)

    def shapes(self) -> dict[str, dict[str, Tensor]]:
        """By part ("model", "optimizer") the names and meta tensors that a checkpoint of this run has, on every rank. All ranks call it."""
        own = {box.name: (box.whole, box.values.dtype) for box in boxes_to_load(self.model, self.optimizer, self._tied)}
        found: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for each in gather(own, self.world):
            for name, (whole, dtype) in each.items():
                part = "model" if name.startswith("model.") else "optimizer"
                found[part][name.removeprefix("model.")] = torch.empty(whole, dtype=dtype, device="meta")
        return found

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
            "layout": self._layout,
            "torch": torch.__version__,
            **({} if self.refit is None else {"refit": self.refit.to_dict()}),
            **({} if self.lanes is None else {"lane_speeds": self.lanes.to_dict()}),
            **({} if self.bad_steps is None else {"bad_steps": self.bad_steps.to_dict()}),
        }

    def own_meta(self) -> dict[str, Any]:
        """What each rank keeps for itself, as JSON values."""
        return {"random": random_states(self.device)}

    @property
    def _layout(self) -> dict[str, int]:
        parallel, lanes = self.config.parallel, 1 if self.pool is None else self.pool.mesh.lanes
        return {"tp": parallel.tp, "pp": parallel.pp, "lanes": lanes, "virtual_stages": parallel.virtual_stages}

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of any layout. All ranks call it; CheckpointError, the same on all, names what does not fit.

        Random states come back too, so call it when everything that may draw numbers has been made: each rank's own in the layout that
        saved them, otherwise those of rank 0 on all ranks.
        """
        meta = checkpoint.meta
        config = self.config
        for key, here, what, allowed in (
            ("order", self.order, "the data order", may_reorder(config)),
            ("tokenizer", self.tokenizer, "the tokenizer", may_retokenize(config)),
        ):
            if here and meta.get(key) and meta[key] != here and not allowed:
                raise CheckpointError(
                    f"{checkpoint.path} was trained with other data: {what} has changed (fingerprint {str(meta[key])[:12]}, now {here[:12]}); "
                    "put the data settings and files back, start a new run with another run.name, or allow it by name: "
                    f"checkpoint.allow_change=[{'data.train' if key == 'order' else 'data.tokenizer'}]"
                )
        for name, tensors in self.shapes().items():
            require_match(tensors, checkpoint.shapes(name), checkpoint.path)
        counted = {"place": meta.get("step"), "rollbacks": 0, **meta}  # older checkpoints have neither
        counters: dict[str, Any] = {name: counted.get(name) for name in (*(item.name for item in fields(Progress)), "updates")}
        for key, value in counters.items():
            if type(value) is not int or value < 0:
                raise CheckpointError(f"{checkpoint.path}/meta.json: {key} is {value!r}, expected a whole number")
        self.optimizer.wait()
        self.optimizer.make_room(counters.pop("updates"))
        problem = ""
        try:
            checkpoint.read(boxes_to_load(self.model, self.optimizer, self._tied))
        except CheckpointError as error:
            problem = str(error)
        for each in gather(problem, self.world):
            if each:
                raise CheckpointError(each)
        self.progress = Progress(**counters)
        restore_random_states(self._random_of(meta), self.device, str(checkpoint.path))

    def _random_of(self, meta: Mapping[str, Any]) -> Any:
        if "ranks" not in meta:  # format 1
            return meta.get("random")
        try:
            ranks = meta["ranks"]
            mine = self.world.index if meta.get("layout") == self._layout else 0
            return ranks["values"][ranks["of_rank"][mine]]["random"]
        except (KeyError, IndexError, TypeError):
            return None


def boxes_to_save(model: nn.Module, optimizer: Optimizer, pool: GroupPool | None, tied: bool) -> list[Box]:
    """KIND.PARAMETER: of what several ranks hold, the part that this one writes. Views of the live tensors."""
    pieces = {"model": optimizer.weights(), **optimizer.state()}
    if pool is None or pool.lanes.index == 0:
        trained = set(optimizer.gradients.names)
        pieces["model"] += [piece for piece in weight_pieces(model) if piece.name not in trained]
    tp = Group.single() if pool is None else pool.tp
    return [box for kind, each in pieces.items() for box in boxes_once(each, tied, tp, f"{kind}.")]


def boxes_to_load(model: nn.Module, optimizer: Optimizer, tied: bool) -> list[Box]:
    """KIND.PARAMETER: all that this rank needs. Views of the live tensors, to be overwritten."""
    pieces = {"model": weight_pieces(model), **optimizer.state()}
    return [box for kind, each in pieces.items() for box in boxes_of(each, tied, f"{kind}.")]


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
    backend = make_backend(config.precision, dtype, device)
    optimizer = Optimizer(model, gradients, backend, config.optim, masters)
    graphs = Graphs.of(model, config.parallel.cuda_graphs, device, backend.name, optimizer.wait)
    return TrainState(config, device, model, optimizer, gradients, Progress(), order, tokenizer, pool, graphs=graphs)


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
        "python": [version, _encode(np.array(numbers, dtype=np.uint32)), gauss],
        "numpy": [kind, _encode(np.asarray(keys)), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state().numpy()),
    }
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device).numpy())
    return states


def restore_random_states(states: Any, device: torch.device, where: str) -> None:
    """Undo of `random_states`. A GPU's state is taken over where both runs have one."""
    try:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(_decode(numbers, np.uint32).tolist()), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, _decode(keys, np.uint32), position, has_gauss, cached))
        torch.set_rng_state(torch.from_numpy(_decode(states["torch"], np.uint8)))
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(torch.from_numpy(_decode(states["cuda"], np.uint8)), device)
    except (TypeError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{where}/meta.json: the random states can't be restored ({error})") from None


def _encode(state: np.ndarray) -> str:
    return base64.b64encode(state.tobytes()).decode("ascii")


def _decode(value: Any, dtype: Any) -> np.ndarray:
    """Of text, or of the list of numbers that format 1 has."""
    return np.array(value, dtype=dtype) if isinstance(value, list) else np.frombuffer(bytearray(base64.b64decode(value)), dtype=dtype)
