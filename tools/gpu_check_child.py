"""The process in which tools/gpu_check.py measures: it takes a request on stdin and sends one JSON line for each event.

It is a process of its own because a fault on a GPU can end more than the measurement that met it; gpu_check.py then starts another one for
the sections that are left. A request: {"device", "quick", "sections": [names], "until": time.time() at which all should be done,
"results": {section: what it gave before}}. Events: {"device": facts}, {"begin": name, "seconds": its share}, {"section": name, ...}.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # some images set it: fp32 would be no reference then

import torch
from gpu_check_exact import correct, memory, recompute
from gpu_check_predict import fit, steps
from gpu_check_setup import DeviceLost, Setup
from gpu_check_speed import attention, gemm, layers

import megadcp

Event = dict[str, Any]
Section = Callable[..., dict[str, Any]]
# name -> what measures it, and its share of the time; in this order, what others build on first
SECTIONS: dict[str, tuple[Section, float]] = {
    "correct": (correct, 2),
    "recompute": (recompute, 2),
    "memory": (memory, 3),
    "gemm": (gemm, 3),
    "attention": (attention, 2),
    "fit": (fit, 4),
    "steps": (steps, 3),
    "layers": (layers, 6),
}
LOST, NO_DEVICE = 3, 2


def facts(device: torch.device) -> Event:
    """What measured: versions and the device."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "cuda": cuda,
        "name": properties.name if properties else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)",
        "capability": f"{properties.major}.{properties.minor}" if properties else None,
        "memory_bytes": properties.total_memory if properties else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_version": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": _nccl() if cuda else None,
        "te": _version("transformer-engine"),
        "apex": {name: importlib.util.find_spec(name) is not None for name in ("amp_C", "fused_weight_gradient_mlp_cuda")},
        "megadcp": megadcp.__version__,
    }


def _nccl() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # a torch without it
        return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def run(request: Mapping[str, Any], send: Callable[[Event], None]) -> int:
    """All sections of a request; the exit code of the process."""
    if request["device"] == "cuda" and not torch.cuda.is_available():
        send({"refused": "torch sees no GPU here; --device cpu --quick runs the same code, with tiny sizes, on a CPU"})
        return NO_DEVICE
    setup = Setup(request["device"], request["quick"])
    send({"device": facts(setup.device)})
    results = dict(request["results"])
    names = list(request["sections"])
    for number, name in enumerate(names):
        left = request["until"] - time.time()
        share = max(0.0, left * SECTIONS[name][1] / sum(SECTIONS[each][1] for each in names[number:]))
        send({"begin": name, "seconds": share})
        result = one(setup, name, share, results)
        results[name] = result
        lost = result.pop("lost", False)
        send({"section": name, **result})
        if lost:
            return LOST
    return 0


def one(setup: Setup, name: str, seconds: float, results: Mapping[str, Any]) -> Event:
    """One section, whatever happens in it. status: ok, partial (rows were left out), failed."""
    begin = time.monotonic()
    arguments = (results,) if name == "steps" else ()
    found: Event
    try:
        found = SECTIONS[name][0](setup, begin + seconds, *arguments)
        status = "failed" if found["failed_rows"] else "partial" if found["left_out"] else "ok"
    except DeviceLost as error:
        found, status = {**error.found, "error": f"the device was lost: {error}", "lost": True}, "failed"
    except Exception as error:
        found, status = {"rows": [], "left_out": [], "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}, "failed"
    return {"status": status, "seconds": time.monotonic() - begin, **found}


def main() -> int:
    """Read the request, send events to the descriptor that the first argument names."""
    with open(int(sys.argv[1]), "w", encoding="utf-8") as out:

        def send(event: Event) -> None:
            out.write(json.dumps(event) + "\n")
            out.flush()

        return run(json.load(sys.stdin), send)


if __name__ == "__main__":
    sys.exit(main())
