"""Values of single operators whose operands are known: what folds constants and runs operators on the host.

An operator with a lowering is computed by its own Computes, as on a device; what can be lowered only when all operands are
known (Range, Pad) is, too. The others are run by ``host_operators`` where ``onnx.reference`` departs from ONNX's words, else by
that. Those in ``JUDGED`` were compared with ONNX Runtime over their attributes (``rammer.testing.operators``). Nothing else
folds constants, and what else runs on the host is said to be unjudged; where a decision (``voices``) finds the reference
wrong, it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TypeProto, defs

from rammer.device.operators import CustomOperators
from rammer.errors import BadInput
from rammer.frontend import limits
from rammer.frontend import nodes as nd
from rammer.frontend.carriers import DOMAIN, carry
from rammer.frontend.custom import check_use
from rammer.frontend.host_operators import OPERATORS
from rammer.frontend.inference import inferred_types
from rammer.frontend.lower import lower_node
from rammer.frontend.lowering import REGISTRY, CannotLower
from rammer.frontend.uses import Use
from rammer.frontend.voices import distrusted
from rammer.ir.evaluate import evaluate as evaluate_compute
from rammer.ir.formats import FORMATS, restored
from rammer.ir.graph import Graph, Node
from rammer.ir.types import KNOWN, SHORT, TensorType

Arrays = Mapping[str, np.ndarray]

#: Operators without a lowering, or without one for some operands, whose results by ``onnx.reference`` were judged. What
#: has a lowering and is not here is refused where that does not apply.
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
        "GridSample",
        "If",
        "Loop",
        "MaxUnpool",
        "MelWeightMatrix",
        "NonZero",
        "RoiAlign",
        "STFT",
        "Scan",
        "ScatterElements",
        "ScatterND",
        "TopK",
    }
)


class Unjudged(NotImplementedError):
    """Nothing trustworthy computes this use of an operator (the message says why)."""


def evaluate(node: Node, values: Arrays, types: Mapping[str, TensorType], host: bool = False) -> dict[str, np.ndarray]:
    """Outputs by name of ``node``, given its inputs (captured ones included) by name and the types of its outputs.

    On the ``host`` an operator without a judged implementation runs, too; elsewhere that raises Unjudged. Raises
    NotImplementedError where nothing implements the operator, and what an implementation raises for operands that
    it does not accept.
    """
    stored = _by_numbers(node, values, types, host) if _formats(node, values, types) else None
    if stored is not None:
        return stored
    try:
        computed = _lowered(node, values, types)
    except CannotLower as reason:
        if node.op not in JUDGED and node.op not in OPERATORS:
            raise Unjudged(str(reason)) from reason
        computed = None
    if computed is not None:
        return computed
    if not node.domain and node.op in OPERATORS:
        with np.errstate(all="ignore"):
            made = OPERATORS[node.op](node.attributes, [values[n] if n else None for n in node.inputs])
        if made is not None:
            return {o: a for o, a in zip(node.outputs, made, strict=False) if o}
    if not host and reservation(node):
        raise Unjudged(f"{node.op}: {reservation(node)}")
    decision = distrusted("reference", _use(node, values))
    if decision is not None:
        raise Unjudged(_untrusted(node, decision.when))
    return _referred(node, values)


def _formats(node: Node, values: Arrays, types: Mapping[str, TensorType]) -> bool:
    """Whether ``node`` has operands or results of types that nothing computes in, and no others than tensors."""
    kinds = [str(getattr(values[n], "dtype", "")) for n in node.inputs if n]
    if nd.bodies(node) or node.declared or not all(kind in KNOWN for kind in kinds):
        return False
    return any(kind in FORMATS for kind in (*kinds, *(types[o].dtype for o in node.outputs if o in types)))


def _by_numbers(node: Node, values: Arrays, types: Mapping[str, TensorType], host: bool) -> dict[str, np.ndarray] | None:
    """``node`` as devices get it (``carriers``); None where it makes what is no tensor."""
    given = {n: np.asarray(values[n]) for n in node.inputs if n}
    outputs = [o for o in node.outputs if o]
    unknown = set(outputs) - types.keys()
    kinds = {n: TensorType(str(a.dtype), a.shape) for n, a in given.items()} | {o: types[o] for o in outputs if o in types}
    if unknown:  # results that show their shapes when they are there
        kinds |= {o: TensorType(dtype, ()) for o, dtype in _element_types(node, given).items() if o in unknown}
        if not kinds.keys() >= unknown:
            return None
    graph = carry(Graph("one_node", (), (), (node,), kinds, given))
    known = dict(graph.constants)
    for step in graph.nodes:
        sure = {o: graph.types[o] for o in step.outputs if o}
        if unknown and step.domain == DOMAIN:
            sure = {o: TensorType(t.dtype, known[step.inputs[0]].shape) for o, t in sure.items()}
        known |= evaluate(step, known, {} if unknown and step.domain != DOMAIN else sure, host)
    return {o: restored(known[o], kinds[o].dtype) for o in outputs}


def _element_types(node: Node, given: Arrays) -> dict[str, str]:
    schema = defs.get_schema(node.op, node.version, node.domain)
    kinds = {n: nd.type_proto(a.dtype, a.shape) for n, a in given.items()}
    inferred = inferred_types(schema, nd.node_proto(node), kinds, given, {node.domain: node.version})
    return {o: nd.element_type(t.tensor_type.elem_type) for o, t in inferred.items() if t.WhichOneof("value") == "tensor_type"}


def evaluate_proto(proto: NodeProto, values: Arrays, opsets: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Outputs by name of one operator without sub-graphs, given its inputs by name. Raises as ``evaluate`` does."""
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    schema = defs.get_schema(proto.op_type, opsets[domain], domain)
    operands = {n: values[n] for n in proto.input if n}
    kinds = {n: nd.value_type(a) for n, a in operands.items()}
    inferred = inferred_types(schema, proto, kinds, operands, opsets)
    types = {o: t for o in proto.output if o and (t := nd.tensor_type(inferred.get(o, TypeProto())))}
    return evaluate(nd.plain_node(proto, schema.since_version), operands, types)


