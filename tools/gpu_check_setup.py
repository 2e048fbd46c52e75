"""What all sections of tools/gpu_check.py need: sizes, models, backends, packs, clocks, and rows that may fail or be left out.

Legend: t tokens of a microbatch, n documents in it, h hidden.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from calibrate_measure import RandomDocuments, device_bytes, microbatch_of, mixed
from torch import nn

from megadcp.backends.choose import make_backend
from megadcp.config.check import UserError
from megadcp.config.schema import ClusterConfig, Config, DataConfig, GemmFlops, HardwareConfig, ModelConfig, PrecisionConfig, RopeConfig, RunConfig
from megadcp.data.batch import build_pack
from megadcp.data.step_documents import StepDocuments
from megadcp.engine.step import to_device
from megadcp.nn.backend import Backend, PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.nn.part import Part
from megadcp.plan.basis import unit_of
from megadcp.plan.step_plan import Recompute

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
HOPPER = ("H100", "H200", "GH200")  # whose peak is that of configs/hardware/h200.yaml
KEEPS = 0.05  # of the device's memory may still be allocated after a row
LEVELS = ("none", "selective", "mlp", "full")
Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------------------ files
def read_settings(path: Path) -> dict[str, Any]:
    """A file of configs/model or configs/hardware: `name: value` with comments, one level of groups by indentation. Needs no YAML."""
    found: dict[str, Any] = {}
    group = found
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.partition(" #")[0].rstrip()
        if not text or text.startswith(("#", "defaults")):
            continue
        name, _, value = text.strip().partition(":")
        if not text.startswith(" "):
            group = found
        if value.strip():
            group[name] = _value(value.strip())
        else:
            group = found[name] = {}
    return found


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("\"'")


def model_of(name: str) -> ModelConfig:
    """A model of configs/model."""
    values = read_settings(CONFIGS / "model" / f"{name}.yaml")
    return ModelConfig(**{**values, "rope": RopeConfig(**values.get("rope", {}))})


def hardware_of(name: str) -> HardwareConfig:
    """A profile of configs/hardware."""
    values = read_settings(CONFIGS / "hardware" / f"{name}.yaml")
    return HardwareConfig(**{**values, "gemm_flops": GemmFlops(**values["gemm_flops"])})


# ------------------------------------------------------------------------------------------------------------------------ sizes
@dataclass(frozen=True)
class Sizes:
    """What is measured. Documents of packed microbatches have `packed` tokens; `seconds` is how long one number is measured at most."""

    models: dict[str, ModelConfig]  # for gemm and layers
    exact: ModelConfig  # compared with fp32
    exact_lengths: tuple[int, ...]
    products: tuple[int, ...]  # tokens of bare matrix products
    tokens: tuple[int, ...]  # tokens of layers
    packed: int
    lengths: tuple[int, ...]  # of documents, for attention
    attention_tokens: int
    kept: tuple[int, int]  # two token counts, for bytes
    fit_layers: int
    fit_tokens: int
    fit_sizes: int
    steps: int
    step_tokens: int
    seconds: float


def sizes_of(quick: bool) -> Sizes:
    """The real sizes, or tiny ones that a CPU gets through in seconds."""
    one, eight = model_of("gpt_1b"), model_of("gpt_8b")
    thousand = 1024
    if not quick:
        exact = replace(eight, layers=4, hidden=1024, heads=8, kv_heads=2, ffn=3584, vocab=8192)
        return Sizes(
            {"gpt_1b": one, "gpt_8b": eight}, exact, (3000, 700, 129, 17, 1, 250), (1 * thousand, 4 * thousand, 16 * thousand, 64 * thousand),
            tuple(k * thousand for k in (4, 8, 16, 32, 64, 128)), 2 * thousand, tuple(128 << step for step in range(11)), 32 * thousand,
            (8 * thousand, 16 * thousand), 4, 32 * thousand, 6, 4, 64 * thousand, 0.4,
        )  # fmt: skip
    tiny = ModelConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=256)
    wider = replace(tiny, ffn=384)
    return Sizes(
        {"gpt_1b": tiny, "gpt_8b": wider}, tiny, (70, 25, 9, 1), (128,), (128,), 32, (16, 64), 128, (128, 256),
        2, 256, 2, 1, 256, 0.0,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------------- backends
class Unavailable(Exception):
    """What was to be measured doesn't exist here; the text says why, in a few words."""


class DeviceLost(Exception):
    """The device answers no more (an illegal access, say): nothing else can run in this process. `found`: the section's rows so far."""

    def __init__(self, text: str, found: Row) -> None:
        super().__init__(text)
        self.found = found


@dataclass(frozen=True)
class Case:
    """A backend with the format of its linears."""

    backend: str
    format: str

    @property
    def key(self) -> Row:
        """The columns that name it."""
        return {"backend": self.backend, "format": self.format}


CASES = tuple(Case(backend, format) for backend in ("torch", "te") for format in ("bf16", "fp8_current", "fp8_block"))


