"""Runs the actions of one stage of one lane: forwards and backwards of model chunks, with messages to the stages before and after.

What is done in which order is data (exchanges.py); nothing here knows a schedule. Without pipelines the list has no exchanges, and the same
code runs forward and backward of each microbatch in turn. Shapes of messages are known from the plan: nothing is negotiated.

An action whose input doesn't arrive is the model's beginning (the embedding), one whose result isn't sent is its end (the loss).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megadcp.mesh.groups import Group
from megadcp.mesh.streams import Wait
from megadcp.parallel.collectives import exchange
from megadcp.parallel.exchanges import Exchange, Item
from megadcp.plan.actions import FORWARD, Action

Key = tuple[int, int]  # slot, chunk


@dataclass(frozen=True)
class Stage:
    """What the executor needs of a model's part.

    forward(action, x): runs one chunk; x is the residual stream that arrived (a leaf that wants its gradient), or None to embed the tokens;
    gives the residual stream, or the loss of the last chunk. buffer(slot): a new tensor shaped like the microbatch's residual stream.
    around(action): entered around each action's computing, without its waiting for messages.
    """

    forward: Callable[[Action, Tensor | None], Tensor]
    buffer: Callable[[int], Tensor]
    around: Callable[[Action], AbstractContextManager[None]]


@dataclass
class _Flight:
    """Tensors on their way, by what is still to come for them."""

    inputs: dict[Key, Tensor | None] = field(default_factory=dict)  # forward done, backward not: the residual stream that came in
    edges: dict[Key, GradientEdge | None] = field(default_factory=dict)  # .. and where the backward begins; None: nothing wants a gradient
    made: dict[Action, Tensor] = field(default_factory=dict)  # results that are not sent yet
    arriving: dict[Action, tuple[Tensor, list[Wait]]] = field(default_factory=dict)
    leaving: deque[list[Wait]] = field(default_factory=deque)  # sends, by exchange


def run_actions(programme: Sequence[Item], stage: Stage, pipeline: Group) -> dict[int, Tensor]:
    """Do all of a lane's programme; slot -> loss sum (detached) where the loss is on this stage. Gradients are added to the parameters'.

    Only what waits for a message waits: an output is freed as soon as its message has left, an input with its backward.
    """
    sent = {message.made for item in programme if isinstance(item, Exchange) for message in item.sends}
    flight, losses = _Flight(), {}
    for item in programme:
        if isinstance(item, Exchange):
            _post(item, stage, pipeline, flight)
        elif item.kind == FORWARD:
            out = _forward(item, stage, flight)
            if item in sent:
                flight.made[item] = out
            else:
                losses[item.slot] = out
        else:
            gradient = _backward(item, stage, flight)
            if item in sent:
                flight.made[item] = gradient if gradient is not None else torch.zeros_like(stage.buffer(item.slot))
    _leave(flight, 0)
    return losses


def _post(item: Exchange, stage: Stage, pipeline: Group, flight: _Flight) -> None:
    """Start all messages of an exchange."""
    sends = [(flight.made.pop(one.made), one.stage) for one in item.sends]
    buffers = [stage.buffer(one.wanted.slot) for one in item.receives]
    works = exchange(sends, [(buffer, one.stage) for buffer, one in zip(buffers, item.receives, strict=True)], pipeline)
    own = len(works) == len(sends) + len(buffers)  # else the library has made one of all
    for place, (one, buffer) in enumerate(zip(item.receives, buffers, strict=True), start=len(sends)):
        flight.arriving[one.wanted] = buffer, [works[place]] if own else works
    flight.leaving.append(works[: len(sends)] if own else works)
    _leave(flight, pipeline.size + 1)


def _leave(flight: _Flight, most: int) -> None:
    """Wait for the oldest sends until at most those of `most` exchanges are left: a library may hold what it sends until then."""
    while len(flight.leaving) > most:
        for work in flight.leaving.popleft():
            work.wait()


def _arrived(action: Action, flight: _Flight) -> Tensor | None:
    """What an action waits for; None for one that waits for no message."""
    if action not in flight.arriving:
        return None
    buffer, works = flight.arriving.pop(action)
    for work in works:
        work.wait()
    return buffer


def _forward(action: Action, stage: Stage, flight: _Flight) -> Tensor:
    key = action.slot, action.chunk
    x = _arrived(action, flight)
    if x is not None:
        x.requires_grad_()
    with stage.around(action):
        out = stage.forward(action, x)
    flight.inputs[key] = x if out.requires_grad else None
    # The edge keeps the graph, not the output: its memory is free once it is sent.
    flight.edges[key] = get_gradient_edge(out) if out.requires_grad else None
    return out.detach()


def _backward(action: Action, stage: Stage, flight: _Flight) -> Tensor | None:
    """The gradient of the chunk's input; None where it has none."""
    key = action.slot, action.chunk
    slope = _arrived(action, flight)
    x, edge = flight.inputs.pop(key), flight.edges.pop(key)
    if edge is not None:
        with stage.around(action):
            torch.autograd.backward(edge, slope)
    return None if x is None else x.grad
