"""Train a PyTorch or transformers model that is not ours with data-driven plans (docs/any_model.md).

    steps = Steps(model, loader)
    for step in steps:
        optimizer.zero_grad()
        for microbatch in step:
            model(**microbatch).loss.backward()
        loss = step.finish()
        optimizer.step()

A step is one batch of the loader, the same on every rank; the planner says which documents are packed together, on how many ranks, and what
is recomputed. Gradients after `finish` are those of the mean token loss of the whole batch, on every rank, under any plan.

Legend: t rows of this rank, V vocabulary, n documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megadcp.config.check import UserError
from megadcp.config.schema import HardwareConfig, ModelConfig, PlanConfig
from megadcp.data.batch import LoadedStep, StepLoader
from megadcp.data.step_documents import DocumentSource, StepDocuments
from megadcp.engine.agree import agree
from megadcp.engine.lane import Share, count_targets, lane_shares
from megadcp.engine.placement import Placement
from megadcp.engine.transfer import Transfers
from megadcp.interop import any_gradients, any_shape
from megadcp.interop.any_attention import Attention, no_mask
from megadcp.interop.any_checks import check_arguments, check_model, check_windows
from megadcp.interop.any_documents import LoaderDocuments, check_loader
from megadcp.interop.any_hooks import TransformersHooks, Undo, attach_plain, check_calls, leave_in_order
from megadcp.interop.any_loss import summed_loss
from megadcp.interop.any_plans import whole_layer_planner_for
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.mesh.streams import HERE
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.parallel.collectives import all_gather, all_reduce
from megadcp.plan.ahead import PlanWorker
from megadcp.plan.step_plan import StepPlan
from megadcp.plan.verify import verify

__all__ = ["Attention", "Microbatch", "Options", "Step", "Steps"]

PlanFor = Callable[[StepDocuments], StepPlan]


@dataclass(frozen=True)
class Options:
    """What can be said about a run beyond its model and data.

    shape: figures of a plain PyTorch model (of a transformers model they are read from its config). layers: its layers, in order, that may be
    recomputed. hardware: a profile, its name in configs/hardware or its file; None: by the device. plan: the planner's settings. max_cp: largest
    group of ranks that shares a microbatch, 0 for all. max_length: tokens of the longest document, 0 for lengths' or the config's. lengths:
    tokens of each item of the data set: with them a rank reads only what it runs. sharded_optimizer: moments are shared by all ranks
    (ZeroRedundancyOptimizer; FSDP2 is seen). steps, first_step: of a document source, how many and from where.
    """

    shape: ModelConfig | None = None
    layers: Sequence[nn.Module] = ()
    hardware: HardwareConfig | str | None = None
    plan: PlanConfig = field(default_factory=PlanConfig)
    max_cp: int = 0
    max_length: int = 0
    lengths: Sequence[int] | None = None
    sharded_optimizer: bool = False
    steps: int = 0
    first_step: int = 0


class Microbatch:
    """The rows of one pack that this rank has, for model(**microbatch); it travels as a keyword argument down to the attention.

    last: the one of FSDP2 in which gradients are reduced, a single token without target. No dataclass, for the reason that Attention has.
    """

    def __init__(self, packed: PackedTokens, placement: Placement, step: Step, slot: int, last: bool = False) -> None:
        self.packed, self.placement, self.step, self.slot, self.last = packed, placement, step, slot, last
        self.attention = Attention(packed, placement, self)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What the model is called with: transformers' names with a leading dim of 1, or input_ids, position_ids [t] and attention."""
        positions = self.packed.positions.clamp(max=max(self.packed.real_lengths_list) - 1)  # padding goes on counting, beyond a table's end
        if not self.step.steps.transformers:
            return {"input_ids": self.packed.tokens, "position_ids": positions, "attention": self.attention}
        tokens, mask = self.packed.tokens.unsqueeze(0), no_mask(positions.device)
        return {"input_ids": tokens, "position_ids": positions.unsqueeze(0), "attention_mask": mask, "use_cache": False, "microbatch": self}

    def keys(self) -> list[str]:
        """Names of the arguments."""
        return list(self.arguments)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def loss(self, logits: Tensor) -> Tensor:
        """Part of the step's mean loss: the sum over the targets here of logits [t, V] or [1, t, V], by the targets of the whole batch.

        A transformers model's output has it as `.loss`. UserError if not every layer took its attention from the microbatch.
        """
        check_calls(self, self.step.steps)
        rows = logits.reshape(-1, logits.shape[-1])
        if rows.shape[0] != len(self.packed.labels):
            raise UserError(f"the model gave {rows.shape[0]} rows of logits for {len(self.packed.labels)} tokens; it must give one for each")
        total = summed_loss(rows, self.packed.labels)
        self.step.losses[self.slot] = total.detach()
        return total / max(1, self.step.targets)


