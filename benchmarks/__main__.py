"""The command line for all tables: ``python -m benchmarks TABLE --device rocm --models alexnet --out results``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "core")]

from entry import run  # noqa: E402
from tables_command import main  # noqa: E402 - the folder is no package: its modules find each other by path

if __name__ == "__main__":
    run(lambda: main(prog_name="python -m benchmarks"))
