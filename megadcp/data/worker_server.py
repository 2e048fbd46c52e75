"""The process that workers are forked from. It has imported what they need and nothing else, and runs no threads of this program.

So a worker is ready in milliseconds, whatever the parent has loaded. Light to import: it can be started before anything else.
"""

from __future__ import annotations

import multiprocessing
from typing import Any


def context() -> Any:
    """forkserver, with a worker's imports done once for all; spawn where the system has no forkserver."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["megadcp.data.preprocess_worker", "sentencepiece"])
    return found


def warm_up() -> None:
    """Start the server now, so that it does its imports while this process does its own."""
    if context().get_start_method() == "forkserver":
        from multiprocessing import forkserver

        forkserver.ensure_running()
