"""Shared by all tests."""

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "dist"))  # `from ranks import run_ranks` in any test

STDERR = pytest.StashKey[int]()
LIMIT_SECONDS = 120


def pytest_configure(config: pytest.Config) -> None:
    """Keep the stderr that a person sees: inside a test it is captured."""
    config.stash[STDERR] = os.dup(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the mark `peer` into the XML report: CI fails when a comparison with another package was skipped."""
    for item in items:
        if item.get_closest_marker("peer"):
            item.user_properties.append(("peer", True))


@pytest.fixture
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests of several processes: one that hangs shows the stacks of all threads and ends the run."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=request.config.stash[STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()
