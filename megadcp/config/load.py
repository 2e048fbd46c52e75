"""The only file that knows Hydra: the command line and configs/ in, one frozen, checked `Config` out.

Hydra composes and then steps aside: ranks start from the run.yaml that `megadcp.config.run_file` writes and reads without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megadcp.config.check import UserError, check, nearest
from megadcp.config.run_file import check_setting, dump_run, from_dict, load_run, one_line, to_dict, unknown_setting
from megadcp.config.schema import Config

__all__ = ["command_line", "compose", "dump_run", "find_configs", "load_run", "to_dict"]

KEYWORDS = ("optional", "override")  # what may stand before a group in a defaults list
INTERRUPTED = 130
BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended


def find_configs() -> Path:
    """The configs/ folder: beside the package in a checkout, else in the current folder."""
    places = [Path(__file__).resolve().parents[2] / "configs", Path.cwd() / "configs"]
    for place in places:
        if (place / "config.yaml").is_file():
            return place
    raise UserError(f"no configs/config.yaml at {' or '.join(map(str, places))}; run from a checkout of the repository")


def compose(overrides: Sequence[str] = (), configs: Path | None = None, config_name: str = "config") -> Config:
    """The checked config of `overrides`, written as on the command line: ["experiment=gpt_8b", "optim.lr=1e-4"].

    Raises:
        UserError: whatever is wrong with them, in one line.
    """
    node = _composed(list(overrides), Source(configs or find_configs(), config_name))
    config = _to_config(node)
    check(config)
    return config


def command_line(run: Callable[[Config], int], configs: Path) -> int:
    """The main program: what the command line asks for, composed from `configs` and handed to `run`, once per job.

    All jobs of a sweep are composed and checked before the first one starts. Returns the largest of the exit codes; 2 when the
    request itself is wrong, with one line on stderr (HYDRA_FULL_ERROR=1 shows the traceback).
    """
    arguments = get_args_parser().parse_args()
    source = Source(Path(arguments.config_path or configs).absolute(), arguments.config_name or "config", arguments.config_dir)
    codes: list[int] = []
    here = os.getpid()

    def job(node: DictConfig) -> int:
        if not {os.EX_TEMPFAIL, INTERRUPTED} & set(codes):  # stopped by a signal: that ends a sweep, too
            codes.append(reported(lambda: run(_job_config(node))))
        if codes[-1] and os.getpid() != here:  # a launcher has carried the job elsewhere: an exception is all that it brings back
            raise RuntimeError(f"the job ended with exit code {codes[-1]}")
        return codes[-1]

    def start() -> int:
        _register_schema()
        if arguments.config_path and not Path(arguments.config_path).is_absolute():
            raise UserError(f"--config-path={arguments.config_path} must be absolute; to add a folder of configs use --config-dir")
        if not (arguments.help or arguments.hydra_help or arguments.info or arguments.shell_completion or arguments.experimental_rerun):
            _check_request(arguments, source)
        hydra_main(version_base="1.3", config_path=str(configs.resolve()), config_name="config")(job)()
        return max(codes, default=0)

    return reported(start)


def reported(action: Callable[[], int]) -> int:
    """Run `action`; a UserError becomes one line on stderr and exit code 2."""
    try:
        return action()
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr, flush=True)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output (head, less) has left: nobody is there for a traceback, or for Python's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


@dataclasses.dataclass(frozen=True)
class Source:
    """Where configs come from: the main folder, the primary file, and Hydra's --config-dir."""

    folder: Path
    name: str = "config"
    extra: str | None = None


