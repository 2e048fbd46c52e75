"""Planners that a planning process is given in tests; it imports this module by name."""

import ctypes
import os
import sys
import time

from megadcp.config.check import UserError
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import PlanFormatError

BUSY, UNPICKLABLE, EXIT, CRASH, NOISE, MODULES, ODD = range(1, 8)  # what to do for a step of one document with this length


class Odd(Exception):
    """Can't be built again from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Local(RuntimeError):
    """Holds something that can't be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.held = lambda: None


def behaving(config):
    """The run's planner, but single short documents make it do things."""
    planner = planner_for(config)

    def plan(step, lengths):
        what = lengths[0] if len(lengths) == 1 else 0
        if what == BUSY:
            time.sleep(3600)
        elif what == UNPICKLABLE:
            raise Local(f"no plan for step {step}")
        elif what == ODD:
            raise Odd("this", "that")
        elif what == EXIT:
            print("going home", file=sys.stderr)
            sys.exit(3)
        elif what == CRASH:
            ctypes.string_at(0)
        elif what == NOISE:
            print("a warning of a library")
        elif what == MODULES:
            raise LookupError(",".join(sorted(sys.modules)) + f";{os.getpid()}")
        return planner(step, lengths)

    return plan


def special_user_error(config):
    def plan(step, lengths):
        raise PlanFormatError(f"step {step}: no") if step % 2 else UserError(f"step {step}: no")

    return plan


def refusing(config):
    raise UserError("this run can't be planned; legal here: another")


def broken(config):
    raise ZeroDivisionError("the planner can't be built")
