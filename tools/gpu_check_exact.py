"""Sections of tools/gpu_check.py: whether results are right and recompute repeats them bit for bit, and what each level keeps."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from gpu_check_setup import CASES, LEVELS, Case, Row, Rows, Setup, at, without_gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megadcp.engine.placement import Placement
from megadcp.nn.backend import PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.plan.basis import basis_from
from megadcp.plan.memory import MemoryModel

# Errors above these are no rounding: root of the mean square, relative, against fp32 with the same (rounded) weights.
LIMITS = {"bf16": (0.03, 0.05), "fp8_current": (0.25, 0.35), "fp8_block": (0.25, 0.35)}  # of logits, of all gradients together


# ----------------------------------------------------------------------------------------------------------------------- correct
def correct(setup: Setup, end: float) -> dict[str, Any]:
    """Loss, logits and gradients of every backend and format against the torch backend in fp32 with the same weights."""
    rows, config = Rows(setup, end), setup.sizes.exact
    references: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
    plain: dict[str, Tensor] = {}  # logits in bf16, by backend

    def one(case: Case) -> Row:
        model = setup.model(case, config)
        batch = setup.batch(setup.sizes.exact_lengths, case.format, config.vocab)
        size = int(batch.tokens.shape[0])
        if size not in references:
            references[size] = _reference(setup, model, batch)
        logits, (loss, gradients) = _logits(model, batch), _gradients(model, batch, "none")
        expected_logits, expected = references[size]
        real = batch.labels != -100  # padding rows mean nothing
        errors = {name: _relative(gradients[name], expected[name]) for name in expected if name != "loss"}
        worst = max(errors, key=lambda name: errors[name])
        names = sorted(errors)
        row = {
            "loss_error": abs(float(loss) / float(expected["loss"]) - 1),
            "logits_error": _relative(logits[real], expected_logits[real]),
            "gradient_error": _relative(_flat(gradients, names), _flat(expected, names)),
            "worst_gradient": errors[worst],
            "of": worst,
        }
        limit = LIMITS[case.format]
        same = case.backend in plain and plain[case.backend].shape == logits.shape and torch.equal(plain[case.backend], logits)
        if case.format == "bf16":
            plain[case.backend] = logits
        elif same:
            raise RuntimeError("the same bits as in bf16: nothing was quantised")
        row["ok"] = row["logits_error"] <= limit[0] and row["gradient_error"] <= limit[1]
        return row

    for case in CASES:
        rows.add(case.key, lambda case=case: one(case))  # type: ignore[misc]
    return rows.result(limits={name: list(pair) for name, pair in LIMITS.items()})


def _reference(setup: Setup, model: GPT, batch: PackedTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients in fp32 from the weights that `model` has."""
    exact = setup.model(Case("torch", "fp32"), setup.sizes.exact, torch.float32)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            parameter.copy_(theirs[name])
    loss, gradients = _gradients(exact, batch, "none")
    return _logits(exact, batch), {**gradients, "loss": loss}


def _logits(model: GPT, batch: PackedTokens) -> Tensor:
    with torch.no_grad():
        return model.logits(batch, Placement()).float()