def reservation(node: Node) -> str:
    """What a user should know of ``node`` on the host: "" where its implementation was judged."""
    if node.declared:
        return "its results are those of the plugin's reference"
    known = (node.domain, node.op) in REGISTRY or node.op in JUDGED or node.op in OPERATORS or nd.is_random(node)
    return "" if known else "its results by onnx.reference were not compared with ONNX Runtime's"


def check_host(node: Node, types: Mapping[str, TensorType]) -> None:
    """BadInput for an operator that only ``onnx.reference`` runs, and wrongly at this use; ``types`` has those of its inputs."""
    if (node.domain, node.op) in REGISTRY or node.op in OPERATORS or node.declared:
        return
    kinds = [types.get(n) for n in node.inputs]
    decision = distrusted("reference", Use(node.op, node.version, node.attributes, kinds, [bool(o) for o in node.outputs]))
    if decision is not None:
        raise BadInput(_untrusted(node, decision.when), f"node {node.name} ({node.op})", "export the model without it")


def _untrusted(node: Node, when: str) -> str:
    return f"{node.op} with {when} has no trustworthy implementation on the host"


def _lowered(node: Node, values: Arrays, types: Mapping[str, TensorType]) -> dict[str, np.ndarray] | None:
    """The outputs by the operator's Computes; None without a lowering or with types that have none. Raises CannotLower."""
    if (node.domain, node.op) not in REGISTRY or not all(
        isinstance(values[n], np.ndarray | np.generic) for n in node.inputs if n
    ):
        return None  # a sequence, or an optional that is empty
    operands = {n: np.asarray(values[n]) for n in node.inputs if n}
    outputs = [o for o in node.outputs if o]
    known = all(str(a.dtype) in SHORT for a in operands.values()) and all(o in types for o in outputs)
    if not known:
        return None
    # Names may be those of the model, which are no identifiers.
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


def _use(node: Node, values: Arrays) -> Use:
    known = [values[n] if n and isinstance(values[n], np.ndarray | np.generic) else None for n in node.inputs]
    kinds = [TensorType(str(a.dtype), a.shape) if a is not None and str(a.dtype) in SHORT else None for a in known]
    return Use(node.op, node.version, node.attributes, kinds, [bool(o) for o in node.outputs], known)


def _referred(node: Node, values: Arrays) -> dict[str, np.ndarray]:
    proto, names = nd.node_proto(node), nd.captures(node)
    formal = len(proto.input)
    feeds = {n: values[n] for n in proto.input if n}
    # Bodies know outer values by their ONNX names, which must not clash with the Graph's: rename the inputs.
    if names:
        feeds = {f"{n}:input": values[n] for n in feeds}
        feeds |= {outer: values[n] for outer, n in zip(names, node.inputs[formal:], strict=True)}
        renamed = [f"{n}:input" if n else "" for n in proto.input]
        del proto.input[:]
        proto.input.extend(renamed)
    types = {n: nd.value_type(a) for n, a in feeds.items()}
    inner = {d: v for body in nd.bodies(node) for d, v in body.opsets}
    return _by_reference(
        proto, types, {"": node.version, **inner, node.domain: inner.get(node.domain, node.version)}, feeds, names
    )


