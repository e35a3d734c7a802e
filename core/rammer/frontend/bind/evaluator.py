"""Evaluation of single operators with known operands, for constant folding and for host operators.

An operator with a lowering is computed by its Computes, as on a device. Some operators are lowered only with constant operands
(Range, Pad). Other operators are run by ``host.operators`` where ``onnx.reference`` deviates from ONNX's specification, else by
``onnx.reference``. Those in ``JUDGED`` were compared with ONNX Runtime over their attributes (``rammer_testing.operators``). Only
judged implementations fold constants; other host operators are reported as unjudged. If a decision (``spec_rulings``) finds the
reference wrong, the operator is rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TypeProto, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.bind.type_inference import inferred_types
from rammer.frontend.host.numpy_fast import Plain, make_plain
from rammer.frontend.host.operators import OPERATORS, key_of
from rammer.frontend.loops.control_operators import CONTROL, BodyRunner, TurnsAhead, graph_of, run_control_flow
from rammer.frontend.lower.contrib import expand_use
from rammer.frontend.lower.emulated_types import DOMAIN, emulate_formats
from rammer.frontend.lower.graph_lowering import lower_node
from rammer.frontend.lower.lowering_registry import REGISTRY, CannotLower
from rammer.frontend.op_traits import Trait, has_trait
from rammer.frontend.read import model_checks, schemas
from rammer.frontend.read import node_protos as nd
from rammer.frontend.read.function_bodies import Expansion
from rammer.frontend.spec_rulings.operator_questions import Use
from rammer.frontend.spec_rulings.rulings import find_decision
from rammer.ir.constants.mapped_files import is_mapped
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.formats import FORMATS, from_carrier, to_carrier
from rammer.ir.graph import Graph, Node
from rammer.ir.names import shorten_name
from rammer.ir.types import KNOWN, SHORT, TensorType

Arrays = Mapping[str, np.ndarray]
#: The name of an element type; NumPy's own takes microseconds.
_to_text: Final = cache(str)

#: Operators without a lowering, at least for some operands, whose results by ``onnx.reference`` were judged. Any other operator
#: with a lowering is rejected where the lowering does not apply.
JUDGED: Final = frozenset(
    {
        "BatchNormalization",
        "Cast",
        "CastLike",
        "Col2Im",
        "Compress",
        "Constant",
        "DFT",
        "Det",
        "If",
        "Loop",
        "MaxUnpool",
        "MelWeightMatrix",
        "NonZero",
        "RoiAlign",
        "STFT",
        "Scan",
        "TopK",
    }
)


class Unjudged(NotImplementedError):
    """Error for a use of an operator without a trustworthy implementation (the message has the reason)."""


def evaluate_node(
    node: Node,
    values: Arrays,
    types: Mapping[str, TensorType],
    host: bool = False,
    bodies: BodyRunner | None = None,
    constants: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Return the outputs of ``node`` by name, given its inputs (captured ones included) and the types of its outputs.

    ``bodies`` runs the bodies of control flow; by default they are interpreted. ``constants`` are those of its inputs that are
    equal in every run.

    On the ``host`` an operator without a judged implementation runs, too; otherwise Unjudged is raised. Raises
    NotImplementedError if all implementations are missing, and the error of an implementation that does not accept the operands.
    """
    if node.op in CONTROL and not node.domain:
        formats = nd.carried_dtypes(node)
        known = {n: from_carrier(values[n], f) for n, f in zip(node.inputs, formats, strict=bool(formats)) if f}
        made = run_control_flow(node, {**values, **known} if formats else values, bodies or INTERPRETED, constants)
        results = {o: _to_array(a) for o, a in zip(node.outputs, made, strict=True) if o}
        return {o: to_carrier(np.asarray(a)) for o, a in results.items()} if formats else results
    stored = _by_numbers(node, values, types, host) if _has_emulated_types(node, values, types) else None
    if stored is not None:
        return stored
    moved = _in_its_file(node, values, types)
    if moved is not None:
        return moved
    # Host operators are large: expressions need a step for every index and update.
    computed = _evaluate_numpy(node, values) if host else None
    if computed is not None:
        return computed
    try:
        computed = _evaluate_lowered(node, values, types)
    except CannotLower as reason:
        if node.op not in JUDGED and not has_own(node):
            raise Unjudged(str(reason)) from reason
        computed = None
    if computed is not None:
        return computed
    computed = _evaluate_numpy(node, values)
    if computed is not None:
        return computed
    if not host and host_caveat(node):
        raise Unjudged(f"{node.op}: {host_caveat(node)}")
    decision = find_decision("reference", use_of(node, values))
    if decision is not None:
        raise Unjudged(_untrusted_message(node, decision.when))
    return _evaluate_reference(node, values)