def _gradients(model: GPT, batch: PackedTokens, level: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients at one recompute level on all layers."""
    without_gradients(model)
    loss = model(batch, Placement(0, at(level, model.config.layers)))
    loss.backward()
    found = {name: parameter.grad.detach() for name, parameter in model.named_parameters() if parameter.grad is not None}
    without_gradients(model)
    return loss.detach(), found


def _flat(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([tensors[name].float().flatten() for name in names])


def _relative(found: Tensor, expected: Tensor) -> float:
    """Root of the mean squared error over that of the mean square."""
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


# --------------------------------------------------------------------------------------------------------------------- recompute
def recompute(setup: Setup, end: float) -> dict[str, Any]:
    """Whether the gradients of each level are bit for bit those of level none, and (`repeats`) two runs at level none agree at all.

    Attention's backward may add in no fixed order; then everything is asked again with torch's deterministic algorithms.
    """
    rows = Rows(setup, end)
    for case in CASES:
        plain: dict[bool, Plain] = {}  # by fixed_order
        unsteady = False
        for fixed in (False, True):
            for level in LEVELS[1:] if not fixed or unsteady else ():
                key = {**case.key, "level": level, "fixed_order": fixed}
                row = rows.add(key, lambda c=case, o=level, f=fixed, p=plain: _again(setup, c, o, f, p))  # type: ignore[misc]
                unsteady |= row is not None and not row["repeats"]
    return rows.result()


Plain = tuple[GPT, PackedTokens, Tensor, dict[str, Tensor], bool]


def _again(setup: Setup, case: Case, level: str, fixed: bool, plain: dict[bool, Plain]) -> Row:
    """One level against level none, which is made once for all levels of a case."""
    torch.use_deterministic_algorithms(fixed, warn_only=True)
    try:
        if fixed not in plain:
            model = setup.model(case, setup.sizes.exact)
            batch = setup.batch(setup.sizes.exact_lengths, case.format, setup.sizes.exact.vocab)
            loss, gradients = _gradients(model, batch, "none")
            twice, others = _gradients(model, batch, "none")
            plain[fixed] = (model, batch, loss, gradients, not _different(gradients, others) and bool(torch.equal(loss, twice)))
        model, batch, loss, gradients, repeats = plain[fixed]
        other, recomputed = _gradients(model, batch, level)
    finally:
        torch.use_deterministic_algorithms(False)
    different = _different(gradients, recomputed)
    return {
        "repeats": repeats,
        "loss_same": bool(torch.equal(loss, other)),
        "gradients_same": not different,
        "largest": max((_relative(recomputed[name], gradients[name]) for name in different), default=0.0),
    }


def _different(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    return [name for name in some if not torch.equal(some[name], others[name])]


# ------------------------------------------------------------------------------------------------------------------------ memory
class Kept(TorchDispatchMode):
    """Follows every storage made inside; `bytes()` sums those still alive. For a CPU, whose allocator doesn't count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.storages: dict[int, tuple[Any, int]] = {}
        self.parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it made."""
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.parameters:
                    self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def bytes(self) -> int:
        """Of what is alive."""
        return sum(size for storage, size in self.storages.values() if storage() is not None)


def memory(setup: Setup, end: float) -> dict[str, Any]:
    """Bytes that each level keeps per token and layer, and at its peak, against the memory model of docs/plan.md section 3.

    Slopes: between two token counts, and for what is kept also between one layer and three, so that constants drop out. The peak has the
    backward's own buffers in it, which the model leaves to hardware.usable_fraction. The plan knows bf16 only: fp8 keeps less.
    """
    rows = Rows(setup, end)
    config = setup.sizes.models["gpt_8b"]
    few, many = setup.sizes.kept

    def one(case: Case, level: str) -> Row:
        kept, peaks = {}, {}
        for layers in (1, 3):
            model = setup.layers(case, config, layers)
            for tokens in (few, many):
                batch = setup.batch((tokens - tokens // 3, tokens // 3), case.format, config.vocab)
                kept[layers, tokens], peaks[layers, tokens] = _bytes(setup, model, batch, level)
            del model
        per_layer = [(kept[3, tokens] - kept[1, tokens]) / 2 for tokens in (few, many)]
        measured = (per_layer[1] - per_layer[0]) / (many - few)
        shape = replace(config, layers=3)
        table = MemoryModel(basis_from(setup.config(shape, "bf16", many, many))).token_bytes
        row: Row = {"kept": measured, "model": table[level], "ratio": measured / table[level]}
        if setup.cuda:
            peak = (peaks[3, many] - peaks[3, few]) / (many - few)
            expected = 3 * table[level] + (table["none"] if level == "full" else 0.0)
            row |= {"peak_3_layers": peak, "peak_model": expected, "peak_ratio": peak / expected}
        else:
            row |= {"peak_3_layers": None, "peak_model": None, "peak_ratio": None}
        return row

    for case in CASES:
        for level in LEVELS:
            rows.add({**case.key, "level": level}, lambda case=case, level=level: one(case, level))  # type: ignore[misc]
    return rows.result(unit="bytes per token and layer")


def _bytes(setup: Setup, model: GPT, batch: PackedTokens, level: str) -> tuple[float, float]:
    """Bytes alive between forward and backward, and the most during both; what one call makes once is made before."""
    placement = Placement(0, at(level, model.config.layers))
    rows = int(batch.tokens.shape[0])

    def forward() -> Tensor:
        x = torch.randn(rows, model.config.hidden, dtype=torch.bfloat16, device=setup.device, requires_grad=True)
        return model.run(0, x, batch, placement)

    out = forward()
    out.backward(torch.ones_like(out))
    del out
    if not setup.cuda:
        with Kept(model) as kept:
            out = forward()
        return float(kept.bytes()), 0.0
    setup.wait()
    before = torch.cuda.memory_allocated(setup.device)
    torch.cuda.reset_peak_memory_stats(setup.device)
    out = forward()
    alive = torch.cuda.memory_allocated(setup.device) - before
    out.backward(torch.ones_like(out))
    setup.wait()
    peak = torch.cuda.max_memory_allocated(setup.device) - before
    without_gradients(model)
    return float(alive), float(peak)
