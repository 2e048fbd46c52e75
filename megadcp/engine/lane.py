"""One rank's part of a plan: the microbatches of its lane, run on its pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megadcp.data.batch import Pack
from megadcp.engine.measure import Stopwatch
from megadcp.engine.placement import Placement
from megadcp.engine.transfer import Transfers
from megadcp.mesh.coords import Coords
from megadcp.mesh.groups import GroupPool
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.nn.part import Part
from megadcp.parallel.buckets import may_overlap
from megadcp.parallel.exchanges import Item, forwards, lane_programme, programmes
from megadcp.parallel.pipeline import Stage, run_actions
from megadcp.plan.actions import BACKWARD, FORWARD, Action, slot_count, used_slots
from megadcp.plan.basis import Basis
from megadcp.plan.step_plan import Microbatch, StepPlan

if TYPE_CHECKING:
    from megadcp.engine.step import Engine


@dataclass(frozen=True)
class Share:
    """A microbatch, where it runs, and the rows of it that a lane has."""

    microbatch: Microbatch
    placement: Placement
    pack: Pack


def lane_shares(plan: StepPlan, packs: Sequence[Pack], lane: int = 0, pool: GroupPool | None = None) -> dict[int, Share]:
    """Slot -> what the lane has there, in slot order. ValueError unless `packs` are the lane's and the pool has the plan's groups."""
    own = sorted((one for one in plan.microbatches if one.lane <= lane < one.lane + one.cp), key=lambda one: one.slot)
    sizes, expected = [len(pack.tokens) for pack in packs], [one.tokens // one.cp for one in own]
    if sizes != expected:
        raise ValueError(f"step {plan.step}, lane {lane}: packs of {sizes} tokens were handed over for microbatches of {expected}")
    near = plan.layout.lanes_per_node
    return {one.slot: Share(one, Placement.of(plan.step, one, pool, near), pack) for one, pack in zip(own, packs, strict=True)}


def check_layout(engine: Engine, plan: StepPlan) -> None:
    """ValueError unless the plan is for the engine's ranks and for its part of the model."""
    layout, mesh, part = plan.layout, engine.mesh, engine.part
    if (layout.lanes, layout.tp, layout.pp) != (mesh.lanes, mesh.tp, mesh.pp):
        raise ValueError(
            f"the plan of step {plan.step} is for {layout.lanes} lanes of tp={layout.tp}, pp={layout.pp}, "
            f"but this engine has {mesh.lanes} of tp={mesh.tp}, pp={mesh.pp}; make it for as many processes as run it"
        )
    if part is not None and (part.stages, part.chunks, len(part.layers)) != (layout.pp, layout.virtual_stages, plan.stage_layers[part.stage]):
        raise ValueError(
            f"the plan of step {plan.step} has stages of {plan.stage_layers} layers in {layout.virtual_stages} chunks, "
            f"but stage {part.stage} of {part.stages} here holds {len(part.layers)} in {part.chunks}"
        )


def count_targets(pack: Pack) -> int:
    """Tokens of a pack whose loss counts."""
    return int((pack.labels != IGNORE).sum())


def stage_programme(plan: StepPlan, coords: Coords, slots: dict[int, Share], backward: bool = True) -> list[Item]:
    """Actions and exchanges of one rank: the plan's dense list of its stage without the slots that its lane takes no part in."""
    count = slot_count(Basis.of(plan), plan.microbatches)
    dense = programmes(used_slots(plan.microbatches), count, plan.layout.pp, plan.layout.virtual_stages)[coords.pp]
    own = lane_programme(dense, slots)
    return own if backward else forwards(own)


def run_lane(engine: Engine, plan: StepPlan, shares: dict[int, Share], watch: Stopwatch, backward: bool = True) -> list[Tensor]:
    """Forward and backward of all microbatches of this lane on this stage; their loss sums in slot order where the last stage is here."""
    programme = stage_programme(plan, engine.coords, shares, backward)
    runner = _Runner(engine, plan, shares, programme, watch)
    if may_overlap(plan, engine.coords.lane):
        runner.last = next((item for item in reversed(programme) if isinstance(item, Action) and item.kind == BACKWARD), None)
    losses = run_actions(programme, Stage(runner.forward, runner.buffer, runner.around), engine.pipeline)
    return [losses[slot] for slot in sorted(losses)]


class _Runner:
    """Runs actions of the programme with the placement and tokens of their microbatches, several of which are in flight."""

    def __init__(self, engine: Engine, plan: StepPlan, shares: dict[int, Share], programme: Sequence[Item], watch: Stopwatch) -> None:
        self.engine, self.shares, self.watch = engine, shares, watch
        self.batches: dict[int, PackedTokens] = {}
        order = dict.fromkeys(item.slot for item in programme if isinstance(item, Action) and item.kind == FORWARD)
        packs = {slot: shares[slot].pack for slot in order}
        self.transfers = Transfers(packs, list(order), engine.device, engine.streams.channel("copy"))
        self.last: Action | None = None  # the backward in which sums over lanes may start
        self.chunks, self.hidden = plan.layout.virtual_stages, plan.model.hidden
        self.ways = plan.layout.tp if plan.layout.sequence_parallel else 1  # over which a residual stream is cut

    def forward(self, action: Action, x: Tensor | None) -> Tensor:
        """One chunk of one microbatch."""
        if action.slot not in self.batches:
            self.batches[action.slot] = self.transfers.take(action.slot)
        batch, placement = self.batches[action.slot], self.shares[action.slot].placement
        if action.chunk == self.chunks - 1:
            del self.batches[action.slot]  # the graph holds what the backward needs of it
        if self.engine.graphs is not None:
            self.engine.graphs.before(batch.tokens.shape[0])
        model, part = self.engine.model, self.engine.part
        if part is None or part.stages == 1:
            loss: Tensor = model(batch, placement)
            return loss
        out: Tensor = model.run(action.chunk, x, batch, placement)  # type: ignore[operator]
        return out

    def buffer(self, slot: int) -> Tensor:
        """A new residual stream [t / cp, h] of the microbatch, cut over tp with sequence parallelism."""
        rows = len(self.shares[slot].pack.tokens) // self.ways
        like = next(self.engine.model.parameters())
        return torch.empty(rows, self.hidden, dtype=like.dtype, device=self.engine.device)

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Measure an action."""
        if action == self.last:
            self.engine.gradients.last_microbatch(self._reached(action.chunk))
        one = self.shares[action.slot].microbatch
        name = f"{action.kind}{action.slot}{f'.{action.chunk}' if self.chunks > 1 else ''} cp{one.cp}"  # as render_trace.py names it
        with self.watch.action(action.slot, action.kind == FORWARD, action.chunk, name):
            yield

    def _reached(self, chunk: int) -> Iterable[nn.Parameter] | None:
        """The parameters that a chunk's backward gives gradients to; None: all."""
        part = self.engine.part
        if part is None or part.chunks == 1:
            return None
        layers = {str(layer) for layer in part.chunk_layers[chunk]}
        return [parameter for name, parameter in self.engine.model.named_parameters() if _is_of(name, layers, part, chunk)]


def _is_of(name: str, layers: set[str], part: Part, chunk: int) -> bool:
    """Whether a parameter of a part (nn/gpt.py's names) is of one of its chunks."""
    first, second = name.split(".")[:2]
    if first == "layers":
        return second in layers
    return chunk == (0 if first in ("embedding", "positions") else part.chunks - 1)
