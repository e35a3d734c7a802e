"""Graphs for the tests of passes, and the comparison of their values in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rammer.frontend.bind.binder import bind
from rammer.frontend.read.node_protos import node_proto, type_proto
from rammer.frontend.read.reader import read_model
from rammer.ir.graph import Graph, Value, verify_graph
from rammer_testing import models as zoo
from rammer_testing.nonempty import some

#: Inputs of a BatchNormalization whose constants come from :func:`norm`.
NORM = ["s", "b", "m", "v"]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def norm(rng: np.random.Generator, channels: int, prefix: str = "") -> dict[str, np.ndarray]:
    """Draw scale, bias, mean and variance of a batch normalisation."""
    return {f"{prefix}{n}": normal(rng, channels) for n in "sbm"} | {f"{prefix}v": np.abs(normal(rng, channels)) + 0.1}


def graph_of(
    nodes: list[onnx.NodeProto],
    shape: tuple[int, ...],
    constants: dict[str, np.ndarray] | None = None,
    outputs: tuple[str, ...] = ("y",),
) -> Graph:
    """Make a graph with the input x from unchanged operators."""
    weights = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name=o) for o in outputs], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bind(read_model(proto), {}, {("", n.op_type) for n in nodes})


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


def to_model(graph: Graph) -> onnx.ModelProto:
    """Convert ``graph`` to an ONNX model with the Graph's names."""

    def port(value: Value) -> onnx.ValueInfoProto:
        return onnx.ValueInfoProto(name=value.name, type=type_proto(np.dtype(value.type.dtype), value.type.shape))

    weights = [numpy_helper.from_array(a, n) for n, a in graph.constants.items()]
    proto = helper.make_graph(
        [node_proto(n) for n in graph.nodes],
        graph.name,
        [port(v) for v in graph.inputs],
        [port(v) for v in graph.outputs],
        weights,
    )
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", graph.opset)], ir_version=10)


def agree(rng: np.random.Generator, before: Graph, after: Graph, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Check equal results of both in ONNX Runtime (the reference evaluator's ConvTranspose has no groups)."""
    verify_graph(after)
    assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
    feeds = {v.name: normal(rng, *v.type.shape) for v in before.inputs}
    want, have = (zoo.forward(to_model(g), feeds) for g in (before, after))
    for name, value in some(want.items()):
        assert np.isfinite(value).all()
        np.testing.assert_allclose(have[name], value, rtol=rtol, atol=atol)
