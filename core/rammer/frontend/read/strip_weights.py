"""Removal of weights from a model, for tools that copy whole models but read only small tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from rammer.frontend.read import model_checks

#: Maximum elements of a tensor that an outline includes: axes, shapes and scales are far smaller.
LARGEST: Final = 1024
#: Name prefix of detached attribute tensors; initialisers keep their names.
_ATTRIBUTE: Final = "rammer.detached."


def detach_tensors(model: ModelProto) -> tuple[ModelProto, dict[str, TensorProto]]:
    """Return (outline, detached): ``model`` without the values of large tensors, and these tensors by name.

    In the outline, a tensor of more than ``LARGEST`` elements has only name, type and shape. ``model`` is not changed, and large
    tensors are not copied. An initialiser stays whole if another graph of the model uses its name."""
    names = Counter(t.name for graph in model_checks.all_graphs(model) for t in graph.initializer)
    outline = _Outline({name for name, count in names.items() if count == 1})
    result = ModelProto()
    _merge_fields(result, model, but="graph")
    outline.graph(result.graph, model.graph)
    return result, outline.detached


def attach_tensors(model: ModelProto, detached: Mapping[str, TensorProto]) -> None:
    """Restore the values of tensors in an outline or in a converted outline."""
    for tensor in _iter_tensors(model):
        if tensor.name in detached:
            tensor.CopyFrom(detached[tensor.name])


class _Outline:
    def __init__(self, unique: set[str]) -> None:
        self.unique = unique
        self.detached: dict[str, TensorProto] = {}

    def graph(self, target: GraphProto, source: GraphProto) -> None:
        _merge_fields(target, source, but=("node", "initializer"))
        for tensor in source.initializer:
            self.tensor(target.initializer.add(), tensor, tensor.name if tensor.name in self.unique else "")
        for node in source.node:
            self.node(target.node.add(), node)

    def node(self, target: NodeProto, source: NodeProto) -> None:
        _merge_fields(target, source, but="attribute")
        for attribute in source.attribute:
            copy = target.attribute.add()
            _merge_fields(copy, attribute, but=("t", "tensors", "g", "graphs"))
            if attribute.type == AttributeProto.TENSOR:
                self.tensor(copy.t, attribute.t, f"{_ATTRIBUTE}{len(self.detached)}")
            if attribute.type == AttributeProto.GRAPH:
                self.graph(copy.g, attribute.g)
            for tensor in attribute.tensors:
                self.tensor(copy.tensors.add(), tensor, f"{_ATTRIBUTE}{len(self.detached)}")
            for graph in attribute.graphs:
                self.graph(copy.graphs.add(), graph)

    def tensor(self, target: TensorProto, source: TensorProto, name: str) -> None:
        """Copy ``source``, or replace it by a reference under ``name`` if it is large ("": always copy)."""
        if not name or math.prod(source.dims) <= LARGEST:
            target.CopyFrom(source)
            return
        target.name, target.data_type = name, source.data_type
        target.dims.extend(source.dims)
        # Marked as external, so that tools do not read the tensor as empty.
        target.data_location = TensorProto.EXTERNAL
        target.external_data.add(key="location", value=name)
        self.detached[name] = source


def _merge_fields(target: Any, source: Any, but: str | tuple[str, ...]) -> None:
    """Copy all fields of a protobuf message except the named fields."""
    left_out = (but,) if isinstance(but, str) else but
    for field, value in source.ListFields():
        if field.name in left_out:
            continue
        if isinstance(value, (int, float, str, bytes)):
            setattr(target, field.name, value)
        else:
            getattr(target, field.name).MergeFrom(value)


def _iter_tensors(model: ModelProto) -> Iterator[TensorProto]:
    for graph in model_checks.all_graphs(model):
        yield from graph.initializer
        for attribute in (a for node in graph.node for a in node.attribute):
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