def _by_reference(
    proto: NodeProto, types: Mapping[str, TypeProto], opsets: Mapping[str, int], feeds: Arrays, outer: Iterable[str]
) -> dict[str, Any]:
    """One operator run by ``onnx.reference``; operators of its bodies are run by ``evaluate``."""
    from onnx.reference import ReferenceEvaluator

    outputs = [o for o in proto.output if o]
    graph = GraphProto(name="one_node", node=[proto])
    names = dict.fromkeys(n for n in (*proto.input, *outer) if n)
    graph.input.extend(onnx.ValueInfoProto(name=n, type=types[n]) for n in names)
    graph.output.extend(onnx.ValueInfoProto(name=n) for n in outputs)
    bodies = any(a.HasField("g") for a in proto.attribute)
    evaluator = ReferenceEvaluator(graph, opsets=dict(opsets), new_ops=list(_own_operators()) if bodies else None)
    outermost = _HOST_CLOCK.set((time.thread_time(), limits.host_seconds())) if _HOST_CLOCK.get(None) is None else None
    try:
        with np.errstate(all="ignore"):
            results = evaluator.run(outputs, dict(feeds))
    finally:
        if outermost is not None:
            _HOST_CLOCK.reset(outermost)
    return {name: _kept(r) for name, r in zip(outputs, results, strict=True)}


def _kept(value: Any) -> Any:
    """A value as an array, strings as objects; a list (a sequence) or None (an empty optional) as it is."""
    if value is None or isinstance(value, list):
        return value
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array


@cache
def _own_operators() -> tuple[type[Any], ...]:
    """Classes by which ``onnx.reference`` runs an operator with a lowering as ``evaluate_proto`` does."""
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_loop import Loop
    from onnx.reference.ops.op_scan import Scan

    class Own(OpRun):  # type: ignore[misc]  # onnx has no types
        op_domain = ""

        def run(self, *args: Any, linked_attributes: Any = None, context: Any = None) -> tuple[Any, ...]:
            """The outputs; attributes are those of the node."""
            node: NodeProto = self.onnx_node
            values = {n: _kept(a) for n, a in zip(node.input, args, strict=False) if n}
            results = evaluate_proto(node, values, self.run_params["opsets"])
            return tuple(results.get(o) for o in node.output)

        def _run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return self.run(*args)

    own = (type(op, (Own,), {}) for op in {*OPERATORS, *(op for domain, op in REGISTRY if not domain)})
    return *own, *(type(base.__name__, (_Timed, base), {"op_domain": ""}) for base in (Loop, Scan))


def reference_operators(plugins: CustomOperators) -> list[type[Any]]:
    """Classes by which ``onnx.reference`` runs plugins' operators: by the plugins' references."""
    from onnx.reference.op_run import OpRun

    class Declared(OpRun):  # type: ignore[misc]  # onnx has no types
        def run(self, *args: Any, linked_attributes: Any = None, context: Any = None) -> tuple[Any, ...]:
            """The outputs; attributes are those of the node, with defaults."""
            node: NodeProto = self.onnx_node
            operator = plugins[node.domain, node.op_type]
            attributes = check_use(node, operator, self.run_params["opsets"].get(node.domain, 0))
            values = {n: np.asarray(a) for n, a in zip(node.input, args, strict=False) if n}
            results = operator.referred(attributes, node.input, node.output, values)
            return tuple(results.get(o) for o in node.output)

        def _run(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            return self.run(*args)

    return [type(op, (Declared,), {"op_domain": domain}) for domain, op in plugins]


class _Timed:
    """A Loop or Scan of ``onnx.reference`` that is stopped when its bodies have taken too long: it may never end by itself."""

    _run_body: Any

    def __init__(self, onnx_node: NodeProto, run_params: Any) -> None:
        super().__init__(onnx_node, run_params)  # type: ignore[call-arg]
        self._inner, self._iterations = self._run_body, 0
        self._run_body = self._one_iteration

    def _one_iteration(self, *args: Any, **kwargs: Any) -> Any:
        self._iterations += 1
        start, most = _HOST_CLOCK.get()
        limits.check_loop(type(self).__name__, self._iterations, time.thread_time() - start, most)
        return self._inner(*args, **kwargs)


#: When the operator on the host began, in seconds of this thread's CPU, and how many it may take.
_HOST_CLOCK: ContextVar[tuple[float, float]] = ContextVar("_HOST_CLOCK")
