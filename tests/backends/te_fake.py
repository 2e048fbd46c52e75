"""A stand-in for Transformer Engine on CPUs: the same names and signatures, the mathematics by plain torch, and everything that is asked of it
written down. It refuses what the real one refuses or gets wrong: calls that don't bind, nested checkpoints, rows that fp8 can't multiply,
a cp group that is not the one of the call. Padding rows of attention come back as NaN: nobody may rely on them.

Written from public signatures and documented behaviour; arithmetic is the model's own format, so results can be compared exactly.
"""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from te_fake_ranks import Copy, Gather, Scatter, Sum
from torch import Tensor, nn

from megadcp.backends.te_probe import Te
from megadcp.backends.torch_attention import per_document
from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.backend import PackedTokens
from megadcp.parallel.context import attention

SIGNATURES = json.loads((Path(__file__).parents[1] / "golden" / "te_signatures_2.20.2.json").read_text(encoding="utf-8"))


def signature(symbol: str) -> inspect.Signature:
    """The recorded one, without annotations; defaults are Ellipsis."""
    found, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for text in SIGNATURES["symbols"][symbol]["parameters"]:
        name, has_default = text.rstrip("=").lstrip("*"), text.endswith("=")
        if text == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif text.startswith("**"):
            found.append(inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD))
        elif text.startswith("*"):
            found.append(inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL))
        else:
            found.append(inspect.Parameter(name, kind, default=... if has_default else inspect.Parameter.empty))
    return inspect.Signature(found)