class Step:
    """One optimizer step: iterate its microbatches on this rank, then call finish()."""

    def __init__(self, steps: Steps, loaded: LoadedStep, shares: dict[int, Share], targets: int) -> None:
        self.steps, self.plan, self.documents, self.targets = steps, loaded.plan, loaded.documents, targets
        self.losses: dict[int, Tensor] = {}
        self._shares = shares
        self.begun = self.finished = False

    @property
    def number(self) -> int:
        """Counted from the first step of the run."""
        return self.plan.step

    def __iter__(self) -> Iterator[Microbatch]:
        if self.finished:
            raise UserError(f"step {self.number} is finished; its microbatches can't be run again")
        self.begun = True
        any_gradients.require_no_gradients(self.steps.parameters)
        channel = HERE if self.steps.pool is None else self.steps.pool.streams.channel("copy")
        packs = {slot: share.pack for slot, share in self._shares.items()}
        transfers = Transfers(packs, list(packs), self.steps.device, channel)
        if self.steps.sharded:
            with torch.no_grad():  # every rank gathers all weights now: in its first microbatch it could have a cp group that waits for it
                self.steps.model(**self._nothing())
            self.losses.clear()
        for slot, share in self._shares.items():
            yield Microbatch(transfers.take(slot), share.placement, self, slot)
        if self.steps.sharded:
            yield self._nothing(last=True)

    def _nothing(self, last: bool = False) -> Microbatch:
        return Microbatch(_one_token(self.steps.device), Placement(self.number), self, -1, last)

    def finish(self) -> Tensor:
        """Sum gradients over ranks; gives the mean token loss of the whole batch (fp64 scalar, NaN without targets). Every rank calls it.

        UserError, on all ranks: some microbatches were left out, or the step is finished already.
        """
        if self.finished:
            raise UserError(f"step {self.number} is finished already; a second finish() would sum its gradients over ranks once more")
        expected = len(self._shares) + self.steps.sharded
        total = sum((float(each) for each in self.losses.values()), 0.0)
        mine = torch.tensor([total, expected - len(self.losses)], dtype=torch.float64, device=self.steps.device)
        if self.steps.sharded:
            sums = mine if self.steps.pool is None else all_reduce(mine, self.steps.pool.world)
        else:
            sums = any_gradients.sum_gradients(self.steps.parameters, mine, self.steps.pool)
        missing = int(sums[1])
        if missing:
            raise UserError(f"{missing} microbatches of step {self.number} were not run; run all that a step gives before finish()")
        self.finished = True
        return sums[0] / self.targets if self.targets else torch.full_like(sums[0], torch.nan)


