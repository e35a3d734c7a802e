"""Damaged models, compiled files, kernel stores and kept programs end in a clear error or a right run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: A sample for every run of the tests, and 500 in all for `make test-all`.
SAMPLE = {"model": 60, "compiled": 30, "store": 4, "kept": 6, "head": 2}
ALL = {"model": 320, "compiled": 120, "store": 20, "kept": 40, "head": 10}


@pytest.mark.parametrize(("kind", "count"), [*SAMPLE.items(), *(pytest.param(*i, marks=pytest.mark.large) for i in ALL.items())])
def test_mutants(tmp_path: Path, kind: str, count: int) -> None:
    # A process of its own: what this one has mapped counts against the children's memory, and it may have threads.
    words = [sys.executable, "-m", "rammer.testing.mutants", "--kind", kind, "--option", "tiles=8", "--count", str(count),
             "--seed", "20", "--keep", str(tmp_path / "kept")]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} mutants, " in done.stdout
