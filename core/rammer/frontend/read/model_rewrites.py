"""Rewrites of a model as it is read: dense initialisers, ONNX Runtime's operators in its domain, integer class labels."""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.read import model_checks, schemas
from rammer.frontend.read.model_checks import all_graphs
from rammer.frontend.read.schemas import MICROSOFT


def dense_model(model: ModelProto) -> ModelProto:
    """Return ``model`` with dense initialisers and Constants, or ``model`` itself if nothing is sparse. Raises BadInput if
    indices exceed their extents. Functions must be inlined and shapes checked."""
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
    """Return the sparse value of a Constant, or None if it has another value."""
    constant = node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.attribute) == 1
    return next((a for a in node.attribute if a.HasField("sparse_tensor")), None) if constant else None


def _dense(sparse: SparseTensorProto) -> TensorProto:
    return numpy_helper.from_array(dense(sparse), sparse.values.name)


def dense(sparse: SparseTensorProto) -> np.ndarray:
    """Return a sparse tensor as a dense array. Raises BadInput if its indices exceed its extents."""
    shape, values = tuple(sparse.dims), numpy_helper.to_array(sparse.values)
    result = np.full(shape, "", object) if values.dtype == object else np.zeros(shape, values.dtype)
    places = numpy_helper.to_array(sparse.indices)
    try:
        # Each value has either one row-major position or one index tuple.
        at = tuple(places.T) if places.ndim == 2 else np.unravel_index(places, shape)
        if any((a < 0).any() for a in at):
            raise IndexError("negative")
        result[at] = values
    except (ValueError, IndexError) as error:
        raise BadInput(
            f"the sparse tensor {sparse.values.name!r} has indices outside its shape {list(shape)}", hint="export the model again"
        ) from error
    return result


#: Operators of ONNX's domain that ONNX Runtime supports at every opset, and those up to opset 9.
EVERYWHERE: Final = ("SimplifiedLayerNormalization", "LayerNormalization")
WITHDRAWN: Final = ("Affine", "Crop", "DynamicSlice", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh")
_LAST_OPSET: Final = 9


def placed(model: ModelProto) -> ModelProto:
    """Return ``model`` with these operators moved to ONNX Runtime's domain, or ``model`` itself without them."""
    opset = model_checks.opset_versions(model.opset_import).get("", 0)
    known = (*EVERYWHERE, *(WITHDRAWN if opset <= _LAST_OPSET else ()))
    lacking = {op for op in known if not schemas.has_schema(op, max(opset, 1), "")}
    if not any(n.op_type in lacking and not n.domain for g in model_checks.all_graphs(model) for n in g.node):
        return model
    result = ModelProto.FromString(model.SerializeToString())
    for node in (n for g in model_checks.all_graphs(result) for n in g.node if n.op_type in lacking and not n.domain):
        node.domain = MICROSOFT
    if MICROSOFT not in model_checks.opset_versions(result.opset_import):
        result.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return result


DOMAIN: Final = "ai.onnx.ml"
#: Classifier -> its attribute for integer labels.
_CLASSIFIERS: Final = {
    "TreeEnsembleClassifier": "classlabels_int64s", "LinearClassifier": "classlabels_ints", "SVMClassifier": "classlabels_ints",
}  # fmt: skip


def counted(model: ModelProto) -> ModelProto:
    """Return ``model`` with string labels of classifiers replaced by indices, or ``model`` itself without them. A LabelEncoder
    maps the indices to strings. Scores and their consumers are thus computed on the device."""
    if not any(_word_labels(n) for n in model.graph.node):
        return model
    result = ModelProto.FromString(model.SerializeToString())
    version = model_checks.opset_versions(result.opset_import).get(DOMAIN, 1)
    if version < 2:  # LabelEncoder maps integers to strings since version 2
        return model
    nodes = list[NodeProto]()
    for node in result.graph.node:
        nodes.append(node)
        words = _word_labels(node)
        if not words:
            continue
        kept = [a for a in node.attribute if a.name != "classlabels_strings"]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.append(helper.make_attribute(_CLASSIFIERS[node.op_type], list(range(len(words)))))
        if node.output[0]:
            label, node.output[0] = node.output[0], f"{node.output[0]}:place"
            keys, title = list(range(len(words))), f"{node.name or node.op_type}/labels"
            nodes.append(
                helper.make_node(
                    "LabelEncoder", [node.output[0]], [label], title, domain=DOMAIN, keys_int64s=keys, values_strings=words
                )
            )
    copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del result.graph.node[:]
    result.graph.node.extend(copies)
    return result


def _word_labels(node: NodeProto) -> list[bytes]:
    """Return the string labels of a classifier, or an empty list for other nodes."""
    if node.domain != DOMAIN or node.op_type not in _CLASSIFIERS or not node.output:
        return []
    return next((list(a.strings) for a in node.attribute if a.name == "classlabels_strings"), [])