class Setup:
    """One run on one device: its sizes, and what is made for each measurement."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick, self.sizes = torch.device(device), quick, sizes_of(quick)
        self.cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if self.cuda else ""
        self.hardware = hardware_of("h200" if self.cuda else "cpu")
        if not any(each in name for each in HOPPER):
            self.hardware = replace(self.hardware, peak_flops=None)
        self.hardware = replace(self.hardware, memory_bytes=device_bytes(self.device, 1))

    def backend(self, case: Case, dtype: torch.dtype = torch.bfloat16) -> Backend:
        """Make a case's backend.

        Raises:
            Unavailable: it can't run here.
        """
        if case.backend == "te" and importlib.util.find_spec("transformer_engine") is None:
            raise Unavailable("not installed")
        try:
            made = make_backend(PrecisionConfig(format=case.format, backend=case.backend), dtype, self.device)
        except UserError as error:
            raise Unavailable(str(error)) from None
        if made.name != case.backend:
            raise Unavailable(f"this version has no {case.backend} backend")
        return made

    def model(self, case: Case, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> GPT:
        """A whole model; the same weights for every backend."""
        return self._filled(GPT(config, self.backend(case, dtype), None, int(self.hardware.loss_chunk)))

    def layers(self, case: Case, config: ModelConfig, count: int) -> GPT:
        """Layers alone, as in the middle of a pipeline: run(0, x [t, h], batch, placement) -> [t, h]."""
        part = Part(1, 3, (tuple(range(count)),))
        return self._filled(GPT(replace(config, layers=count), self.backend(case), None, int(self.hardware.loss_chunk), part))

    def _filled(self, model: GPT) -> GPT:
        """Random weights made on the device (initial ones of a run are made on the CPU, which takes long for these), by parameter name."""
        generator = torch.Generator(self.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02, generator=generator.manual_seed(zlib.crc32(name.encode())))
                else:
                    parameter.fill_(float(name.endswith("weight")))
        return model

    def batch(self, lengths: Sequence[int], format: str, vocab: int) -> PackedTokens:
        """Random documents of these lengths; the last one is padded to what the format needs."""
        unit = unit_of(format)
        padded = (*lengths[:-1], lengths[-1] + -sum(lengths) % unit)
        one = replace(microbatch_of(lengths), padded=padded)
        documents = StepDocuments(0, torch.arange(len(lengths)).numpy(), torch.tensor(lengths).numpy(), 0.0)
        return to_device(build_pack(RandomDocuments(lengths, vocab), documents, one), self.device)

    def config(self, model: ModelConfig, format: str, max_length: int, tokens: int, hardware: HardwareConfig | None = None) -> Config:
        """The settings of a run of one rank, for the planner and the fit."""
        return Config(
            run=RunConfig(name="gpu_check"),
            model=model,
            data=DataConfig(max_length=max_length, tokens_per_step=tokens),
            precision=PrecisionConfig(format=format),
            cluster=ClusterConfig(device=self.device.type),
            hardware=hardware or self.hardware,
        )

    # ------------------------------------------------------------------------------------------------------------------- clocks
    def wait(self) -> None:
        """Until the device has done all."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def intervals(self, work: Callable[[Callable[[], None]], None], seconds: float | None = None) -> tuple[float, ...]:
        """Median seconds between the marks that `work` sets. Repeated for about `seconds`, one call behind the other, after one that warms up."""
        seconds = self.sizes.seconds if seconds is None else seconds
        self._marked(work)
        begin = time.perf_counter()
        rows = [self._marked(work)]
        spent = max(time.perf_counter() - begin, 1e-6)
        more = min(20, int(seconds / spent))
        if more:
            kept = [self._marked(work, wait=False) for _ in range(more)]
            self.wait()
            rows = [self._between(marks) for marks in kept]  # type: ignore[arg-type]
        return tuple(statistics.median(column) for column in zip(*rows, strict=True))

    def _marked(self, work: Callable[[Callable[[], None]], None], wait: bool = True) -> Any:
        marks: list[Any] = []

        def mark() -> None:
            if self.cuda:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            else:
                marks.append(time.perf_counter())

        work(mark)
        if not wait:
            return marks
        self.wait()
        return self._between(marks)

    def _between(self, marks: list[Any]) -> tuple[float, ...]:
        return tuple(a.elapsed_time(b) / 1000 if self.cuda else b - a for a, b in itertools.pairwise(marks))


def documents(tokens: int, length: int) -> tuple[int, ...]:
    """About `tokens` tokens in documents around `length`, of many sizes, none above 4 x length; the same on every call."""
    import numpy as np

    return mixed(tokens, float(length), 4 * length, np.random.default_rng(tokens + length))


def at(level: str, layers: int) -> Recompute:
    """A recompute value."""
    return Recompute(level, 0 if level == "none" else layers)


def without_gradients(model: nn.Module) -> None:
    """Forget gradients."""
    for parameter in model.parameters():
        parameter.grad = None


# ------------------------------------------------------------------------------------------------------------------------- rows
@dataclass
class Rows:
    """The rows of a section. One that fails says so and the next one runs; those after `end` (time.monotonic) are left out by name."""

    setup: Setup
    end: float
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: int = 0

    def add(self, key: Row, work: Callable[[], Row]) -> Row | None:
        """One row: its key and what `work` measures. None if there is nothing.

        Raises:
            DeviceLost: the device can't go on.
        """
        if time.monotonic() > self.end:
            self.left_out.append(" ".join(str(value) for value in key.values()))
            return None
        row: Row = {**key}
        try:
            row |= work()
        except Unavailable as reason:
            row["status"] = str(reason)
        except torch.OutOfMemoryError:
            row["status"] = "out of memory"
        except Exception as error:
            self.failed += 1
            row["status"] = f"failed: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"
            self._check_device(row)
        row = {name: _finite(value) for name, value in row.items()}
        self.rows.append(row)
        if self.setup.cuda:
            if torch.cuda.memory_allocated(self.setup.device) > KEEPS * self.setup.hardware.memory_bytes:
                gc.collect()  # models hold themselves, by their hooks
            torch.cuda.empty_cache()
        return row if "status" not in row else None

    def _check_device(self, row: Row) -> None:
        try:
            self.setup.wait()
        except Exception as error:
            self.rows.append(row)
            raise DeviceLost(str(row["status"]), self.result()) from error

    def result(self, **more: Any) -> dict[str, Any]:
        """What a section gives."""
        return {"rows": self.rows, "left_out": self.left_out, "failed_rows": self.failed, **more}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
