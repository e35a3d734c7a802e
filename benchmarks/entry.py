"""Error handling shared by the command lines of all benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rammer.errors import RammerError


def run(main: Callable[[], object]) -> None:
    """Call ``main``. Report user errors as one message on stderr with the exit codes of ``rammer``, without a traceback."""
    try:
        main()
    except RammerError as problem:
        print(f"{Path(sys.argv[0]).stem}: error: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
