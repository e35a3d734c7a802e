"""Checks of a model file as it is read: each problem is a BadInput with a hint."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, defs, helper

from rammer.device.custom_operators import CustomOperators
from rammer.errors import BadInput
from rammer.frontend.read import limits, plugin_operators, schemas
from rammer.frontend.read.node_protos import element_type, node_title
from rammer.frontend.read.proto_checks import check_node, check_strings
from rammer.frontend.read.wire_format import Bytes, read_varint
from rammer.ir.port import ON_HOST
from rammer.ir.types import KNOWN

#: Field number -> (name, wire type) of ModelProto (onnx.proto); wire type 0 is a varint, 2 is length-delimited.
_MODEL_FIELDS: Final = {
    1: ("ir_version", 0),
    2: ("producer_name", 2),
    3: ("producer_version", 2),
    4: ("domain", 2),
    5: ("model_version", 0),
    6: ("doc_string", 2),
    7: ("graph", 2),
    8: ("opset_import", 2),
    14: ("metadata_props", 2),
    20: ("training_info", 2),
    25: ("functions", 2),
    26: ("configuration", 2),
}


#: Newest opset by domain that the installed package onnx supports.
_NEWEST: Final = {"": max(row[2] for row in helper.VERSION_TABLE), "ai.onnx.ml": max(row[3] for row in helper.VERSION_TABLE)}
#: The domain of two tree operators that are withdrawn but still widely exported.
ML: Final = "ai.onnx.ml"


def parse_model(data: Bytes, where: str, whole: Bytes | None = None) -> ModelProto:
    """Parse the model in ``data``; raise BadInput if it is empty, truncated or not ONNX. ``whole`` is the data before weights
    were cut out."""
    if not data:
        raise BadInput("the model file is empty", where, "download or export the model again")
    truncated = _find_truncation(data if whole is None else whole)
    if truncated is not None:
        raise BadInput(f"the model file is truncated: {truncated}", where, "download or copy the file again")
    try:
        model = ModelProto.FromString(bytes(data))
    except Exception as error:  # protobuf's DecodeError is in another module for each implementation
        raise _not_onnx(where) from error
    if not model.HasField("graph"):
        raise _not_onnx(where)
    check_strings(model, where)
    if not model.opset_import:
        raise BadInput("the model file is truncated: opset_import is missing", where, "download or copy the file again")
    return model


def _not_onnx(where: str) -> BadInput:
    return BadInput("not an ONNX model", where, "give a .onnx file (an ONNX ModelProto in protobuf's binary format)")


def _find_truncation(data: Bytes) -> str | None:
    """Return the truncated part if ``data`` is a prefix of a ModelProto, else None."""
    position = 0
    while position < len(data):
        tag, start = read_varint(data, position)
        field = None if tag is None else _MODEL_FIELDS.get(tag >> 3)
        if tag is None or field is None or field[1] != tag & 7:
            return None
        value, position = read_varint(data, start)
        if value is None:
            return f"{field[0]} has no value"
        if field[1] == 2:
            if position + value > len(data):
                return f"{field[0]} has {value} bytes, of which {len(data) - position} exist"
            position += value
    return None


# External data -------------------------------------------------------------------------------------------------


def all_graphs(model: ModelProto) -> Iterator[GraphProto]:
    """Yield the main graph and every sub-graph below it."""
    return graphs_below([model.graph])


def graphs_inside(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the bodies of an operator and every sub-graph below them."""
    return graphs_below(list(bodies_of([node])))


def graphs_below(waiting: list[GraphProto]) -> Iterator[GraphProto]:
    """Yield these graphs and all sub-graphs inside them."""
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting.extend(bodies_of(graph.node))


