"""What is attached to a model that is not ours: recompute, FSDP2's switches and checks, as each microbatch asks for them.

Everything is decided by the microbatch that a forward is called with, nothing by what ran before: a recompute in the backward repeats
what its forward did.
"""

from __future__ import annotations

import atexit
import functools
import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megadcp.config.check import UserError
from megadcp.interop.any_attention import CALLS, NAME, Attention, recomputed, register
from megadcp.interop.any_gradients import reduce_in_backward
from megadcp.mesh.groups import GroupPool

if TYPE_CHECKING:
    from megadcp.interop.any_model import Microbatch, Steps

Undo = Callable[[], None]
LEAVE_SECONDS = 0.05
_ATTACHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # transformers models that have Steps


class TransformersHooks:
    """What lets a transformers model train on microbatches; `undo` takes it off.

    layers: those that can be recomputed, in order; sharded: by FSDP2.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module], sharded: bool) -> None:
        """Raises UserError if the model has attention code of its own."""
        self.model, self.layers, self.sharded = model, layers, sharded
        self._before = model.config._attn_implementation
        choose_attention(model)
        self._flags = [(each, each.gradient_checkpointing, getattr(each, "_gradient_checkpointing_func", None)) for each in layers]
        for each in layers:
            each._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
        self._hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True), model.register_forward_hook(self._end, with_kwargs=True)]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        microbatch: Microbatch | None = kwargs.get("microbatch")
        if microbatch is None:
            return
        if kwargs.get("position_ids") is None:
            raise UserError("the model was called without the microbatch's position_ids; call it with model(**microbatch)")
        if kwargs.get("labels") is not None:
            raise UserError("labels were given along with a microbatch, which brings its own; call the model with model(**microbatch)")
        microbatch.packed.memo[CALLS] = 0
        count = recomputed(microbatch.placement)
        for number, each in enumerate(self.layers):
            each.gradient_checkpointing = number < count  # type: ignore[assignment]
        if self.sharded:
            reduce_in_backward(self.model, microbatch.last)

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        microbatch: Microbatch | None = kwargs.get("microbatch")
        if microbatch is None:
            return None
        name = type(self.model).__name__
        if getattr(output, "logits", None) is None:
            raise UserError(f"{name} returns no logits; give the causal language model (AutoModelForCausalLM), with return_dict=True")
        output.loss = microbatch.loss(output.logits)
        return output

    def undo(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        for each, flag, function in self._flags:
            each.gradient_checkpointing = flag
            if function is not None:
                each._gradient_checkpointing_func = function
        self.model.set_attn_implementation(self._before)
        _ATTACHED.discard(self.model)


def choose_attention(model: Any) -> None:
    """Let a transformers model take its attention from here. UserError if it doesn't ask the registry."""
    register()
    if model in _ATTACHED:
        raise UserError(
            "the model has Steps already; keep them in a variable, iterate them once for each pass over the data, and close() them before others"
        )
    if model.config._attn_implementation == NAME:
        raise UserError(
            "the model's config was changed by Steps of another model (it shares that one's config, or was copied meanwhile): "
            "give each model its own config, and make copies before Steps"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(f"{type(model).__name__} has attention code of its own: it does not ask transformers' registry (_supports_attention_backend)")
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UserError(f"{type(model).__name__} does not let its attention be chosen (it stays {model.config._attn_implementation})")
    _ATTACHED.add(model)


def check_calls(microbatch: Microbatch, steps: Steps) -> None:
    """UserError unless the latest forward called the microbatch's attention once for each layer."""
    calls, name = microbatch.packed.memo.get(CALLS, 0), type(steps.model).__name__
    if calls == steps.attentions:
        return
    said = f"{name} called the attention of its microbatch {calls} times for {steps.attentions} layers: "
    if steps.transformers:
        raise UserError(f"{said}it has attention code of its own, or does not hand keyword arguments down to it")
    raise UserError(f"{said}each layer must call attention(q, k, v) once, and Options.shape must say how many layers there are")


def leave_in_order(pool: GroupPool) -> Undo:
    """At the end of the process end gloo's threads before Python ends; undone by what is returned.

    A thread of a group gives the tensors of its latest message back a little after the message is there. When Python has ended meanwhile,
    torch aborts the process. A group's threads end with it, once nobody holds it any more.
    """

    def leave() -> None:
        pool.close()
        vars(pool).clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        time.sleep(LEAVE_SECONDS)  # for groups that others hold

    atexit.register(leave)
    return functools.partial(atexit.unregister, leave)


def attach_plain(model: nn.Module, layers: Sequence[nn.Module], sharded: bool) -> Undo:
    """The same for a plain model, undone by what is returned; `layers` must get the microbatch's attention among their arguments."""
    for number, each in enumerate(layers):
        each.forward = _Recomputable(each.forward, number, type(each).__name__)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        microbatch = getattr(kwargs.get("attention"), "microbatch", None)
        if microbatch is not None:
            microbatch.packed.memo[CALLS] = 0
            if sharded:
                reduce_in_backward(model, microbatch.last)

    hook = model.register_forward_pre_hook(begin, with_kwargs=True)

    def undo() -> None:
        hook.remove()
        for each in layers:
            del each.forward

    return undo


class _Recomputable:
    """A layer's forward that is run again in the backward when the microbatch says so."""

    def __init__(self, forward: Callable[..., Any], number: int, name: str) -> None:
        self.forward, self.number, self.name = forward, number, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = next((each for each in (*args, *kwargs.values()) if isinstance(each, Attention)), None)
        if found is None:
            raise UserError(
                f"layer {self.number} ({self.name}) was called without the microbatch's attention; hand it over to each of Options.layers"
            )
        if self.number < found.recompute_layers and torch.is_grad_enabled():
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return self.forward(*args, **kwargs)
