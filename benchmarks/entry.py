"""What every benchmark's command line does with an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rammer.errors import RammerError


def run(main: Callable[[], object]) -> None:
    """Call ``main``. What users can cause is one message on stderr, with the exit codes of ``rammer``, and no traceback."""
    try:
        main()
    except RammerError as problem:
        print(f"{Path(sys.argv[0]).stem}: error: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
