"""What tools/plan.py was asked for: its own keys, and the config of the run whose steps are planned.

Hydra is imported only where settings are composed, so that looking at recorded plans starts at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError, nearest
from megadcp.config.run_file import from_dict, load_run
from megadcp.config.schema import Config, GemmFlops, HardwareConfig
from megadcp.plan.basis import profile_from
from megadcp.plan.step_plan import StepPlan

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MAX_LENGTH = 131072  # data.max_length where lengths are given and nothing says otherwise
UNLIMITED = 2**40  # data.tokens_per_step where nothing is cut into steps
COMMANDS = ("replay", "what-if")
THEMES = ("auto", "light", "dark")
KEYS = {
    "lengths": "FILE.json: a list of document lengths (one step), or a list of such lists",
    "preset": "draw documents: wikipedia, web, midtrain, prolong, longsft, byted, mcore, uniform or constant",
    "tokens_per_lane": "with preset: tokens of a step for each lane (times pp); 32768 if not given",
    "seed": "with preset: another seed is another draw; 1 if not given",
    "step": "first step to plan, replay or draw; 0 if not given",
    "steps": "how many; not given: all of lengths= and replay, 10 of what-if, else 1 (also where step= is given to replay or what-if)",
    "out": "write the plan as FILE.json, or plans as FILE.jsonl or FILE.jsonl.zst",
    "svg": "write a Gantt chart of the (first) step",
    "trace": "write a Perfetto trace of the (first) step",
    "histogram": "write the documents by length, coloured by cp, as SVG",
    "chart": "true: show the (first) step's lanes as text, too",
    "theme": f"of the pictures: {', '.join(THEMES)}",
    "overwrite": "true: out, svg, trace and histogram may replace any file",
    "baselines": "false: leave out the comparison with other systems",
    "peers": "true: compare with megatron-core's scheduler, too, which takes seconds to import",
}
PLANNED = ("model", "parallel", "plan", "precision", "cluster", "hardware")  # groups that a plan depends on
DRAWN_ONLY = ("tokens_per_lane", "seed")
SOURCES = ("lengths", "preset", *DRAWN_ONLY)


@dataclass(frozen=True)
class Request:
    """A command line, taken apart: `path` is what replay and what-if look at, `overrides` are Hydra's."""

    command: str
    path: str
    own: dict[str, str]
    overrides: tuple[str, ...]

    def text(self, key: str, default: str = "") -> str:
        """The value of one of this tool's keys."""
        return self.own.get(key, default)

    def number(self, key: str, default: int, least: int = 0) -> int:
        """The same as a whole number."""
        text = self.own.get(key, str(default))
        if not re.fullmatch(r"[+-]?\d(_?\d)*", text) or int(text) < least:
            raise UserError(f"{key}={text} is not a whole number of at least {least}")
        return int(text)

    def flag(self, key: str, default: bool) -> bool:
        """The same as true or false."""
        text = self.own.get(key, str(default)).lower()
        if text not in ("true", "false"):
            raise UserError(f"{key}={text} is neither true nor false")
        return text == "true"

    def names(self, key: str) -> bool:
        """Whether one of Hydra's overrides sets exactly `key`: a setting, or the choice of a group."""
        return any(_key(override) == key for override in self.overrides)


def parse(argv: Sequence[str]) -> Request:
    """Take a command line apart. UserError for what no part of it can be."""
    command = argv[0] if argv and argv[0] in COMMANDS else "plan"
    rest = list(argv[command != "plan" :])
    path = ""
    if command != "plan":
        if not rest or _is_setting(rest[0]):
            raise UserError(f"{command} needs a run folder, a plans.jsonl or the JSON file of a plan: python tools/plan.py {command} runs/NAME")
        path = rest.pop(0)
    own: dict[str, str] = {}
    overrides = []
    for word in rest:
        if not _is_setting(word):
            raise UserError(f"{word!r} is no setting; write key=value, or begin with one of: {', '.join(COMMANDS)} (see --help)")
        key, _, value = word.partition("=")
        if key in KEYS:
            if key in own:
                raise UserError(f"{key}= is given twice")
            own[key] = value
        else:
            _refuse_unknown(_key(word))
            overrides.append(word)
    request = Request(command, path, own, tuple(overrides))
    _check(request)
    return request


