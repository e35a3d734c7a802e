"""Imports of a process that opens and runs a compiled file: neither the compiler nor ONNX."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

import rammer
from rammer.compiled.artifact import save_artifact
from rammer_testing.nonempty import some

CONTRACTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
(FORBIDDEN,) = (c["forbidden_modules"] for c in CONTRACTS if c["name"] == "Compiled files run without the compiler and ONNX")
#: Opens, binds and runs a file, and prints the forbidden modules that this imports.
SCRIPT = """
import sys
import numpy as np

def imported():
    return {m for m in sys.modules if any(m == name or m.startswith(f"{name}.") for name in sys.argv[3:])}

import rammer

exe = rammer.compile(sys.argv[1])
inputs = dict(np.load(sys.argv[2]))
outputs = exe.run(inputs)
widest = {p.name: np.resize(inputs[p.name], [16 if d == "n" else d for d in p.shape]) for p in exe.head.inputs}
bound = exe.bind(widest)
bound.run()
assert all(np.array_equal(bound.to_host()[name], array) for name, array in exe.run(widest).items())
exe.close()
session = rammer.InferenceSession(sys.argv[1])  # ONNX Runtime's interface needs no compiler either
assert all(np.array_equal(a, outputs[port.name]) for port, a in zip(session.get_outputs(), session.run(None, inputs)))
np.savez(sys.argv[2], **outputs)
print(*sorted(imported()))
"""
DENSE = """<ir_version: 9, opset_import: ["": 21]> dense (float[ROWS, 8] x, float[8, 4] w) => (float[ROWS, 4] y)
{ m = MatMul(x, w)  y = Relu(m) }"""
#: A determinant that the host computes.
DETERMINANT = """<ir_version: 9, opset_import: ["" : 21]> det (float[65, 65] x) => (float y) { y = Det(x) }"""


def run_in_child(text: str, span: tuple[int, int] | None, folder: Path, rng: np.random.Generator) -> set[str]:
    """Run a model's compiled file in a child process and compare the outputs. Return the packages that the run imported."""
    exe = rammer.compile(parser.parse_model(text).SerializeToString(), "toy", shapes={"n": span} if span else {})
    shapes = {p.name: tuple(d if isinstance(d, int) else 5 for d in p.shape) for p in exe.head.inputs}
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    compiled, arrays = folder / "m.rammer", folder / "arrays.npz"
    save_artifact(compiled, exe.artifact(exe.compile_whole({})))
    np.savez(arrays, **inputs)
    environment = {**os.environ, "RAMMER_DISABLE": "cuda rocm ipu_sim"}
    words = [sys.executable, "-c", SCRIPT, compiled, arrays, *FORBIDDEN]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    with np.load(arrays) as found:
        assert all(np.allclose(found[name], array, 1e-5, 1e-5) for name, array in some(exe.run(inputs).items()))
    return {name for name in FORBIDDEN if any(m == name or m.startswith(f"{name}.") for m in done.stdout.split())}


@pytest.mark.parametrize(("rows", "span"), [("16", None), ("n", (1, 16))])
def test_a_compiled_file_runs_without_compiler_and_onnx(
    rows: str, span: tuple[int, int] | None, tmp_path: Path, rng: np.random.Generator
) -> None:
    assert run_in_child(DENSE.replace("ROWS", rows), span, tmp_path, rng) == set()


def test_a_host_operator_imports_onnx(tmp_path: Path, rng: np.random.Generator) -> None:
    assert (
        {"onnx", "rammer.frontend"}
        <= run_in_child(DETERMINANT, None, tmp_path, rng)
        <= {"onnx", "google", "rammer.frontend", "rammer.jit"}
    )
