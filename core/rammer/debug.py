"""The debug ladder, ``RAMMER_DEBUG=1..4``: each level adds to the one before, all on stderr. 1: each compile step with its
seconds; 2: tracebacks of expected errors; 3: changes by passes and attempted connections; 4: the text of every program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rammer.ir.untrusted_json import whole_number

STEPS, TRACEBACKS, DECISIONS, PROGRAMS = 1, 2, 3, 4


def debug_level() -> int:
    """Return the requested level; anything but a number counts as 0."""
    return whole_number(os.environ.get("RAMMER_DEBUG", "0")) or 0


def print_debug(least: int, text: Callable[[], str]) -> None:
    """Print ``text()`` at level ``least`` and above; it is not built below."""
    if debug_level() >= least:
        sys.stderr.write(f"rammer[{least}] {text()}\n")  # one write: print would let other threads in before the end of line
