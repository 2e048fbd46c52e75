"""Reading the fields of a config.json one by one, so that nothing in it is passed over in silence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from megadcp.config.check import UserError

REQUIRED = object()
LARGEST = 2**31 - 1


class Fields:
    """A JSON object of which every field has to be asked for, or named as one without effect, before `done` is called."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self._seen: set[str] = set()

    def fail(self, message: str) -> UserError:
        """The error to raise, with the file in front."""
        return UserError(f"{self.where}: {message}")

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """The value as it stands; null counts as absent."""
        self._seen.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.fail(f"{name} is missing; it has no default that could be relied on")
        return default

    def whole(self, name: str, default: Any = REQUIRED) -> Any:
        """A whole number from 1 on."""
        value = self.get(name, default)
        if value is default:
            return value
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise self.fail(f"{name}={value!r} is no size; legal here: whole numbers from 1 on")
        return value

    def number(self, name: str, default: Any = REQUIRED, least: float = 0.0) -> Any:
        """A finite number of at least `least`."""
        value = self.get(name, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not math.isfinite(value) or value < least:
            raise self.fail(f"{name}={value!r} is not legal; legal here: numbers of {least:g} and above")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        """True or false."""
        value = self.get(name, default)
        if type(value) is not bool:
            raise self.fail(f"{name}={value!r} is neither true nor false")
        return value

    def only(self, name: str, legal: Any, why: str) -> None:
        """Refuse any value but `legal` or an absent one."""
        value = self.get(name, legal)
        if value != legal or isinstance(value, bool) != isinstance(legal, bool):
            raise self.fail(f"{name}={value!r} is not supported ({why}); legal here: {legal!r}")

    def without_effect(self, names: Iterable[str]) -> None:
        """These may be there, whatever they say."""
        self._seen |= set(names)

    def done(self, ignored: Iterable[str] = ()) -> None:
        """UserError naming every field that nobody asked for, those in `ignored` excepted."""
        left = sorted(set(self.values) - self._seen - set(ignored))
        if left:
            shown = ", ".join(f"{name}={short(self.values[name])}" for name in left)
            raise self.fail(
                f"fields that this program does not know, so their effect on the model is unknown: {shown}; where there is none, "
                "tools/convert_checkpoint.py from-hf takes --ignore FIELD"
            )


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
