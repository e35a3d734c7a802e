"""Warm starts: everything comes from the cache, and neither ONNX nor the compiler is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
sys.argv = ["rammer", "run", sys.argv[1], "--device", sys.argv[2]]
from rammer.cli.main import main
main()
heavy = ("onnx", "google.protobuf", "rammer.compiler.compiler", "rammer.frontend", "rammer.passes", "rammer.schedule")
print("imported:", *[name for name in heavy if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["toy", "rocm", "ipu_sim"])
def test_a_warm_run_imports_no_compiler(model: Path, device: str) -> None:
    for expected in ("imported: onnx google.protobuf rammer.compiler.compiler", "imported:"):
        words = [sys.executable, "-c", SCRIPT, model, device]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        last = done.stdout.splitlines()[-1]
        assert last == expected if expected == "imported:" else last.startswith(expected), last
