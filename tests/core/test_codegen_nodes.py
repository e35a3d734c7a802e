"""C text for operators from the frontend: ONNX's node tests, lowered, connected, in random tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rammer.codegen.c_target import CTarget
from rammer.codegen.dialects import C99
from rammer.errors import RammerError
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import can_lower, lower
from rammer.frontend.read.reader import read_model
from rammer.fusion.connect import connect
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.evaluate import run_graph
from rammer_testing.host_c import THREADED, HostCase, check_all
from rammer_testing.suite.nodes import node_tests

LAYERS = (
    MemoryLayer("memory", "device", 1 << 40, 1e10),
    MemoryLayer("local", "veu", 1 << 20, 1e11),
    MemoryLayer("register", "thread", 4096, 1e12),
)
DEVICE = VDevice("test", "for tests", 4, LAYERS, 1e10, 1e-6)
FAMILIES = (
    "conv_",
    "convtranspose",
    "maxpool_2d",
    "averagepool_2d",
    "globalaveragepool",
    "softmax_",
    "logsoftmax_",
    "resize_",
    "gather_",
    "gather_elements",
    "scatter_elements",
    "layer_normalization",
    "argmax",
    "reduce_mean",
    "cumsum",
    "transpose_",
    "pad",
    "tile",
    "where",
    "slice",
    "concat",
    "depthtospace",
    "instancenorm",
    "batchnorm",
    "gemm",
    "matmul",
    "einsum",
    "lstm",
    "onehot",
    "clip",
    "gelu",
    "mod_",
    "bitshift",
    "trilu",
    "lrn",
    "attention_4d",
)


def chosen(nodes: Sequence[Any], family: str, count: int = 2) -> list[Any]:
    tests = [t for t in nodes if t.name.startswith(f"test_{family}") and "expanded" not in t.name]
    return tests[:: max(1, len(tests) // count)][:count]


def cases(test: Any, rng: np.random.Generator) -> Iterator[HostCase]:
    """Yield every operator of a node test with a random tile and the reference's values as inputs."""
    ports = [i.name for i in test.model.graph.input]
    inputs = {n: np.asarray(v) for n, v in zip(ports, test.data_sets[0][0], strict=False)}
    try:
        graph = bind(read_model(test.model), {n: v.shape for n, v in inputs.items()})
    except RammerError:
        return
    if any(can_lower(graph, node) for node in graph.nodes):
        return
    compute = lower(graph)
    start = {v.name: inputs[v.external] for v in graph.inputs}
    values = run_graph(compute, {n: start[n] for n in compute.inputs})
    stored = {n: np.asarray(v).astype(compute.types[n].dtype) for n, v in values.items()}
    for operator in connect(compute, DEVICE).operators:
        tile = tuple(int(rng.integers(1, a.extent + 1)) if a.extent else 1 for a in operator.anchor.axes)
        tiled = replace(operator, tile=tile)
        if tiled.task_count <= 300 and "float16" not in {t.dtype for t in compute.types.values()}:
            yield HostCase(tiled, compute.types, {}, {n: stored[n] for n in tiled.inputs})


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", [C99, replace(C99, name="c99_scalar", vectors=()), THREADED], ids=lambda t: t.name)
def test_operators_of_onnx_node_tests(target: CTarget, rng: np.random.Generator) -> None:
    items = [c for family in FAMILIES for t in chosen(node_tests(), family) for c in cases(t, rng)]
    assert len(items) > 40
    check_all(items, target)