class Steps:
    """The steps of one pass over the data, each time it is iterated. All ranks make it together, after torch.distributed is up (one needs none).

    Without a process group it runs in one process. Use it as a context, or close() it, to take off what it has attached to the model.
    """

    def __init__(
        self, model: nn.Module, data: DataLoader[Any] | DocumentSource, options: Options | None = None, plans: PlanFor | None = None
    ) -> None:  # fmt: skip
        """data: the plain loop's DataLoader, or a source with steps. plans: other plans than the planner's (a replay, a static layout).

        Raises:
            UserError: one line about what in model, data or options can't be trained like this.
        """
        options = options or Options()
        self.model, self.data, self.options = model, data, options
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.lane, self.lanes = (dist.get_rank() if world > 1 else 0), world
        self.transformers = any_shape.is_transformers(model)
        check_model(model)
        check_arguments(model, ("input_ids", "position_ids") if self.transformers else ("input_ids", "position_ids", "attention"))
        if not hasattr(data, "step"):
            check_loader(data, world, options.lengths)
            if options.steps or options.first_step:
                raise UserError("Options.steps and first_step are of a document source; a DataLoader's pass has its own steps, from the first on")
        elif options.steps < 1:
            raise UserError(f"Options.steps={options.steps}: a document source goes on for ever; say how many steps are wanted")
        parameters = self.parameters
        if not parameters:
            raise UserError("no parameter of the model has requires_grad: there is nothing to train")
        self.device, dtype = parameters[0].device, parameters[0].dtype
        self.sharded = bool(any_gradients.fsdp_modules(model))
        self.position_limit = any_shape.position_limit(model)
        shape = options.shape or any_shape.shape_of(model)
        self.vocab, self.attentions = shape.vocab, shape.layers
        layers = list(options.layers) or (any_shape.decoder_layers(model, shape.layers) if self.transformers else [])
        self.config = self._settings(shape, bool(layers), dtype)
        self._make_plans = plans
        planner = whole_layer_planner_for(self.config)  # refuses here what can't be planned
        self._plans: PlanFor = plans or (lambda documents: planner(documents.step, documents.lengths.tolist()))
        self._next = options.first_step
        self.pool = GroupPool(Mesh(world), self.lane, self.device, options.max_cp) if world > 1 else None
        any_gradients.same_weights(model, self.pool)
        self._undo: list[Undo] = [any_gradients.prepare_fsdp(model)] if self.sharded else []
        if self.transformers:
            self._undo.append(TransformersHooks(model, layers, self.sharded).undo)
        else:
            self._undo.append(attach_plain(model, layers, self.sharded))
        if self.pool is not None:
            self._undo.append(leave_in_order(self.pool))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained, as of now: they may be frozen and freed between steps, alike on all ranks."""
        return any_gradients.trained(self.model)

    def _settings(self, shape: ModelConfig, recomputable: bool, dtype: torch.dtype) -> Any:
        options, config = self.options, getattr(self.model, "config", None)
        known = int(max(options.lengths)) if options.lengths is not None and len(options.lengths) else 0
        longest = options.max_length or known
        if config is not None:
            check_windows(config, longest)
        longest = longest or int(getattr(config, "max_position_embeddings", 0) or 0) or 131072
        plan = options.plan
        if not recomputable:
            if plan.recompute == "full":
                raise UserError("plan.recompute=full, but no layers are known that could be recomputed; give Options(layers=model.blocks)")
            plan = PlanConfig(**{**vars(plan), "recompute": "none", "recompute_layers": 0})
        always = any_shape.always_bytes(self.parameters, self.lanes if self.sharded or options.sharded_optimizer else 1)
        hardware = any_shape.hardware_of(options.hardware, self.device)
        return any_shape.config_of(shape, plan, hardware, self.lanes, dtype, (options.max_cp, longest), always)

    def __len__(self) -> int:
        return self.options.steps if hasattr(self.data, "step") else len(cast(Any, self.data))

    def __iter__(self) -> Iterator[Step]:
        ahead, first = self.config.plan.ahead, self._next
        if hasattr(self.data, "step"):
            source = cast(DocumentSource, self.data)
        else:
            source = cast(DocumentSource, LoaderDocuments(cast(Any, self.data), self.options.lengths, first, ahead + 2, self.vocab))
        own_process = self._make_plans is None and ahead > 0 and self.config.plan.worker == "process"
        plans = PlanWorker(self.config, make=whole_layer_planner_for) if own_process else self._plans
        with StepLoader(source, plans, first, first + len(self), ahead, self.lane, self.lanes) as loader:
            while (step := self._open(loader, source)) is not None:
                self._next = step.number + 1
                yield step
                if step.begun and not step.finished:
                    raise UserError(f"step {step.number} was not finished; call its finish() after its microbatches, before the optimizer")

    def _open(self, loader: StepLoader, source: DocumentSource) -> Step | None:
        """The next step, once all ranks have it and agree on it; None after the last."""
        loaded, problem, targets = None, None, 0
        shares: dict[int, Share] = {}
        try:
            loaded = next(loader, None)
            if loaded is not None:
                self._check_documents(loaded)
        except Exception as error:  # told to the other ranks first, which would wait for ever
            problem = error
        self._alike(0 if problem else _digest(loaded, source), problem)
        if loaded is None:
            return None
        try:
            verify(loaded.plan)
            if (loaded.plan.layout.tp, loaded.plan.layout.pp) != (1, 1):
                raise UserError(
                    f"the plan of step {loaded.plan.step} has tp={loaded.plan.layout.tp}, pp={loaded.plan.layout.pp}; legal here: 1 and 1"
                )
            shares = lane_shares(loaded.plan, loaded.packs, self.lane, self.pool)
        except Exception as error:
            problem = error
        targets = agree(loaded.plan, sum(count_targets(pack) for pack in loaded.packs), problem, self.pool)
        return Step(self, loaded, shares, targets)

    def _alike(self, digest: int, problem: Exception | None) -> None:
        """Raise unless every rank has loaded a step of the same documents."""
        rows = [[problem is not None, digest]]
        if self.pool is not None:
            rows = all_gather(torch.tensor(rows, dtype=torch.int64), self.pool.world).tolist()
        if problem is not None:
            raise problem
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            raise UserError(f"rank {failed[0]} could not load its next step; what is wrong is said there")
        if len({row[1] for row in rows}) > 1:
            raise UserError(
                "the ranks' loaders give different documents for one step; "
                "seed their samplers alike (torch.manual_seed, or generator=), and let the data set give everybody the same item"
            )

    def _check_documents(self, loaded: LoadedStep) -> None:
        documents = loaded.documents
        longest = int(documents.lengths.max())
        largest = max((int(pack.tokens.max()) for pack in loaded.packs), default=0)
        if largest >= self.vocab:
            raise UserError(f"step {documents.step} has token {largest}, but the model's vocabulary has ids 0 to {self.vocab - 1}")
        check_windows(getattr(self.model, "config", None), longest)
        if self.position_limit and longest > self.position_limit:
            raise UserError(
                f"step {documents.step} has a document of {longest} tokens, but the model has {self.position_limit} positions "
                "(config.max_position_embeddings); cut documents"
            )

    def close(self, failed: bool = False) -> None:
        """Take hooks and attention off the model, and destroy the process groups."""
        for undo in self._undo:
            undo()
        self._undo = []
        if self.pool is not None:
            self.pool.close(failed)
            self.pool = None

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=error is not None)


def _digest(loaded: LoadedStep | None, source: Any) -> int:
    """Of the documents' ids, and of their tokens where this rank has read all, in 63 bits; -1 after the last step."""
    if loaded is None:
        return -1
    digest = hashlib.blake2b(loaded.documents.ids.tobytes(), digest_size=8)
    if isinstance(source, LoaderDocuments):
        digest.update(source.digest(loaded.documents.step))
    return int.from_bytes(digest.digest(), "big") >> 1


def _one_token(device: torch.device) -> PackedTokens:
    """One token without a target."""
    zero, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64, device=device)
    borders = torch.tensor([0, 1], dtype=torch.int32, device=device)
    return PackedTokens(zero, torch.full_like(zero, IGNORE), zero, borders, 1, zero, one, (0, 1), (1,))
