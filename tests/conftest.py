"""Shared by all tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the mark `peer` into the XML report: CI fails when a comparison with another package was skipped."""
    for item in items:
        if item.get_closest_marker("peer"):
            item.user_properties.append(("peer", True))