def _is_setting(word: str) -> bool:
    return re.match(r"(\+\+?)?[A-Za-z_][\w./@:\[\]-]*=|~[A-Za-z_]", word) is not None


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def _refuse_unknown(key: str) -> None:
    """Names with a dot are left to the schema, which knows all of them."""
    groups = [*sorted(folder.name for folder in CONFIGS.iterdir() if folder.is_dir()), "run"] if CONFIGS.is_dir() else []
    if groups and key not in groups and not re.search(r"[./@\[]", key):
        raise UserError(f"{key}= is neither a key of this tool nor a group of settings; {nearest(key, [*KEYS, *groups])}")


def _check(request: Request) -> None:
    """Refuse keys that contradict each other or the command."""
    own, command = request.own, request.command
    if command != "plan":
        wrong = [key for key in SOURCES if key in own] + (["out"] if command == "replay" and "out" in own else [])
        if wrong:
            raise UserError(f"{wrong[0]}= has no meaning with {command}, which takes the lengths of recorded plans")
    if command == "replay" and request.overrides:
        raise UserError(f"{request.overrides[0]} can't change a recorded plan; to plan its lengths again use: what-if {request.path}")
    if "lengths" in own and "preset" in own:
        raise UserError("lengths= and preset= are both given; a step's documents come from one of them")
    if "preset" not in own and (wrong := [key for key in DRAWN_ONLY if key in own]):
        raise UserError(f"{wrong[0]}= belongs to preset=NAME")
    if request.text("theme", "auto") not in THEMES:
        raise UserError(f"theme={own['theme']} is not known; {nearest(own['theme'], THEMES)}")
    for key in ("out", "svg", "trace", "histogram", "lengths"):
        if own.get(key) == "":
            raise UserError(f"{key}= names no file")
    for key, least in (("step", 0), ("steps", 1), ("seed", 0), ("tokens_per_lane", 1)):
        request.number(key, least, least)
    for key in ("overwrite", "baselines", "peers", "chart"):
        request.flag(key, True)


# ------------------------------------------------------------------------------------------------------- the config to plan for
def compose(request: Request, say: Callable[[str], None]) -> Config:
    """The config of a planning request. `say` gets a line for every choice that was made in the person's place."""
    from megadcp.config import load

    chosen = [*_hardware(request, say), "run.sample_prompt=''"]  # no sample is printed here, so it needs no tokenizer
    if "lengths" in request.own or "preset" in request.own:
        chosen += [f"data.tokens_per_step={UNLIMITED}", "data.mode=documents"]  # how a corpus is cut into steps must not stand in the way
        if not request.names("data.max_length") and not request.names("experiment"):
            chosen.append(f"data.max_length={MAX_LENGTH}")
    return load.compose([*chosen, *request.overrides])


def _hardware(request: Request, say: Callable[[str], None]) -> list[str]:
    """The hardware profile that a cluster's name begins with, unless one is named."""
    if request.names("hardware"):
        return []
    for override in request.overrides:
        if _key(override) == "cluster":
            name = override.partition("=")[2].strip("'\"")
            profile = name.partition("_")[0]
            if profile and (CONFIGS / "hardware" / f"{profile}.yaml").is_file():
                say(f"hardware={profile}, which cluster={name} is made of (hardware=NAME chooses another)")
                return [f"hardware={profile}"]
    return []


def compose_what_if(request: Request, plan: StepPlan, say: Callable[[str], None]) -> Config:
    """The settings that `plan` was made with, changed by the request's overrides."""
    from megadcp.config import load

    recorded = run_settings(request.path)
    base = recorded or settings_of(plan)
    hardware = _hardware(request, say)
    whole = request.names("experiment")
    named = {group for group in PLANNED if whole or request.names(group)} | ({"hardware"} if hardware else set())
    if recorded is None and "hardware" not in named:
        known = profile_of(plan)
        if known is not None:
            hardware, named = [f"hardware={known.name}"], named | {"hardware"}
        elif request.names("precision") or request.names("precision.format"):
            raise UserError(
                f"a plan carries the matrix-product rate of its own precision ({plan.precision}) only, so another one can't be tried on it; "
                "name a profile: hardware=NAME"
            )
    dropped = _outdated(request, base, plan, say)
    kept = [
        f"{key}={_hydra(value)}"
        for group in PLANNED
        if group not in named
        for key, value in _leaves(group, getattr(base, group))
        if key not in dropped
    ]
    kept += [] if whole else [f"data.max_length={base.data.max_length}"]
    kept += [f"data.tokens_per_step={UNLIMITED}", "data.mode=documents", "run.sample_prompt=''"]
    return load.compose([*hardware, *kept, *request.overrides])


