"""Damaged models, compiled files, kernel stores and cached programs: each ends in a clear error or a right run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Mutants of all kinds, interleaved in one process, which opens the device once. `make search` runs 500.
COUNT = 5


@pytest.mark.slow
def test_mutants(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    # A separate process: this one's mappings count against the children's memory, and it may have threads.
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
