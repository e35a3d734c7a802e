"""Sparse tensors of a file, made dense at the door: ONNX's converter and inference do not see a sparse initialiser."""

from __future__ import annotations

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.checks import all_graphs


def dense_model(model: ModelProto) -> ModelProto:
    """``model`` with its sparse initialisers among the others, and with dense values in Constants: itself, if it has neither.

    BadInput where indices do not fit their extents. Functions are inlined, and shapes checked.
    """
    if not any(graph.sparse_initializer or any(map(_held, graph.node)) for graph in all_graphs(model)):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for graph in all_graphs(result):
        graph.initializer.extend(_dense(sparse) for sparse in graph.sparse_initializer)
        del graph.sparse_initializer[:]
        for held in filter(None, map(_held, graph.node)):
            held.t.CopyFrom(_dense(held.sparse_tensor))
            held.name, held.type = "value", AttributeProto.TENSOR
            held.ClearField("sparse_tensor")
    return result


def _held(node: NodeProto) -> AttributeProto | None:
    """The sparse value of a Constant, which has no other."""
    constant = node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.attribute) == 1
    return next((a for a in node.attribute if a.HasField("sparse_tensor")), None) if constant else None


def _dense(sparse: SparseTensorProto) -> TensorProto:
    return numpy_helper.from_array(dense(sparse), sparse.values.name)


def dense(sparse: SparseTensorProto) -> np.ndarray:
    """A sparse tensor with its zeros. BadInput where its indices do not fit its extents."""
    shape, values = tuple(sparse.dims), numpy_helper.to_array(sparse.values)
    result = np.full(shape, "", object) if values.dtype == object else np.zeros(shape, values.dtype)
    places = numpy_helper.to_array(sparse.indices)
    try:
        # Either one row-major position a value, or one index tuple.
        at = tuple(places.T) if places.ndim == 2 else np.unravel_index(places, shape)
        if any((a < 0).any() for a in at):
            raise IndexError("negative")
        result[at] = values
    except (ValueError, IndexError) as error:
        raise BadInput(
            f"the sparse tensor {sparse.values.name!r} has indices outside its shape {list(shape)}", hint="export the model again"
        ) from error
    return result