def _in_its_file(node: Node, values: Arrays, types: Mapping[str, TensorType]) -> dict[str, np.ndarray] | None:
    """Return the output of an operator that only reindexes a mapped weight, as a view of its file. None for other operators."""
    turned = node.op == "Transpose" and not node.domain
    if not (turned or has_trait(node, Trait.RESHAPES)) or node.outputs[0] not in types:
        return None
    given, made = values[node.inputs[0]], types[node.outputs[0]]
    if not isinstance(given, np.ndarray) or not is_mapped(given) or (str(given.dtype), given.size) != (made.dtype, made.size):
        return None
    if turned:
        return {node.outputs[0]: given.transpose(node.attributes.get("perm") or None)}
    dense = given.flags.c_contiguous or given.shape == made.shape  # other arrays would be copied
    return {node.outputs[0]: given.reshape(made.shape)} if dense else None


def has_own(node: Node) -> bool:
    """Return True if one of our NumPy implementations computes the operator."""
    return key_of(node.domain, node.op) in OPERATORS


def _evaluate_numpy(node: Node, values: Arrays) -> dict[str, np.ndarray] | None:
    """Return the outputs by our NumPy implementation, or None if it is missing or does not support these types."""
    if node.declared or not has_own(node):
        return None
    with np.errstate(all="ignore"):
        found = OPERATORS[key_of(node.domain, node.op)](node.attributes, [values[n] if n else None for n in node.inputs])
    return None if found is None else {o: a for o, a in zip(node.outputs, found, strict=False) if o}


def _has_emulated_types(node: Node, values: Arrays, types: Mapping[str, TensorType]) -> bool:
    """Return True if ``node`` uses tensors only, and some operand or result has a type without arithmetic."""
    kinds = [_to_text(getattr(values[n], "dtype", "")) for n in node.inputs if n]
    if not any(kind in FORMATS for kind in (*kinds, *[types[o].dtype for o in node.outputs if o in types])):
        return False
    return not nd.body_graphs(node) and not node.declared and all(kind in KNOWN for kind in kinds)


def _by_numbers(node: Node, values: Arrays, types: Mapping[str, TensorType], host: bool) -> dict[str, np.ndarray] | None:
    """Evaluate ``node`` in emulated types (``emulated_types``), as devices do. Returns None for results other than tensors."""
    given = {n: np.asarray(values[n]) for n in node.inputs if n}
    outputs = [o for o in node.outputs if o]
    unknown = set(outputs) - types.keys()
    kinds = {n: TensorType(str(a.dtype), a.shape) for n, a in given.items()} | {o: types[o] for o in outputs if o in types}
    if unknown:  # results with data-dependent shapes
        kinds |= {o: TensorType(dtype, ()) for o, dtype in _element_types(node, given).items() if o in unknown}
        if not kinds.keys() >= unknown:
            return None
    graph = emulate_formats(Graph("one_node", (), (), (node,), kinds, given))
    known = dict(graph.constants)
    for step in graph.nodes:
        sure = {o: graph.types[o] for o in step.outputs if o}
        if unknown and step.domain == DOMAIN:
            sure = {o: TensorType(t.dtype, known[step.inputs[0]].shape) for o, t in sure.items()}
        known |= evaluate_node(step, known, {} if unknown and step.domain != DOMAIN else sure, host)
    return {o: from_carrier(known[o], kinds[o].dtype) for o in outputs}


def _element_types(node: Node, given: Arrays) -> dict[str, str]:
    schema = schemas.get_schema(node.op, node.version, node.domain)
    kinds = {n: nd.type_proto(a.dtype, a.shape) for n, a in given.items()}
    inferred = inferred_types(schema, nd.node_proto(node), kinds, given, {node.domain: node.version})
    return {o: nd.element_type(t.tensor_type.elem_type) for o, t in inferred.items() if t.WhichOneof("value") == "tensor_type"}


