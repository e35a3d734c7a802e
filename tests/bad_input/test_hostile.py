"""Hostile and careless models: a clear error or a run within 20 s and 2 GiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile_models
import pytest


@pytest.mark.slow
def test_hostile_models(tmp_path: Path) -> None:
    # A separate process: this process's mapped memory would count against the children's limit.
    words = [sys.executable, hostile_models.__file__, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr
    found = {name: (code, err, fault) for name, code, err, fault, _ in map(json.loads, done.stdout.splitlines())}
    assert set(found) == set(hostile_models.CASES)
    wrong = []
    for name, (code, err, fault) in found.items():
        _, want, said = hostile_models.CASES[name]
        if fault or code != want or said not in err:
            wrong.append(f"{name}: {fault or code}, {err.splitlines()[:1]}; wanted {want}, {said!r}")
    assert not wrong, "\n".join(wrong)
