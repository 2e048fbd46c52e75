"""Checks of a whole config: what one field's type can't say. Standard library only; every message names keys, values and a way out."""

from __future__ import annotations

from megadcp.config.schema import Config


class UserError(ValueError):
    """What was asked can't be done; the message is one line that says what is wrong and what would work."""


def check(config: Config) -> None:
    """Refuse a config that contradicts itself."""
