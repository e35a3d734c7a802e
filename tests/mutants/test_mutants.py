"""Damaged models, compiled files, kernel stores and kept programs end in a clear error or a right run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: All kinds by turns in one process, which opens the device once; `make search` runs 500.
COUNT = 5


@pytest.mark.slow
def test_mutants(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    # A process of its own: what this one has mapped counts against the children's memory, and it may have threads.
    words = [
        sys.executable,
        "-m",
        "rammer_testing.mutants",
        "--option",
        "tiles=8",
        "--count",
        str(COUNT),
        "--seed",
        str(pytestconfig.getoption("--seed")),
        "--keep",
        str(tmp_path / "kept"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{COUNT} mutants, " in done.stdout
