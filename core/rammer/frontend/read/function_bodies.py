"""Expansion of ONNX function operators: the body of one node, with its attributes filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TypeProto, defs

from rammer.frontend.read import schemas
from rammer.frontend.read.model_checks import opset_versions
from rammer.ir.names import shorten_name


@dataclass(frozen=True)
class Expansion:
    """The nodes that replace a function node, with inputs and outputs in order. Node names are local to the body."""

    nodes: tuple[NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opsets: Mapping[str, int]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)

    def titles(self, node: NodeProto, given: Mapping[str, str]) -> dict[str, str]:
        """Return a title for each result of the body. An output has its name in ``node``, or the name that ``given`` maps it to.
        All others are prefixed with the node's title."""
        title = shorten_name(node.name) or node.op_type
        titles = {name: f"{title}_{name}" for inner in self.nodes for name in inner.output}
        titles |= {name: f"{title}_{name}" for name in self.constants}
        return titles | {formal: given.get(n, n) for formal, n in zip(self.outputs, node.output, strict=False) if n}

    def local(self, node: NodeProto) -> list[NodeProto]:
        """Return the body's nodes under unique names; optional inputs that ``node`` omits are ``""``."""
        title = shorten_name(node.name) or node.op_type
        absent = set(self.inputs) - {f for f, n in zip(self.inputs, node.input, strict=False) if n}
        return [
            _make_local_node(inner, f"{title}/{inner.name or inner.op_type}_{i}", absent) for i, inner in enumerate(self.nodes)
        ]


def _make_local_node(node: NodeProto, title: str, absent: set[str]) -> NodeProto:
    result = NodeProto()
    result.CopyFrom(node)
    result.name = title
    del result.input[:]
    result.input.extend("" if n in absent else n for n in node.input)
    return result


def with_defaults(model: ModelProto) -> ModelProto:
    """Return ``model`` with default attributes added to all calls of its functions. ONNX's inliner ignores these defaults.
    Returns ``model`` itself if its functions have no default attributes."""
    given = {(f.domain, f.name, f.overload): f.attribute_proto for f in model.functions if f.attribute_proto}
    if not given:
        return model
    result = ModelProto()
    result.CopyFrom(model)
    waiting: list[Iterable[NodeProto]] = [result.graph.node, *(f.node for f in result.functions)]
    while waiting:
        for node in waiting.pop():
            named = {a.name for a in node.attribute}
            waiting += [g.node for a in node.attribute for g in (a.g, *a.graphs) if g.node]
            node.attribute.extend(d for d in given.get((node.domain, node.op_type, node.overload), ()) if d.name not in named)
    return result


def has_function(schema: defs.OpSchema) -> bool:
    """Return True if ONNX defines the operator by a function body."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def expand_function(node: NodeProto, types: Mapping[str, TypeProto], opset: int) -> Expansion | None:
    """Return the body of ``node`` at ``opset`` of its domain, or None if ONNX defines none for these types. ``types`` maps every
    input name to its type."""
    schema = schemas.get_schema(node.op_type, opset, node.domain)
    body = _context_body(schema, node, types, opset) or _plain_body(schema, opset)
    if body is None:
        return None
    given = {a.name: a for a in node.attribute}
    for name, declared in schema.attributes.items():
        if name not in given and declared.default_value.type != AttributeProto.UNDEFINED:
            given[name] = declared.default_value
    nodes = tuple(_fill_attributes(n, given) for n in body.node)
    opsets = {node.domain: opset, **opset_versions(body.opset_import)}
    return Expansion(nodes, tuple(body.input), tuple(body.output), opsets)


def _plain_body(schema: defs.OpSchema, opset: int) -> FunctionProto | None:
    versions = [v for v in schema.function_opset_versions if v <= opset]
    if not versions:
        return None
    data = schema.get_function_with_opset_version(max(versions))
    return FunctionProto.FromString(data) if data else None


def _context_body(schema: defs.OpSchema, node: NodeProto, types: Mapping[str, TypeProto], opset: int) -> FunctionProto | None:
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    if not versions:
        return None
    inputs = [types[n].SerializeToString() if n else b"" for n in node.input]
    data = schema.get_context_dependent_function_with_opset_version(max(versions), node.SerializeToString(), inputs)
    return FunctionProto.FromString(data) if data else None


def _fill_attributes(node: NodeProto, given: Mapping[str, AttributeProto]) -> NodeProto:
    """Return ``node`` with references to function attributes replaced by the caller's values, sub-graphs included."""
    result = NodeProto()
    result.CopyFrom(node)
    del result.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            # If the caller omits the attribute, the inner operator uses its default.
            if attribute.ref_attr_name in given:
                result.attribute.append(given[attribute.ref_attr_name])
                result.attribute[-1].name = attribute.name
            continue
        result.attribute.append(attribute)
        for graph in (result.attribute[-1].g, *result.attribute[-1].graphs):
            inner = [_fill_attributes(n, given) for n in graph.node]
            if inner:
                del graph.node[:]
                graph.node.extend(inner)
    return result
