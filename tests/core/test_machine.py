"""The pytest plugin for shared and incomplete machines, tested in separate pytest runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, time
import pytest
from rammer_testing.models import ModelUnavailable
from rammer_testing.peer_process import PeerCrashed

def spent(seconds):
    start = time.monotonic()
    time.sleep(seconds)
    with open("spans", "a") as file:
        file.write(f"{os.environ['PYTEST_CURRENT_TEST'].split('::')[1].split()[0]} {start} {time.monotonic()}\\n")

@pytest.mark.parametrize("n", range(12))
def test_beside(n):
    spent(0.1)

@pytest.mark.alone
@pytest.mark.parametrize("n", range(3))
def test_alone(n):
    spent(0.1)

@pytest.fixture
def model():
    raise ModelUnavailable("model 'x'", "no network", "fetch it")

def test_needs_a_model(model):
    pass

def test_reference_crashes():
    raise PeerCrashed("ONNX Runtime's process was ended by SIGFPE: there is no reference")
"""


def run(folder: Path, *words: str, **environment: str) -> str:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    known = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST", "RAMMER_MODELS"))}
    command = [sys.executable, "-m", "pytest", "-p", "rammer_testing.machine", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, env=known | environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_timing_tests_run_alone(tmp_path: Path) -> None:
    told = run(tmp_path, "-n", "3", "-k", "beside or alone")
    assert "15 passed" in told, told
    spans = [(n, float(a), float(b)) for n, a, b in (line.split() for line in (tmp_path / "spans").read_text().splitlines())]
    together = [(a, b) for a in spans for b in spans if a < b and max(a[1], b[1]) < min(a[2], b[2])]
    assert together, "no two tests ran beside each other, so this says nothing"
    assert not [pair for pair in together if any("alone" in name for name, *_ in pair)]


@pytest.mark.slow
def test_missing_models_are_counted_where_the_folder_is_given(tmp_path: Path) -> None:
    told = run(tmp_path, "-k", "model", RAMMER_MODELS=str(tmp_path))
    assert re.search("1 tests skipped, whose models are not in RAMMER_MODELS: model 'x' .1.", told) and "1 skipped" in told, told
    assert "1 error" in run(tmp_path, "-k", "model")


@pytest.mark.slow
def test_crashed_references_skip_their_test(tmp_path: Path) -> None:
    told = run(tmp_path, "-k", "crashes", "-rs")
    assert "1 skipped" in told and "SIGFPE" in told and "failed" not in told, told