def _outdated(request: Request, base: Config, plan: StepPlan, say: Callable[[str], None]) -> set[str]:
    """Settings of the recorded run that can't hold any more when others change: they go back to their defaults."""

    def changed(*keys: str) -> bool:
        return any(request.names(key) for key in keys)

    found = []
    if base.parallel.stage_layers and changed("model", "model.layers", "parallel", "parallel.pp", "parallel.virtual_stages"):
        found.append("parallel.stage_layers")
    if base.parallel.virtual_stages > 1 and changed("parallel.pp"):
        found.append("parallel.virtual_stages")
    lanes = ("cluster", "cluster.nodes", "cluster.processes", "parallel", "parallel.tp", "parallel.pp")
    if base.parallel.max_cp and changed(*lanes):
        found.append("parallel.max_cp")
    if base.plan.lane_speed and changed(*lanes):
        found.append("plan.lane_speed")
    found = [key for key in found if not request.names(key) and not request.names(key.partition(".")[0])]
    if found:
        say(f"{', '.join(found)} of the recorded run not kept: the layout changes")
    return set(found)


def _leaves(prefix: str, group: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for item in dataclasses.fields(group):
        value, key = getattr(group, item.name), f"{prefix}.{item.name}"
        found += _leaves(key, value) if dataclasses.is_dataclass(value) else [(key, value)]
    return found


def _hydra(value: Any) -> str:
    """A value as Hydra's command line spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return repr(value)


# -------------------------------------------------------------------------------------------------- settings of recorded plans
def run_settings(path: str) -> Config | None:
    """The run.yaml that belongs to a run folder or to the plans in it; None where there is none."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return load_run(folder) if (folder / "run.yaml").is_file() else None


def settings_of(plan: StepPlan) -> Config:
    """A config whose plans would have the basis of `plan`."""
    layout, profile = plan.layout, plan.profile
    world = layout.lanes * layout.tp * layout.pp
    nodes = world // profile.gpus_per_node if world % profile.gpus_per_node == 0 else 1
    shape = {item.name: getattr(plan.model, item.name) for item in dataclasses.fields(plan.model) if item.name != "gated"}
    rates = dict.fromkeys((item.name for item in dataclasses.fields(GemmFlops)), profile.gemm_flops)
    parallel = {"tp": layout.tp, "pp": layout.pp, "virtual_stages": layout.virtual_stages, "sequence_parallel": layout.sequence_parallel}
    return from_dict(
        {
            "run": {"name": "what-if"},
            "model": {**shape, "mlp": "swiglu" if plan.model.gated else "gelu"},
            "data": {"max_length": max(MAX_LENGTH, *plan.lengths), "train": [{"prefix": "none"}]},
            "parallel": {**parallel, "stage_layers": list(plan.stage_layers) if layout.pp > 1 else []},
            "plan": {"lane_speed": list(plan.lane_speed), "policy": plan.predicted.policy or "joint"},
            "precision": {"format": plan.precision},
            "cluster": {"name": "recorded", "nodes": nodes, "processes": world // nodes},
            "hardware": {**vars(profile), "name": "recorded", "gemm_flops": rates},
        }
    )


def profile_of(plan: StepPlan) -> HardwareConfig | None:
    """The profile of configs/hardware that a plan was made with, if it is one of them."""
    import yaml

    for file in sorted((CONFIGS / "hardware").glob("*.yaml")):
        with contextlib.suppress(UserError, yaml.YAMLError):  # one that is of no use here
            hardware = from_dict({"hardware": yaml.safe_load(file.read_text(encoding="utf-8"))}, allow_missing=True).hardware
            if profile_from(hardware, plan.precision) == plan.profile:
                return hardware
    return None


def peak_flops(request: Request, plan: StepPlan) -> tuple[float | None, str]:
    """(Peak of a recorded plan's devices, name of their profile): plans don't carry them."""
    recorded = run_settings(request.path)
    hardware = recorded.hardware if recorded and profile_from(recorded.hardware, plan.precision) == plan.profile else profile_of(plan)
    return (hardware.peak_flops, hardware.name) if hardware else (None, "")