# -------------------------------------------------------------------------------------------------------------- composing
def _composed(overrides: list[str], source: Source) -> DictConfig:
    """Hydra's composition, `hydra` node included, with everything refused that Hydra would take in silence."""
    _register_schema()
    parsed = _parse(overrides)
    _refuse_keywords(source)
    for override in parsed:
        _refuse_unknown(override, source)
    extra = [f"hydra.searchpath=[file://{Path(source.extra).resolve()}]"] if source.extra else []
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(source.folder.resolve()), job_name="pretrain_gpt"):
            node = hydra_compose(source.name, overrides + extra, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise UserError(_explain(error)) from error
    for override in parsed:
        if override.is_add() and override.key_or_group.startswith("hydra."):
            _refuse_unknown_hydra(override.key_or_group, node)
    return node


def _to_config(node: DictConfig, allow_missing: bool = False) -> Config:
    """Resolve `node` and merge it into the schema once more: what `+key=value` added without asking the schema is refused here."""
    ours = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
    try:
        data = OmegaConf.to_container(ours, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(_explain(error)) from error
    return from_dict(typing.cast(dict[str, Any], data), allow_missing)


def _register_schema() -> None:
    """Make the schema known under the name `schema`, which configs/config.yaml starts from. Repeating it changes nothing."""
    ConfigStore.instance().store(name="schema", node=_open(Config))


def _open(kind: Any) -> Any:
    """The same dataclass, not frozen and with lists for tuples: OmegaConf makes frozen ones read-only, which Hydra can't merge into."""
    hints = typing.get_type_hints(kind)
    fields = []
    for item in dataclasses.fields(kind):
        hint, default = hints[item.name], item.default_factory if item.default is dataclasses.MISSING else item.default
        if dataclasses.is_dataclass(hint):
            hint = _open(hint)
            default = hint
        elif typing.get_origin(hint) is tuple:
            inner = typing.get_args(hint)[0]
            hint = list[_open(inner) if dataclasses.is_dataclass(inner) else inner]  # type: ignore[misc]
            default = _listed(default)
        made = dataclasses.field(default_factory=default) if callable(default) else dataclasses.field(default=default)
        fields.append((item.name, hint, made))
    return dataclasses.make_dataclass(kind.__name__, fields)


def _listed(factory: Any) -> Callable[[], list[Any]]:
    return lambda: list(factory())


# --------------------------------------------------------------------------------------------------------------- refusing
def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return list(OverridesParser.create().parse_overrides(list(overrides)))
    except HydraException as error:
        raise UserError(f"an override can't be read: {_explain(error)}; write key=value, quote values with spaces or brackets") from error


def _refuse_unknown(override: Override, source: Source) -> None:
    """Refuse a misspelt setting, with or without a plus, and a list or group with a wrong value inside, by full name."""
    key = override.key_or_group
    if override.package is not None or "/" in key:
        return
    if key == "hydra" or key.startswith("hydra."):
        _refuse_unknown_hydra(key, OmegaConf.create({"hydra": OmegaConf.structured(HydraConf)}))
        return
    if "." not in key and key not in (group.name for group in dataclasses.fields(Config)):
        groups = sorted(entry.name for entry in source.folder.iterdir() if entry.is_dir())
        if key in groups or (source.extra and Path(source.extra, key).is_dir()):
            return
        guess = nearest(key, groups)
        raise UserError(f"{key} is neither a setting nor a group of configs/; {guess}")
    if "." in key and (message := unknown_setting(key)):
        raise UserError(message)
    if "." in key and not (override.is_delete() or override.is_sweep_override()):
        check_setting(key, override.value())


def _refuse_unknown_hydra(key: str, node: DictConfig) -> None:
    """Hydra lets a plus add anything below `hydra`; only the free-form tables there may grow."""
    here: Any = node
    for part in key.split("."):
        kind = OmegaConf.get_type(here) if OmegaConf.is_config(here) else None
        if dataclasses.is_dataclass(kind) and part != "hydra":
            legal = [item.name for item in dataclasses.fields(typing.cast(Any, kind))]
            if part not in legal:
                above = key[: key.rindex(part)]
                raise UserError(f"{key} is not a setting of Hydra; {nearest(above + part, [above + name for name in legal])}")
        here = OmegaConf.select(here, part) if OmegaConf.is_config(here) else None


def _refuse_keywords(source: Source) -> None:
    """Hydra drops a word it does not know in a defaults list (`overide /model: gpt_8b`) and composes something else: refuse it."""
    for folder in [source.folder] + ([Path(source.extra)] if source.extra else []):
        for file in sorted(folder.rglob("*.yaml")):
            for words in map(str.split, _defaults_of(file)):
                wrong = [word for word in words[:-1] if word not in KEYWORDS]
                if wrong:
                    where = file.relative_to(folder)
                    raise UserError(f"{where}: {wrong[0]!r} in the defaults entry '{' '.join(words)}' is no keyword; {nearest(wrong[0], KEYWORDS)}")


def _defaults_of(file: Path) -> list[str]:
    """The group names, keywords included, of a file's defaults list; nothing where it can't be read (Hydra says why, if it is used)."""
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    entries = data.get("defaults") if isinstance(data, dict) else None
    return [str(key) for entry in entries or [] if isinstance(entry, dict) for key in entry]


def _explain(error: BaseException) -> str:
    """Hydra's and OmegaConf's errors in one line, with the nearest valid name where a name is wrong."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} does not exist; {nearest(name, error.options)}"
    lines, cause = [], error
    while cause is not None:
        key = getattr(cause, "full_key", None)
        if key and type(cause).__name__ in ("ConfigKeyError", "ConfigAttributeError") and not str(key).startswith("hydra"):
            hint = ": is its first line '# @package _global_'?" if str(key).split(".")[0] == "experiment" else ""
            lines.append((unknown_setting(str(key)) or f"{key} has no value yet; ++{key}=VALUE gives it one") + hint)
        else:
            lines.append(re.split(r"\n\s*(?:full_key|See http|reference_type|object_type|Config search path)", str(cause))[0])
            lines += [f"({key})"] if key and str(key) not in lines[-1] else []
        cause = cause.__cause__ or (cause.__context__ if not cause.__suppress_context__ else None)  # type: ignore[assignment]
        if not isinstance(cause, (HydraException, OmegaConfBaseException)):
            break
    text = one_line(" ".join(line for line in lines if line and "To append to your config" not in line))
    return text or type(error).__name__


# ------------------------------------------------------------------------------------------------------------------- jobs
def _check_request(arguments: Any, source: Source) -> None:
    """Compose and check all that the command line asks for before Hydra starts any of it."""
    if arguments.cfg:  # shows settings, so a value that must still be given is no fault
        _to_config(_composed(arguments.overrides, source), allow_missing=True)
        return
    if not arguments.multirun:
        check(_to_config(_composed(arguments.overrides, source)))
        return
    owners: dict[str, int] = {}
    for number, overrides in enumerate(_sweep_jobs(arguments.overrides, source)):
        node = _composed(overrides, source)
        task = [each for each, parsed in zip(overrides, _parse(overrides), strict=True) if not parsed.is_hydra_override()]
        config = _named(_to_config(node), task)
        check(config)
        first = owners.setdefault(config.run.name, number)
        if first != number:
            raise UserError(
                f"jobs {first} and {number} of this sweep would share the run folder {config.run.folder}/{config.run.name}; leave run.name out "
                "(each job is then named after its overrides) or sweep it too: run.name=a,b"
            )
    try:
        Path(str(node.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)  # as Hydra does next, with a traceback where it can't
    except OSError as error:
        raise UserError(f"{error.filename} can't be made ({error.strerror}); set run.folder to a folder you may write to") from None


def _sweep_jobs(overrides: Sequence[str], source: Source) -> list[list[str]]:
    """The override lists that Hydra's own sweeper will run; for another sweeper, whose choices nobody knows yet, what all jobs share."""
    parsed = _parse(overrides)
    ours = [text for text, each in zip(overrides, parsed, strict=True) if each.is_hydra_override()]
    swept = [each for each in parsed if not each.is_hydra_override()]
    for each in swept:
        _refuse_unknown(each, source)
    sweeper = _composed(ours, source).hydra.sweeper
    if not str(sweeper.get("_target_", "")).endswith(".BasicSweeper"):
        return [ours + [text for text, each in zip(overrides, parsed, strict=True) if each in swept and not each.is_sweep_override()]]
    params = _parse([f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()])
    try:
        batches = BasicSweeper.split_arguments(params + swept, None)
    except HydraException as error:
        raise UserError(_explain(error)) from error
    return [ours + list(job) for batch in batches for job in batch]


def _job_config(node: DictConfig) -> Config:
    """The config of the job that Hydra is running; in a sweep it carries a run name of its own."""
    config = _to_config(node)
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        config = _named(config, list(hydra.overrides.task))
    check(config)
    return config


def _named(config: Config, overrides: Sequence[str]) -> Config:
    """A sweep's job: without a run.name of its own it is named after its overrides, so that asking again finds the same run folder."""
    if any(each.lstrip("+").startswith("run.name=") for each in overrides):
        return config
    plain = ",".join(sorted(overrides))
    legal = re.sub(r"[^A-Za-z0-9._=,+-]", "_", plain)
    if legal != plain or len(legal) > 120:
        legal = f"{legal[:100]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=f"{config.run.name},{legal}" if legal else config.run.name))
