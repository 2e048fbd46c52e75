"""Configs as plain values: dicts, `run.yaml`, and what differs between two of them. Needs PyYAML, never Hydra.

`from_dict` is the one door into the dataclasses: unknown keys, wrong types and missing values are refused here by their full
name, whether they come from the command line, from a file in configs/ or from a run folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import types
import typing
from pathlib import Path
from typing import Any

import yaml

from megadcp.config.check import UserError
from megadcp.config.schema import MISSING, Config, settings

HEADER = "# The settings of this run, frozen when it began (docs/config.md says what each one means).\n"


def to_dict(config: Any) -> dict[str, Any]:
    """A config, or any group of one, as nested dicts of plain values; tuples become lists."""
    return {item.name: _plain(getattr(config, item.name)) for item in dataclasses.fields(config)}


def from_dict(data: dict[str, Any], allow_missing: bool = False) -> Config:
    """The frozen config that `data` describes; absent keys take the schema's defaults.

    `allow_missing` lets values that must be given (`???`) through, for looking at a config that can't run yet.

    Raises:
        UserError: an unknown key, a value of the wrong type, or a value that must be given.
    """
    config: Config = _group(Config, data, "")
    missing = [] if allow_missing else [key for key, value in flat(config).items() if value == MISSING]
    if missing:
        raise UserError(f"{' and '.join(missing)} must be given: " + " ".join(f"{key}=VALUE" for key in missing))
    return config


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Full name -> plain value of every setting; the items of a list of groups are named data.train[0].prefix."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, key = getattr(config, item.name), prefix + item.name
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{key}.")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for index, part in enumerate(value):
                found |= flat(part, f"{key}[{index}].")
        else:
            found[key] = _plain(value)
    return found


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Full name -> (old, new) of every setting whose value differs; None where a list has no such item."""
    before, after = flat(old), flat(new)
    return {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}


def dump_run(config: Config, path: str | Path) -> None:
    """Write run.yaml: under another name first, then renamed, so that a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(HEADER + yaml.safe_dump(to_dict(config), sort_keys=False))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_run(path: str | Path) -> Config:
    """The config in a run.yaml; a run folder stands for the file inside it.

    Raises:
        UserError: no such file, not YAML, or settings that this version does not know.
    """
    path = Path(path)
    path = path / "run.yaml" if path.is_dir() else path
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a run folder (runs/NAME) or its run.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable as YAML: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no settings; expected the groups {', '.join(_fields(Config))}")
    try:
        return from_dict(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def unknown_setting(key: str) -> str | None:
    """None for a name of the schema (group, setting, item of a list); else the message that refuses it."""
    node: Any = Config
    parts = key.replace("[", ".").replace("]", "").split(".")
    for depth, part in enumerate(parts):
        if typing.get_origin(node) is tuple and part.isdigit():
            node = typing.get_args(node)[0]
        elif typing.get_origin(node) is dict:  # its names are the user's
            node = typing.get_args(node)[1]
        elif dataclasses.is_dataclass(node) and part in _fields(node):
            node = typing.get_type_hints(node)[part]
        else:
            return f"{key} is not a setting; {_likely(parts, depth, _fields(node) if dataclasses.is_dataclass(node) else [])}"
    return None


def check_setting(key: str, value: Any) -> None:
    """Refuse a value that the setting `key`, which must exist, can't hold; text is taken as it is (it may be an interpolation)."""
    node: Any = Config
    for part in key.replace("[", ".").replace("]", "").split("."):
        if typing.get_origin(node) in (tuple, dict):
            node = typing.get_args(node)[typing.get_origin(node) is dict]
        else:
            node = typing.get_type_hints(node)[part]
    if node is not str and not (isinstance(value, str) and "${" in value):
        _value(node, value, key)


def _likely(parts: list[str], depth: int, here: list[str]) -> str:
    """What was probably meant where `parts[depth]` is wrong: a neighbour, the same name elsewhere, or the list of what is legal."""
    for close in difflib.get_close_matches(parts[depth], here, 3, 0.7):
        guess = _spelt([*parts[:depth], close, *parts[depth + 1 :]])
        if unknown_setting(guess) is None:
            return f"nearest: {guess}"
    elsewhere = {name.rsplit(".", 1)[-1]: name for name, _ in reversed(settings())}
    for close in difflib.get_close_matches(parts[-1], elsewhere, 1, 0.8):
        return f"nearest: {elsewhere[close]}"
    above = ".".join(parts[:depth])
    return f"legal in {above}: {', '.join(here)}" if here and above else f"legal here: {', '.join(here) or above}"


def _spelt(parts: list[str]) -> str:
    """The parts of a name put together: data.train[0].prefix."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts).lstrip(".")


def one_line(error: object) -> str:
    """The text of an error without its line breaks."""
    return " ".join(str(error).split())


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, dict):
        return dict(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _fields(node: Any) -> list[str]:
    return [item.name for item in dataclasses.fields(node)]


def _group(kind: Any, data: Any, key: str) -> Any:
    """One dataclass from a mapping; `key` is its full name, empty for the root."""
    if not isinstance(data, dict):
        raise UserError(f"{key}={data} is not a group of settings; legal here: {', '.join(_fields(kind))}")
    hints, values = typing.get_type_hints(kind), {}
    for name, value in data.items():
        full = f"{key}.{name}" if key else str(name)
        if name not in hints:
            raise UserError(unknown_setting(full) or f"{full} is not a setting")
        values[name] = _value(hints[name], value, full)
    return kind(**values)


def _value(hint: Any, value: Any, key: str) -> Any:
    """One value of type `hint`, which is a dataclass, tuple[X, ...], dict[str, X], Optional[X] or a plain type."""
    if dataclasses.is_dataclass(hint):
        return _group(hint, value, key)
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{key}={value} is not a list; write {key}=[A,B]")
        return tuple(_value(typing.get_args(hint)[0], each, f"{key}[{index}]") for index, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"{key}={value} does not map names to values; write {key}={{NAME: 'VALUE'}}")
        return {_scalar(str, name, f"a name in {key}"): _value(typing.get_args(hint)[1], each, f"{key}.{name}") for name, each in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _value(next(each for each in typing.get_args(hint) if each is not type(None)), value, key)
    if isinstance(value, str) and value == MISSING:
        return value
    return _scalar(hint, value, key)


def _scalar(hint: type, value: Any, key: str) -> Any:
    if hint is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)  # also from text: YAML reads 1e-4 as a string
    elif type(value) is hint:
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise UserError(f"{key}={value} is not {names[hint]}, but {type(value).__name__}")
