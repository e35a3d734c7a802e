"""What ends the process inside ONNX's own inference, put out of its sight before it looks.

ONNX infers the bounds of a Slice by ``std::clamp``, whose assertion fails where the extent is negative. An extent may be
declared so (old exporters write -1 for any extent), or be inferred so (a window larger than its image), long before anybody
here has looked at the shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from onnx import GraphProto, ModelProto, TensorProto, TypeProto, helper

from rammer.frontend import checks

#: Names of what stands for the starts of a Slice.
_VEIL: Final = "rammer.starts"


def open_extents(model: ModelProto) -> ModelProto:
    """The model where negative extents of declared shapes are unknown: itself, if there are none."""
    if not any(d.dim_value < 0 for graph in checks.all_graphs(model) for d in _extents(graph)):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for graph in checks.all_graphs(result):
        for extent in _extents(graph):
            if extent.dim_value < 0:
                extent.Clear()
    return result


def _extents(graph: GraphProto) -> Iterator[Any]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from _inside(value.type)


def _inside(kind: TypeProto) -> Iterator[Any]:
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        yield from getattr(kind, which).shape.dim
    elif which in ("sequence_type", "optional_type"):
        yield from _inside(getattr(kind, which).elem_type)


def veil(model: ModelProto) -> dict[str, str]:
    """Make the starts of every Slice since opset 10 inputs of ``model``, so that nobody infers its bounds; a copy is meant.
    Returns what ``unveil`` needs: the new names, each with the one that it stands for."""
    graphs = list(checks.all_graphs(model))
    slices = [n for g in graphs for n in g.node if n.op_type == "Slice" and n.domain in ("", "ai.onnx")
              and len(n.input) > 2 and n.input[1]]  # fmt: skip
    if not slices:
        return {}
    prefix, taken = _VEIL, {name for g in graphs for name in _names(g)}
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    result = dict[str, str]()
    for number, node in enumerate(slices):
        name = f"{prefix}{number}"
        result[name], node.input[1] = node.input[1], name
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, [None]))
    return result


def unveil(model: ModelProto, names: dict[str, str]) -> None:
    """Undo ``veil`` in what a tool made of the model."""
    if not names:
        return
    kept = [v for v in model.graph.input if v.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for node in (n for g in checks.all_graphs(model) for n in g.node if n.op_type == "Slice" and len(n.input) > 1):
        node.input[1] = names.get(node.input[1], node.input[1])


def _names(graph: GraphProto) -> Iterable[str]:
    yield from (v.name for v in (*graph.input, *graph.initializer))
    for node in graph.node:
        yield from node.output
