"""Rounding of float16 results that a kernel reads in place: as if they were stored, in every family."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from rammer.device.manifest import Binding
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.evaluate import run_graph
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType

from .cuda_on_host import MOST_THREADS, HostSearch, on_host
from .emulator.launch import COMPILER, HostKernel, run_on_host
from rammer_cuda.source import task_kernel

#: A product, and the squares of rows, whose results exceed 65504 before a map reduces some of them.
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "product": (
        "p: f16[m:32, n:32] = sum[k:32] a[m, k] * b[k, n]",
        "s: f16[m:32, n:32] = p[m, n] * 0.0078125",
        "y: f16[m:32, n:32] = s[m, n] + r[m, n]",
    ),
    "rows": (
        "q: f16[m:32, n:32] = r[m, n] * r[m, n]",
        "t: f16[m:32] = max[n:32] q[m, n]",
        "u: f16[m:32, n:32] = q[m, n] - t[m]",
        "y: f16[m:32, n:32] = max(u[m, n], -7.0) + r[m, n]",
    ),
}


def operator_of(lines: tuple[str, ...]) -> tuple[ROperator, Binding]:
    """Return the lines as one untiled operator of connected Computes."""
    computes = [Compute.parse(line) for line in lines]
    names = {c.name for c in computes}
    links = tuple(Connection(n, c.name, "thread") for c in computes for n in c.reads if n in names)
    operator = ROperator("y", tuple(computes), links, ("y",))
    types = {n: TensorType("float16", (32, 32)) for n in operator.inputs} | {c.name: c.type for c in computes}
    return operator, Binding(types, {n: dense(n, f"b_{n}", types[n].shape) for n in (*operator.inputs, "y")})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not here")
@pytest.mark.parametrize("name", list(OPERATORS))
def test_results_read_in_place_are_rounded(name: str, rng: np.random.Generator) -> None:
    operator, binding = operator_of(OPERATORS[name])
    given = {
        "a": rng.integers(-200, 200, (32, 32)),
        "b": rng.integers(-200, 200, (32, 32)),
        "r": rng.standard_normal((32, 32)) * 200,
    }
    values = {n: given[n].astype(np.float16) for n in operator.inputs}
    graph = ComputeGraph("g", tuple(values), ("y",), operator.computes, binding.types)
    want = run_graph(graph, values, precise=False)["y"]
    assert np.isinf(run_graph(graph, values, precise=False)[operator.computes[0].name]).any()
    search, tried = HostSearch("sm_90a"), set[str]()
    for tiled in search.backend.all_candidates(operator, binding):
        kernel = task_kernel(tiled, binding)
        if tiled.family in tried or not search.backend.fits(tiled, binding) or kernel.blocks > 1 or kernel.threads > MOST_THREADS:
            continue
        tried.add(tiled.family)
        host = HostKernel.of(kernel, binding, values, on_host(kernel), tiled.task_count)
        np.testing.assert_array_equal(run_on_host(host, values)["y"], want, err_msg=f"family {tiled.family}")
    assert len(tried) >= 2, tried
