"""A self-test on the device: a tiny contraction with a padded window and an epilogue, compared with float64."""

from __future__ import annotations

import numpy as np

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Backend
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.evaluate import run_graph
from rammer.ir.program import Port
from rammer.tuning.kernel_store import KernelStore

LINES = (
    "conv: f32[m:12, h:9, w:10] = sum[c:5, i:3, j:3] pad(x[c, h + i - 1, w + j - 1], 0.0) * k[m, c, i, j]",
    "y: f32[m:12, h:9, w:10] = max(conv[m, h, w] + b[m], 0.0)",
)


def tiny_graph(seed: int) -> ComputeGraph:
    """Return convolution, bias and ReLU on 5x9x10 with new random weights."""
    rng = np.random.default_rng(seed)
    computes = tuple(Compute.parse(line) for line in LINES)
    constants = {"k": rng.standard_normal((12, 5, 3, 3)).astype(np.float32), "b": rng.standard_normal(12).astype(np.float32)}
    from rammer.ir.types import TensorType

    types = {"x": TensorType("float32", (5, 9, 10)), **{c.name: c.type for c in computes}}
    types |= {n: TensorType(str(v.dtype), v.shape) for n, v in constants.items()}
    return ComputeGraph("selftest", ("x",), ("y",), computes, types, constants)


def self_test(backend: Backend) -> str:
    """Return ``ok (error 1e-7)`` or ``FAILED (...)`` from one run on ``backend`` with new inputs."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    graph = tiny_graph(seed)
    compiler = Compiler(backend, CompileOptions("sequential"), KernelStore(None))
    segment = compiler.program(graph, (Port("x", "x"),), (Port("y", "y"),))
    x = np.random.default_rng(seed + 1).standard_normal((5, 9, 10)).astype(np.float32)
    loaded = backend.load(segment.program, segment.constants)
    try:
        have = loaded.run({"x": x}).outputs["y"]
    finally:
        loaded.close()
    want = run_graph(graph, {"x": x})["y"]
    error = float(np.linalg.norm(have - want) / np.linalg.norm(want))
    return f"ok (error {error:.1e})" if error <= 1e-5 else f"FAILED (error {error:.1e}, seed {seed})"
