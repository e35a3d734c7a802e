"""Parameters of an ONNX model and multiply-accumulates of its ComputeGraph, in the literature's conventions."""

from __future__ import annotations

import math

import onnx

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import ComputeGraph, contraction_operands
from rammer.passes.pass_pipeline import Pipeline, default_passes

#: Initialisers excluded from all published counts: statistics that training does not learn.
_BUFFERS = {("BatchNormalization", 3), ("BatchNormalization", 4)}


def parameters(model: onnx.ModelProto) -> int:
    """Return the elements of learned tensors: float initialisers of rank 1 or more except batch norms' mean and variance."""
    buffers = {n.input[i] for n in model.graph.node for op, i in _BUFFERS if n.op_type == op}
    return sum(
        math.prod(t.dims)
        for t in model.graph.initializer
        if t.data_type == onnx.TensorProto.FLOAT and t.dims and t.name not in buffers
    )


def compute_graph(model: onnx.ModelProto) -> ComputeGraph:
    """Return the model as tensor expressions, after the passes of every compilation."""
    graph, _ = Pipeline(default_passes()).run(bind(read_model(model), {}))
    return lower(graph)


def multiply_accumulates(graph: ComputeGraph) -> int:
    """Return the products summed by contractions: a FLOP count is twice this (one multiplication and one addition each).
    Convolutions and matrix products count, as in the published figures; pooling, norms and activations do not."""
    return sum(c.points for c in graph.computes if contraction_operands(c) is not None)