def interpret_body(body: nd.SubGraph, given: Sequence[Any], outer: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of a body, interpreted operator by operator on the host."""
    graph, opsets = graph_of(body), dict(body.opsets)
    ready = _prepare_body(body, frozenset(outer))
    values = {**outer, **ready.constants}
    values |= {v.name: a for v, a in zip(graph.input, given, strict=True)}
    for proto, computed in ready.steps:
        found = computed([values[n] if n else None for n in proto.input]) if computed is not None else None
        values |= evaluate_proto(proto, values, opsets) if found is None else {proto.output[0]: found}
    return [values[o.name] for o in graph.output]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A body prepared for the host: its constants, and its operators in order with their fast NumPy functions."""

    constants: Mapping[str, Any]
    steps: Sequence[tuple[NodeProto, Plain | None]]


@lru_cache(256)
def _prepare_body(body: nd.SubGraph, outer: frozenset[str]) -> _Prepared:
    graph, opsets = graph_of(body), dict(body.opsets)
    constants: dict[str, Any] = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    steps: list[tuple[NodeProto, Plain | None]] = []
    for proto in model_checks.live_nodes(model_checks.sorted_nodes(graph, outer), [o.name for o in graph.output]):
        if proto.op_type == "Constant" and not proto.domain:
            constants |= evaluate_proto(proto, {}, opsets)
        else:
            steps.append((proto, make_plain(host_node(proto, opsets), proto)))
    return _Prepared(constants, steps)


class Interpreted:
    """A body runner that interprets operators, one iteration at a time (``control_operators.BodyRunner``)."""

    def __call__(self, body: nd.SubGraph, given: Sequence[Any], outer: Mapping[str, Any]) -> list[Any]:
        return interpret_body(body, given, outer)

    def several(self, body: nd.SubGraph, ahead: TurnsAhead, outer: Mapping[str, Any]) -> None:
        """Return None: the host interpreter does not batch iterations."""


INTERPRETED: Final = Interpreted()


def evaluate_proto(proto: NodeProto, values: Arrays, opsets: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the outputs of one operator on the host, by name, given its inputs by name. Raises as ``evaluate_node`` does."""
    node = host_node(proto, opsets)
    operands = {n: values[n] for n in node.inputs if n}
    if node.op in CONTROL or not all(isinstance(a, np.ndarray | np.generic) for a in operands.values()):
        return evaluate_node(node, operands, {}, host=True)  # types serve lowerings only
    found = [TensorType(str(values[n].dtype), values[n].shape) if n else None for n in proto.input]
    if (body := expand_use(proto, opsets[node.domain], found, [values[n] if n else None for n in proto.input])) is not None:
        return _by_body(proto, body, values, opsets)
    kinds = {n: nd.value_type(a) for n, a in operands.items()}
    schema = schemas.get_schema(node.op, opsets[node.domain], node.domain)
    inferred = inferred_types(schema, proto, kinds, operands, opsets)
    types = {o: t for o in proto.output if o and (t := nd.tensor_type(inferred.get(o, TypeProto())))}
    return evaluate_node(node, operands, types, host=True)


def _by_body(proto: NodeProto, body: Expansion, values: Arrays, opsets: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the outputs of ``proto`` computed by its replacement body."""
    inner = {formal: values[n] for formal, n in zip(body.inputs, proto.input, strict=False) if n} | {**body.constants}
    wanted = {formal: n for formal, n in zip(body.outputs, proto.output, strict=False) if n}
    for step in model_checks.live_nodes(body.local(proto), wanted):
        inner |= evaluate_proto(step, inner, {**opsets, **body.opsets})
    return {n: inner[formal] for formal, n in wanted.items()}


def host_node(proto: NodeProto, opsets: Mapping[str, int]) -> Node:
    """Return the operator with its ONNX names, for the host to run."""
    attributes, captured = nd.attributes_of(proto, opsets, model_checks.free_values)
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    version = schemas.get_schema(proto.op_type, opsets[domain], domain).since_version
    inputs, title = (*proto.input, *captured), shorten_name(proto.name) or proto.op_type
    return Node(proto.op_type, inputs, tuple(proto.output), attributes, title, domain, version)


def host_caveat(node: Node) -> str:
    """Return a remark for users about ``node`` on the host, or "" if its implementation was judged."""
    if node.declared:
        return "its results are those of the plugin's reference"
    known = (node.domain, node.op) in REGISTRY or node.op in JUDGED or has_own(node) or nd.is_random(node)
    return "" if known else "its results by onnx.reference were not compared with ONNX Runtime's"


def check_host(node: Node, types: Mapping[str, TensorType]) -> None:
    """Raise BadInput for an operator that only ``onnx.reference`` implements, wrongly at this use. ``types`` has the types of its
    inputs."""
    if (node.domain, node.op) in REGISTRY or has_own(node) or node.declared:
        return
    kinds = [types.get(n) for n in node.inputs]
    decision = find_decision("reference", Use(node.op, node.version, node.attributes, kinds, [bool(o) for o in node.outputs]))
    if decision is not None:
        raise BadInput(_untrusted_message(node, decision.when), f"node {node.name} ({node.op})", "export the model without it")


def _untrusted_message(node: Node, when: str) -> str:
    return f"{node.op} with {when} has no trustworthy implementation on the host"


def _evaluate_lowered(node: Node, values: Arrays, types: Mapping[str, TensorType]) -> dict[str, np.ndarray] | None:
    """Return the outputs by the operator's Computes, or None without a lowering or for unsupported types. Raises CannotLower."""
    if (node.domain, node.op) not in REGISTRY or not all(
        isinstance(values[n], np.ndarray | np.generic) for n in node.inputs if n
    ):
        return None  # a sequence, or an empty optional
    operands = {n: np.asarray(values[n]) for n in node.inputs if n}
    outputs = [o for o in node.outputs if o]
    known = all(str(a.dtype) in SHORT for a in operands.values()) and all(o in types for o in outputs)
    if not known:
        return None
    # Names may be those of the model, which may be invalid identifiers.
    names = {n: f"v{i}" for i, n in enumerate((*operands, *outputs))}
    renamed = replace(
        node, inputs=tuple(names.get(n, "") for n in node.inputs), outputs=tuple(names.get(o, "") for o in node.outputs)
    )
    constants = {names[n]: a for n, a in operands.items()}
    kinds = {n: TensorType(str(a.dtype), a.shape) for n, a in constants.items()} | {names[o]: types[o] for o in outputs}
    lowered = lower_node(Graph("one_node", (), (), (renamed,), kinds, constants), renamed, set(kinds))
    results = {**constants, **lowered.constants}
    for compute in lowered.computes:
        results[compute.name] = evaluate_compute(compute, results)
    return {o: np.asarray(results[names[o]]) for o in outputs}


def use_of(node: Node, values: Arrays) -> Use:
    """Return the use of an operator whose operands are all in ``values``."""
    known = [values[n] if n and isinstance(values[n], np.ndarray | np.generic) else None for n in node.inputs]
    kinds = [TensorType(str(a.dtype), a.shape) if a is not None and str(a.dtype) in SHORT else None for a in known]
    return Use(node.op, node.version, node.attributes, kinds, [bool(o) for o in node.outputs], known)


def _evaluate_reference(node: Node, values: Arrays) -> dict[str, Any]:
    """Return the outputs computed by ``onnx.reference``."""
    from onnx.reference import ReferenceEvaluator

    proto = nd.node_proto(node)
    feeds, outputs = {n: values[n] for n in proto.input if n}, [o for o in proto.output if o]
    graph = GraphProto(name="one_node", node=[proto])
    graph.input.extend(onnx.ValueInfoProto(name=n, type=nd.value_type(a)) for n, a in feeds.items())
    graph.output.extend(onnx.ValueInfoProto(name=n) for n in outputs)
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(graph, opsets={"": node.version, node.domain: node.version}).run(outputs, feeds)
    return {name: _to_array(r) for name, r in zip(outputs, results, strict=True)}


def _to_array(value: Any) -> Any:
    """Return a value as an array, strings as objects. A list (a sequence) or None (an empty optional) stays unchanged."""
    if value is None or isinstance(value, list):
        return value
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array
