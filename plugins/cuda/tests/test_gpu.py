"""The cuda plugin on a GPU: `pytest -m cuda`."""

from __future__ import annotations

import numpy as np
import pytest

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.evaluate import run_graph
from rammer.ir.program import Port
from rammer.jit.self_test import tiny_graph
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.accuracy import AccuracyCase, cases, model_error

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("policy", ["sequential", "greedy", "wavefront", "ios"])
@pytest.mark.parametrize("tune", ["off", "quick"])
def test_a_thousand_fresh_runs_equal_the_reference(policy: str, tune: str, rng: np.random.Generator) -> None:
    from rammer_cuda.backend import open_backend

    graph = tiny_graph(int(rng.integers(1 << 30)))
    backend = open_backend(OpenOptions())
    compiler = Compiler(backend, CompileOptions(policy, tune), KernelStore(None))
    segment = compiler.program(graph, (Port("x", "x"),), (Port("y", "y"),))
    loaded = backend.load(segment.program, segment.constants)
    for _ in range(1000):
        x = rng.standard_normal((5, 9, 10)).astype(np.float32)
        have, want = loaded.run({"x": x}).outputs["y"], run_graph(graph, {"x": x})["y"]
        assert np.linalg.norm(have - want) <= 1e-5 * np.linalg.norm(want)
    loaded.close()


@pytest.mark.alone
def test_profiler_measures() -> None:
    from rammer_cuda.backend import open_backend

    backend = open_backend(OpenOptions())
    compiler = Compiler(backend, CompileOptions(), KernelStore(None))
    segment = compiler.program(tiny_graph(1), (Port("x", "x"),), (Port("y", "y"),))
    binding = Binding(segment.program.types, segment.program.storage)
    kernel = backend.kernel(segment.program.operators[0], binding)
    alone, crowded = backend.profiler.task_time(kernel, binding)
    assert 0 < alone <= crowded < 1e-3
    assert backend.profiler.program_time(segment.program, segment.constants) > 0
    assert backend.profiler.resources(kernel, binding).registers > 0


@pytest.mark.parametrize("case", cases(), ids=str)
def test_model_agrees_with_onnxruntime(case: AccuracyCase, seed: int) -> None:
    result = model_error(case, "cuda", seed)
    assert result.good, f"relative L2 error {result.error:.2e} with seed {seed}"