def bound(symbol: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by name; TypeError if they don't bind to the real signature."""
    return signature(symbol).bind(*args, **kwargs).arguments


@dataclass
class Event:
    """One call: what, and the facts that tests assert."""

    what: str
    facts: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """State of the stand-in: regions of autocast, checkpoints, and what happened."""

    def __init__(self, unit: int = 1, pool: GroupPool | None = None) -> None:
        """unit: what rows of fp8 products must be a multiple of."""
        self.unit, self.pool = unit, pool
        self.events: list[Event] = []
        self.regions: list[dict[str, Any]] = []
        self.checkpoints: list[bool] = []  # regions of checkpoint that are open: True in a recompute
        self.modules: list[Any] = []

    def note(self, what: str, **facts: Any) -> None:
        self.events.append(Event(what, {**facts, "again": bool(self.checkpoints and self.checkpoints[-1])}))

    def of(self, what: str) -> list[dict[str, Any]]:
        return [event.facts for event in self.events if event.what == what]

    @property
    def fp8(self) -> bool:
        return bool(self.regions) and bool(self.regions[-1]["enabled"])

    def group(self, ranks: tuple[int, ...]) -> Group:
        """The cp group of these ranks."""
        assert self.pool is not None
        lanes = [self.pool.mesh.coords(rank).lane for rank in ranks]
        found = self.pool.cp(lanes[0], len(ranks))
        assert found.ranks == ranks
        return found


class _Product(torch.autograd.Function):
    """x [t, in] times weight, by one node as in the real one: it saves what it read after the product, and adds to main_grad where told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fuse: bool, note: Callable[..., None]) -> Tensor:
        note("product", shape=(x.shape[0], *weight.shape))
        ctx.save_for_backward(x, weight)
        ctx.origin = weight if fuse else None
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dw = grads[0].t() @ x
        if ctx.origin is not None:
            ctx.origin.main_grad.add_(dw)
            ctx.origin.grad_added_to_main_grad = True
            dw = torch.full_like(weight, torch.nan)  # nobody may read it
        return grads[0] @ weight, dw, None, None


# --------------------------------------------------------------------------------------------------------------- modules
class Base(nn.Module):
    symbol = ""
    recorder: Recorder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.given = bound(f"pytorch.{self.symbol}.__init__", *args, **kwargs)
        self.recorder.modules.append(self)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(**bound(f"pytorch.{self.symbol}.forward", *args, **kwargs))

    def run(self, **given: Any) -> Tensor:
        raise NotImplementedError


class Linear(Base):
    symbol = "Linear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.given
        self.ranks, self.mode, self.handle = given.get("tp_size", 1), given.get("parallel_mode"), given.get("tp_group")
        if self.handle is not None:
            self.ranks = dist.get_world_size(self.handle)
        self.sequence_parallel = given.get("sequence_parallel", False) and self.ranks > 1
        features, out = given["in_features"], given["out_features"]
        assert (out if self.mode == "column" else features) % self.ranks == 0
        sizes = (out // self.ranks, features) if self.mode == "column" else (out, features // self.ranks if self.mode == "row" else features)
        places = {"device": given.get("device", "cuda"), "dtype": given["params_dtype"]}
        self.weight = nn.Parameter(torch.empty(*sizes, **places))
        if given.get("bias", True):
            self.bias = nn.Parameter(torch.empty(sizes[0], **places))
        self.fuse_wgrad_accumulation = given.get("fuse_wgrad_accumulation", False)

    def normalised(self, x: Tensor) -> Tensor:
        return x

    def run(self, inp: Tensor, **given: Any) -> Tensor:
        assert given.get("is_first_microbatch") is None
        assert all(each.dtype == inp.dtype and not each.is_meta for each in self.parameters())
        self.check_rows(inp)
        self.recorder.note("linear", name=self.symbol, fp8=self.recorder.fp8, mode=self.mode, grad=torch.is_grad_enabled())
        x, sharded = self.normalised(inp), self.ranks > 1
        if sharded and self.mode == "column":
            x = (Gather if self.sequence_parallel else Copy).apply(x, self.handle)
        out = _Product.apply(x, self.weight, self.fuse_wgrad_accumulation, self.recorder.note)
        if sharded and self.mode == "row":
            out = (Scatter if self.sequence_parallel else Sum).apply(out, self.handle)
        return out + self.bias if hasattr(self, "bias") else out

    def check_rows(self, x: Tensor) -> None:
        if self.recorder.fp8 and any(side % self.recorder.unit for side in (*x.shape, *self.weight.shape)):
            raise AssertionError(
                f"fp8 can't multiply {tuple(x.shape)} by {tuple(self.weight.shape)}: sides must be multiples of {self.recorder.unit}"
            )


class LayerNormLinear(Linear):
    symbol = "LayerNormLinear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.mode != "row"
        names = ("layer_norm_weight", "layer_norm_bias") if self.given.get("normalization", "LayerNorm") == "LayerNorm" else ("layer_norm_weight",)
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(self.weight.shape[1], device="meta", dtype=self.weight.dtype)))

    def normalised(self, x: Tensor) -> Tensor:
        return normal(x, self.layer_norm_weight, getattr(self, "layer_norm_bias", None), self.given["eps"])


class Norm(nn.Module):
    recorder: Recorder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        own = bound(f"pytorch.{type(self).__name__}.__init__", *args, **kwargs)
        assert own.keys() <= {"normalized_shape", "eps", "kwargs"}
        more = own.pop("kwargs", {})
        given = bound(f"pytorch.{type(self).__name__}.**kwargs", **own, **more)
        self.eps = given["eps"]
        for name in ("weight", "bias")[: 1 if type(self).__name__ == "RMSNorm" else 2]:
            parameter = nn.Parameter(torch.empty(given["normalized_shape"], device=given["device"], dtype=given["dtype"]))
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        self.recorder.note("norm")
        return normal(x, self.weight, getattr(self, "bias", None), self.eps)


class RMSNorm(Norm):
    pass


class LayerNorm(Norm):
    pass


class DotProductAttention(Base):
    symbol = "DotProductAttention"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.given["attn_mask_type"] == "padding_causal"  # the only one for packed documents
        assert self.given["qkv_format"] == "thd"
        assert self.given.get("attention_dropout", 0.0) == 0.0
        self.set_context_parallel_group(None, None, None, "p2p")

    def set_context_parallel_group(self, *args: Any, **kwargs: Any) -> None:
        self.cp = bound("pytorch.DotProductAttention.set_context_parallel_group", *args, **kwargs)
        self.recorder.note("group", module=id(self), cp=self.cp)

    def run(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **given: Any) -> Tensor:
        q, k, v = query_layer, key_layer, value_layer
        assert (q.shape[1], k.shape[1], q.shape[2]) == (
            self.given["num_attention_heads"],
            self.given["num_gqa_groups"],
            self.given["kv_channels"],
        )
        handles, kind = self.cp["cp_group"], self.cp["cp_comm_type"]
        size = 1
        for handle in handles if isinstance(handles, list) else [handles]:
            size *= 1 if handle is None else dist.get_world_size(handle)
        assert handles is None or size > 1
        real, padded = self.check_borders(q.shape[0], size, given)
        ranks = tuple(self.cp["cp_global_ranks"] or ())
        self.recorder.note(
            "attention", cp=size, kind=kind if size > 1 else "none", ranks=ranks, real=real, padded=padded, longest=given["max_seqlen_q"],
            pad_between_seqs=given["pad_between_seqs"], module=id(self), fp8=self.recorder.fp8,
        )  # fmt: skip
        batch = _batch(real, padded, size)
        if size == 1:
            out = per_document(q, k, v, batch)
            rows = torch.arange(q.shape[0])
        else:
            own = "2d" if kind == "a2a+p2p" else {"p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses"}[kind]
            group = self.check_group(handles, kind, ranks)
            near = dist.get_world_size(handles[0]) if own == "2d" else size
            out = attention(q, k, v, batch, SimpleNamespace(cp=size, cp_comm=own, group=group, lanes_per_node=near))
            rows = _rows(padded, size, group.index)
        document = torch.bucketize(rows, torch.tensor(padded)[1:], right=True)
        empty = rows - torch.tensor(padded)[document] >= (torch.tensor(real).diff())[document]
        return torch.where(empty[:, None, None], torch.nan, out).flatten(1)

    def check_borders(self, rows: int, size: int, given: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Whole documents, int32, from 0 to all rows of the group; one tensor for queries and keys; True or False for padding, no guess."""
        real, padded = given["cu_seqlens_q"], given["cu_seqlens_q_padded"]
        assert given["cu_seqlens_kv"] is real
        assert given["cu_seqlens_kv_padded"] is padded
        assert real.dtype == padded.dtype == torch.int32
        assert real.shape == padded.shape
        assert (int(real[0]), int(padded[0]), int(padded[-1])) == (0, 0, rows * size)
        assert size == 1 or (padded.diff() % (2 * size) == 0).all()
        assert given["max_seqlen_q"] == given["max_seqlen_kv"] == int(padded.diff().max())
        assert type(given["max_seqlen_q"]) is int
        assert given["pad_between_seqs"] is not bool(torch.equal(real, padded))
        assert given["pad_between_seqs"] or real is padded  # the fast way is found by identity
        return real.tolist(), padded.tolist()

    def check_group(self, handles: Any, kind: str, ranks: tuple[int, ...]) -> Group:
        """The group of all members; with two levels, heads among neighbours and keys between their blocks."""
        group, me = self.recorder.group(ranks), dist.get_rank()
        if kind != "a2a+p2p":
            assert dist.get_process_group_ranks(handles) == list(ranks)
            return group
        split = dist.get_world_size(handles[0])
        block, place = divmod(ranks.index(me), split)
        assert dist.get_process_group_ranks(handles[0]) == list(ranks[block * split : (block + 1) * split])
        assert dist.get_process_group_ranks(handles[1]) == list(ranks[place::split])
        return group


class Region:
    recorder: Recorder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = {"enabled": True, "recipe": None, **bound("pytorch.autocast.__init__", *args, **kwargs)}
        self.open = False

    def __enter__(self) -> Any:
        assert not self.open, "one region can't be entered twice"
        assert not self.given["enabled"] or self.given["recipe"] is not None, "the default recipe is delayed scaling"
        self.open = True
        self.recorder.regions.append(self.given)
        self.recorder.note("enter", enabled=self.given["enabled"], depth=len(self.recorder.regions), region=id(self))
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.recorder.regions.pop() is self.given
        self.open = False
        self.recorder.note("leave", depth=len(self.recorder.regions) + 1)


def checkpoint(recorder: Recorder, autocast: Any, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    bound("pytorch.checkpoint", function, *args, **kwargs)
    reentrant = kwargs.pop("use_reentrant", True)
    assert kwargs.keys() <= set(SIGNATURES["symbols"]["pytorch.checkpoint.**kwargs"]["popped"])
    assert not isinstance(function, nn.Module), "torch's own checkpoint would run"
    assert all(isinstance(each, Tensor) for each in args)
    if not torch.is_grad_enabled():
        return function(*args)
    assert not recorder.checkpoints, "checkpoints can't be nested"
    region = dict(recorder.regions[-1]) if recorder.fp8 else None
    calls = [0]

    def once(*inputs: Tensor) -> Tensor:
        again = calls[0] > 0
        calls[0] += 1
        assert not recorder.checkpoints
        recorder.checkpoints.append(again)
        recorder.note("checkpoint", reentrant=reentrant)
        try:
            with (autocast(**region) if region else autocast(enabled=False)) if again else nullcontext():
                return function(*inputs)
        finally:
            recorder.checkpoints.pop()

    if reentrant:
        assert any(each.requires_grad for each in args)
        return torch.utils.checkpoint.checkpoint(once, *args, use_reentrant=True, preserve_rng_state=False)
    return torch.utils.checkpoint.checkpoint(once, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none", early_stop=False)


def make(recorder: Recorder) -> Te:
    """The stand-in's two modules, which tell this recorder."""
    classes = (Linear, LayerNormLinear, RMSNorm, LayerNorm, DotProductAttention)
    names = {each.__name__: type(each.__name__, (each,), {"recorder": recorder}) for each in classes}
    region = type("autocast", (Region,), {"recorder": recorder})
    pytorch = SimpleNamespace(
        **names,
        autocast=region,
        checkpoint=partial(checkpoint, recorder, region),
        is_fp8_available=available,
        is_fp8_block_scaling_available=available,
    )
    recipes = {name: type(name, (), {}) for name in ("Float8CurrentScaling", "Float8BlockScaling", "DelayedScaling")}
    return Te(pytorch, SimpleNamespace(**recipes))


def available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


def normal(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm, or LayerNorm where there is a bias."""
    if bias is not None:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rows(padded: list[int], size: int, index: int) -> Tensor:
    """Rows of the pack that a member holds, from the published closed form: row j of m of a document stands at j + start + m / 2 off."""
    found = []
    for start, stop in itertools.pairwise(padded):
        m = (stop - start) // size
        off = [index if j < m // 2 else 2 * (size - 1) - index for j in range(m)]
        found += [j + start + m // 2 * off[j] for j in range(m)]
    return torch.tensor(found)


def _batch(real: list[int], padded: list[int], size: int) -> PackedTokens:
    """What the torch backend's attention reads."""
    lengths = [stop - start for start, stop in itertools.pairwise(real)]
    local = [border // size for border in padded]
    rows = torch.zeros(local[-1], dtype=torch.int64)
    return PackedTokens(
        rows, rows, rows, torch.tensor(local, dtype=torch.int32), max(b - a for a, b in itertools.pairwise(local)),
        torch.arange(len(lengths)), torch.tensor(lengths), tuple(local), tuple(lengths),
    )  # fmt: skip


def install(monkeypatch: Any, te: Te, version: str = "2.20.2") -> None:
    """Put the stand-in where `import transformer_engine.pytorch` finds it."""
    package, common = ModuleType("transformer_engine"), ModuleType("transformer_engine.common")
    package.__version__ = version  # type: ignore[attr-defined]
    pytorch, recipe = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common.recipe")
    pytorch.__dict__.update(vars(te.pytorch))
    recipe.__dict__.update(vars(te.recipe))
    for module in (package, common, pytorch, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
