"""The debug ladder, ``RAMMER_DEBUG=1..4``: each level adds to the one before, all on stderr.

1 each compile step with its seconds; 2 tracebacks of expected errors; 3 what passes changed and which
connections were tried; 4 the text of every program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rammer.ir.untrusted_json import whole_number

STEPS, TRACEBACKS, DECISIONS, PROGRAMS = 1, 2, 3, 4


def debug_level() -> int:
    """The level asked for; anything that is no number counts as 0."""
    return whole_number(os.environ.get("RAMMER_DEBUG", "0")) or 0


def print_debug(least: int, text: Callable[[], str]) -> None:
    """Print ``text()`` at ``least`` and above; it is not built below."""
    if debug_level() >= least:
        sys.stderr.write(f"rammer[{least}] {text()}\n")  # at once: print would let other threads in before the end of line