def bodies_of(nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    """Yield the bodies of control-flow operators among ``nodes``."""
    return (g for node in nodes for a in node.attribute for g in (a.g, *a.graphs) if g.node or g.output)


# Operators -----------------------------------------------------------------------------------------------------


def count_nodes(model: ModelProto, where: str) -> int:
    """Return the number of operators after inlining, sub-graphs included; functions may be called many times. Raises BadInput if
    calls or bodies are nested too deep."""
    for nodes in (model.graph.node, *(f.node for f in model.functions)):
        limits.check_nesting(nodes, where)
    sizes: dict[tuple[str, str, str], int] = {}
    bodies = {(f.domain, f.name, f.overload): f.node for f in model.functions}

    def size(nodes: Iterable[NodeProto], depth: int) -> int:
        limits.check_calls(depth, where)
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key in bodies and key not in sizes and depth < len(bodies):
                sizes[key] = size(bodies[key], depth + 1)
            total += sizes.get(key, 1) + sum(size(g.node, depth) for a in node.attribute for g in (a.g, *a.graphs))
        return total

    return size(model.graph.node, 0)


def check_opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> None:
    """Raise BadInput for an invalid version and for two versions of one domain."""
    seen: dict[str, int] = {}
    for item in imports:
        domain = "" if item.domain == "ai.onnx" else item.domain
        if not 0 < item.version < 1 << 31 or seen.setdefault(domain, item.version) != item.version:
            again = f" and {seen[domain]}" if domain in seen and seen[domain] != item.version else ""
            raise BadInput(
                f"the model imports version {item.version}{again} of the operators of {domain or 'ai.onnx'}",
                "opset_import",
                "export the model again",
            )
        if item.version > _NEWEST.get(domain, item.version):
            raise BadInput(
                f"the model uses opset {item.version} of {domain or 'ai.onnx'}, but the newest "
                f"supported version is {_NEWEST[domain]}",
                "opset_import",
                f"export the model with opset {_NEWEST[domain]} or older, or install a newer version of the package onnx",
            )


def check_version(model: ModelProto, where: str) -> None:
    """Raise BadInput if the installed package onnx does not support the format version (IR version)."""
    if model.ir_version > onnx.IR_VERSION:
        raise BadInput(
            f"the model has IR version {model.ir_version}, but the newest supported version is {onnx.IR_VERSION}",
            where,
            f"export the model with IR version {onnx.IR_VERSION} or older, or install a newer version of the package onnx",
        )


def opset_versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return the opset version by domain; the standard domain is ``""``."""
    return {("" if i.domain == "ai.onnx" else i.domain): i.version for i in imports}


def check_operators(model: ModelProto, plugins: CustomOperators = plugin_operators.NONE) -> None:
    """Raise BadInput naming the first operator that ONNX, the model's functions and all plugins leave undefined."""
    for imports in (model.opset_import, *(f.opset_import for f in model.functions)):
        check_opsets(imports)
    functions = {(f.domain, f.name) for f in model.functions}
    scopes: list[tuple[Iterable[NodeProto], Mapping[str, int], bool]] = [
        (g.node, opset_versions(model.opset_import), False) for g in all_graphs(model)
    ]
    scopes += [(f.node, opset_versions(f.opset_import), True) for f in model.functions]
    for nodes, opsets, inside in scopes:
        for node in nodes:
            domain = "" if node.domain == "ai.onnx" else node.domain
            if (node.domain, node.op_type) in functions:
                continue
            if (operator := plugin_operators.find_custom_operator(node, plugins)) is not None:
                plugin_operators.check_use(node, operator, opsets.get(domain, 0), inside)
                continue
            if not _is_known_operator(node.op_type, domain, opsets.get(domain, 0)):
                raise _unknown_operator(node, domain, opsets.get(domain, 0), plugins)
            check_node(node, domain, opsets[domain], inside)


@lru_cache(maxsize=4096)
def _is_known_operator(op: str, domain: str, version: int) -> bool:
    # The schema at version v is the newest one up to v.
    if version < 1 or not schemas.has_schema(op, version, domain):
        return False
    schema = schemas.get_schema(op, version, domain)
    # GroupNormalization 18 is deprecated but exported, and its function body still defines it.
    return not schema.deprecated or bool(schema.has_context_dependent_function or schema.has_function) or domain == ML


def _unknown_operator(node: NodeProto, domain: str, version: int, plugins: CustomOperators) -> BadInput:
    opset = f"opset {version}" if version else "which the model does not import"
    what = f"unknown operator {node.op_type} in domain {domain or 'ai.onnx'}, {opset}"
    history = defs.get_all_schemas_with_history()
    everything = {(s.name, s.domain, s.since_version) for s in history} | {(name, d, 1) for d, name in schemas.own_operators()}
    names = sorted({n for n, d, _ in everything if d == domain and _is_known_operator(n, domain, version)})
    close = difflib.get_close_matches(node.op_type, names, 1)
    if not any(d == domain for _, d, _ in everything):
        hint = plugin_operators.unknown_domain(node, plugins)
    elif any((n, d) == (node.op_type, domain) for n, d, _ in everything):
        since = min(s for n, d, s in everything if (n, d) == (node.op_type, domain))
        hint = f"it exists since opset {since}" if since > version else "it was removed: export with a newer opset"
    else:
        hint = f"the nearest known operator is {close[0]}" if close else "no known operator has a similar name"
    return BadInput(what, node_title(node), hint)


# Order ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScopeNames:
    """The names of a graph and its enclosing graphs, without copies: a model may have many small bodies."""

    own: Container[str]
    outer: Container[str] = ()

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.outer


def sorted_nodes(graph: GraphProto, outer: Container[str] = ()) -> list[NodeProto]:
    """Return the nodes of ``graph`` in topological order, in file order where that is topological. ``outer`` holds the values of
    enclosing graphs. Raises BadInput for a cycle, for a value that is never computed and for a value that is computed twice."""
    given = _stored_names(graph)
    available = ScopeNames(given, outer)
    producer = _map_producers(graph, {name for name in given if name not in outer})
    reads = [node_reads(node) for node in graph.node]
    for node, names in zip(graph.node, reads, strict=True):
        for name in names:
            if name not in producer and name not in available:
                what = f"value {name!r} is read but never computed"
                raise BadInput(what, node_title(node), "export the model again")
    order: list[NodeProto] = []
    done = [False] * len(graph.node)
    for first in range(len(graph.node)):
        _visit_dependencies(graph, first, reads, producer, done, order)
    for value in graph.output:
        if value.name not in producer and value.name not in available:
            raise BadInput(f"output {value.name!r} is never computed", f"graph {graph.name}", "export the model again")
    return order


def live_nodes(order: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """Return the nodes of a topological ``order`` that ``outputs`` depend on."""
    live = set(outputs)
    kept = []
    for node in reversed(order):
        if live.intersection(filter(None, node.output)):
            kept.append(node)
            live.update(node_reads(node))
    return kept[::-1]


def checked_order(graph: GraphProto, outer: Container[str] = ()) -> list[NodeProto]:
    """Return ``sorted_nodes`` after the same checks of every sub-graph."""
    order = sorted_nodes(graph, outer)
    own = _stored_names(graph) | {o for n in order for o in n.output}
    inside = ScopeNames(own, outer)
    for body in bodies_of(order):
        checked_order(body, inside)
    return order


def _stored_names(graph: GraphProto) -> set[str]:
    """Return the names of the inputs and initializers, dense and sparse."""
    names = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    return names | {t.values.name for t in graph.sparse_initializer}


def _map_producers(graph: GraphProto, given: set[str]) -> dict[str, int]:
    producer: dict[str, int] = {}
    for number, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in producer or name in given:
                raise BadInput(f"value {name!r} is computed twice", node_title(node), "export the model again")
            producer[name] = number
    return producer


def _visit_dependencies(
    graph: GraphProto,
    first: int,
    reads: Sequence[Sequence[str]],
    producer: Mapping[str, int],
    done: list[bool],
    order: list[NodeProto],
) -> None:
    """Append node ``first`` to ``order`` after all its dependences (depth first, without recursion)."""
    path: dict[int, Iterator[int]] = {}
    if not done[first]:
        path[first] = (producer[n] for n in reads[first] if n in producer)
    while path:
        number = next(reversed(path))
        before = next(path[number], None)
        if before is None:
            del path[number]
            done[number] = True
            order.append(graph.node[number])
        elif before in path:
            chain = [graph.node[n].name or graph.node[n].op_type for n in list(path)[list(path).index(before) :]]
            # The search follows dependences backwards; the message shows data flow forwards.
            ring = " -> ".join([chain[0], *reversed(chain[1:]), chain[0]])
            raise BadInput(f"the graph has a cycle: {ring}", f"graph {graph.name}", "export the model again")
        elif not done[before]:
            path[before] = (producer[n] for n in reads[before] if n in producer)


def unused_prefix(graph: GraphProto, word: str) -> str:
    """Return a prefix that begins with ``word`` and that no name of a graph or of its inner graphs has."""
    taken = set[str]()
    for inner in graphs_below([graph]):
        taken.update(name for node in inner.node for name in (*node.input, *node.output))
        taken.update(value.name for value in (*inner.input, *inner.output, *inner.initializer))
    return next(p for p in (f"{word}{'_' * i}." for i in range(len(taken) + 1)) if not any(n.startswith(p) for n in taken))


def node_reads(node: NodeProto) -> list[str]:
    """Return the distinct values that a node reads, including outer values that its sub-graphs capture."""
    names = dict.fromkeys(n for n in node.input if n)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            names |= dict.fromkeys(free_values(graph))
    return list(names)


def free_values(graph: GraphProto) -> list[str]:
    """Return the values that a sub-graph reads from its enclosing graphs."""
    own = _stored_names(graph) | {o for node in graph.node for o in node.output}
    reads = [n for node in graph.node for n in node_reads(node)] + [o.name for o in graph.output]
    return list(dict.fromkeys(n for n in reads if n and n not in own))


# Types ---------------------------------------------------------------------------------------------------------


def check_port_type(kind: str, name: str, proto: TypeProto) -> str:
    """Return the element type of a model input or output, or the kind of a non-numeric value. Raises BadInput for an unsupported
    type."""
    value = proto.WhichOneof("value")
    dtype = element_type(proto.tensor_type.elem_type) if value == "tensor_type" else (value or "").removesuffix("_type")
    if dtype in KNOWN or dtype in ON_HOST:
        return dtype
    dtype = dtype if value == "tensor_type" else ""
    shown = f"element type {dtype}" if dtype else f"type {(value or 'unknown').removesuffix('_type')}"
    raise BadInput(
        f"{kind} {name!r} has {shown}, which is not supported", f"{kind} {name}", f"supported are tensors of {', '.join(KNOWN)}"
    )
