"""Binding of a Model to input shapes: one forward walk that infers types and folds constants.

With static input shapes every shape computation in the model is a constant, so a single pass in topological order suffices. Each
operator is typed by ONNX's inference (given the values of its constant operands), and evaluated if all operands are constant. An
If with a constant condition is replaced by its branch. An operator without a lowering that ONNX defines by others is replaced by
its body.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import GraphProto, NodeProto, TypeProto, defs, numpy_helper

import rammer.frontend.lower.operators  # noqa: F401  (importing it fills the registry)
from rammer.device.custom_operators import CustomOperator, CustomOperators
from rammer.errors import BadInput
from rammer.frontend.bind.bind_state import MetLoops, Scope, UnrollBudget
from rammer.frontend.bind.deferred import (
    Deferral,
    DeferredModel,
    Unknown,
    check_decided,
    make_type_error,
    no_tensor,
    shape_operands,
)
from rammer.frontend.bind.evaluator import Unjudged, evaluate_node, host_node
from rammer.frontend.bind.if_conversion import convert_if
from rammer.frontend.bind.input_shapes import bound_shapes
from rammer.frontend.bind.type_inference import inferred_types
from rammer.frontend.loops.unrolling import branch_taken, unroll_loop
from rammer.frontend.lower.contrib import FUNCTIONS, expand_use
from rammer.frontend.lower.emulated_types import emulate_formats
from rammer.frontend.lower.lowering_registry import REGISTRY
from rammer.frontend.lower.operators.trees import INTERNAL
from rammer.frontend.op_traits import Trait, operators
from rammer.frontend.read import attribute_rules as attributes
from rammer.frontend.read import function_bodies, limits, model_checks, schemas
from rammer.frontend.read import node_protos as nd
from rammer.frontend.read import plugin_operators as custom
from rammer.frontend.read.mmap_weights import NOTHING
from rammer.frontend.read.reader import Model
from rammer.frontend.read.type_constraints import check_constant, check_types
from rammer.ir.graph import Graph, Node, Value, verify_graph
from rammer.ir.names import Names, make_identifier, shorten_name
from rammer.ir.types import KNOWN, TensorType, is_float

#: Operands that were float attributes in older opsets.
_MADE_FLOAT: Final[Mapping[str, tuple[int, ...]]] = {"Clip": (1, 2), "Pad": (2,)}
Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"


def bind(model: Model, shapes: Shapes, lowered: Container[tuple[str, str]] = REGISTRY) -> Graph:
    """Return ``model`` with static types everywhere, and everything folded that its input shapes determine.

    ``shapes`` maps input names to extents (inputs with a static shape may be left out). ``lowered`` contains the (domain,
    operator) pairs to keep although ONNX defines them by other operators. Raises BadInput for a missing shape, one that
    contradicts the model, or one that depends on run-time data. Also raises BadInput for an operator that does not accept its
    operands.
    """
    graph, rest = bind_until(model, shapes, lowered)
    if rest is not None:
        raise rest.why
    return graph


def bind_until(
    model: Model, shapes: Shapes, lowered: Container[tuple[str, str]] = REGISTRY, ranged: MetLoops | None = None
) -> tuple[Graph, DeferredModel | None]:
    """Bind like ``bind``, up to operators with data-dependent shapes.

    The Graph computes the inputs of the DeferredModel, under their ONNX names. Without a DeferredModel the Graph is the whole
    model. ``ranged`` records loops, and values computed from shapes are then not folded."""
    model.check_files()
    walk = Binder(lowered, model.custom, ranged=ranged)
    graph = model.proto.graph
    extents = bound_shapes(model, shapes)
    scope = Scope({}, model_checks.opset_versions(model.proto.opset_import))
    inputs = []
    numeric = [port for port in model.inputs if port.numeric]
    for port in numeric:
        limits.check_shape(extents[port.name], f"input {port.name}")
        value = Value(make_identifier(port.name, walk.taken), TensorType(port.dtype, extents[port.name]), port.name)
        scope.values[port.name] = value.name
        walk.types[value.name] = value.type
        inputs.append(value)
    for name in model.outputs:
        walk.reserved.setdefault(name, make_identifier(name, walk.taken))
    walk.initializers(graph, scope, model.weights)
    for name, array in model.known.items():
        walk.constant(name, array, scope)
    given = {port.name for port in model.inputs}
    later = Deferral(foreign=given - {port.name for port in numeric})
    order = model_checks.sorted_nodes(graph, {*model.known, *given})
    walk.known_shapes(Readers(list(model_checks.live_nodes(order, model.outputs)), model.outputs), scope, later)
    declared = {v.name: v.type.tensor_type.elem_type for v in graph.output}
    if not later and later.foreign.isdisjoint(model.outputs):
        outputs = tuple(walk.output(name, declared[name], scope) for name in dict.fromkeys(model.outputs))
        return _assemble_graph(model, walk, tuple(inputs), outputs), None
    read = [n for n in later.reads(model.outputs) if n in scope.values or n in given]
    known = {n: walk.known[scope.values[n]] for n in read if n in scope.values and scope.values[n] in walk.known}
    made = [n for n in read if n not in known and n not in given]
    for name in made:
        walk.reserved.setdefault(name, make_identifier(name, walk.taken))
    outputs = tuple(walk.output(name, declared.get(name, 0), scope) for name in made)
    return _assemble_graph(model, walk, tuple(inputs), outputs), later.rest(
        model, known, (*(n for n in read if n in given), *made)
    )


def _assemble_graph(model: Model, walk: Binder, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Graph:
    read = {name for node in walk.nodes for name in node.inputs}
    constants = {name: array for name, array in walk.known.items() if name in read}
    for name, array in constants.items():
        check_constant(name, array, f"graph {model.name}")
    types = {v.name: v.type for v in inputs}
    types |= {name: TensorType(str(a.dtype), a.shape) for name, a in constants.items()}
    types |= {o: walk.types[o] for node in walk.nodes for o in node.outputs if o}
    result = Graph(make_identifier(model.name), inputs, outputs, tuple(walk.nodes), types, constants, model.opset)
    verify_graph(result)
    return emulate_formats(result)


@dataclass
class Binder:
    """The state of the walk. A scope maps ONNX names to names of the Graph; ``known`` are constants by the latter."""

    lowered: Container[tuple[str, str]]
    custom: CustomOperators = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    types: MutableMapping[str, TensorType] = field(default_factory=dict)
    known: MutableMapping[str, np.ndarray] = field(default_factory=dict)
    taken: Names = field(default_factory=Names)
    #: Graph outputs' ONNX name -> the identifier reserved for them.
    reserved: dict[str, str] = field(default_factory=dict)
    stored: int = 0  #: Bytes of the constants in the file.
    ranged: MetLoops | None = None  #: Set when binding one length of a range.
    shaped: set[str] = field(default_factory=set)  #: Constants computed from shapes.
    budget: UnrollBudget = field(default_factory=UnrollBudget)  #: Of the loops being unrolled.

    def initializers(self, graph: GraphProto, scope: Scope, weights: Mapping[str, np.ndarray] = NOTHING) -> None:
        """Add the constants of ``graph``; ``weights`` are those stored outside of it."""
        for tensor in graph.initializer:
            value = weights[tensor.name] if tensor.name in weights else numpy_helper.to_array(tensor)
            self.stored += value.nbytes
            self.constant(tensor.name, value, scope)

    def constant(self, onnx_name: str, value: np.ndarray, scope: Scope) -> None:
        name = make_identifier(scope.titles.get(onnx_name, onnx_name), self.taken)
        scope.values[onnx_name] = name
        self.known[name] = value

    def nodes_of(self, order: Sequence[NodeProto], outputs: Iterable[str], scope: Scope) -> None:
        for proto in model_checks.live_nodes(order, outputs):
            self.step(proto, scope)

    def known_shapes(self, readers: Readers, scope: Scope, later: Deferral) -> None:
        """Walk over the operators with known shapes. The others, and all readers of their results, are added to ``later``."""
        for place, proto in enumerate(readers.order):
            reads = model_checks.node_reads(proto)
            if later.waits(proto, reads):
                continue
            if any(n in later.foreign or self.foreign(scope.values[n]) for n in reads):
                later.blocked(proto, host_node(proto, scope.opsets), reads, no_tensor(proto))
                continue
            made = len(self.nodes)
            try:
                self.step(proto, scope)
                if not later:  # whose operators may read earlier values
                    readers.passed(place, self.nodes, scope.values, self.known)
            except Unknown as problem:
                del self.nodes[made:]
                known = [n for n in reads if scope.values[n] in self.known]
                later.blocked(proto, host_node(proto, scope.opsets), known, problem)

    def foreign(self, name: str) -> bool:
        """Return True if a value is a constant of a type that devices do not hold."""
        return name in self.known and str(self.known[name].dtype) not in KNOWN

    def step(self, proto: NodeProto, scope: Scope) -> None:
        proto = self.converted(proto, scope)
        reads = {n: scope.values[n] for n in model_checks.node_reads(proto)}
        operands = {n: self.known[name] for n, name in reads.items() if name in self.known}
        if self.fold_type_only(proto, scope) or branch_taken(self, proto, scope):
            return
        if operator := custom.find_custom_operator(proto, self.custom) or INTERNAL.get((proto.domain, proto.op_type)):
            self.keep_custom(proto, operator, scope)
            return
        types = {n: self.onnx_type(name) for n, name in reads.items()}
        if self.custom:
            custom.check_body(proto, (n for g in model_checks.graphs_inside(proto) for n in g.node), self.custom)
            check_types(proto, scope.opset(proto), types)
        limits.check_sizes(proto, operands)
        attributes.check_operands(proto, [nd.tensor_type(types[n]) if n else None for n in proto.input])
        schema = schemas.get_schema(proto.op_type, scope.opset(proto), _node_domain(proto))
        if (_node_domain(proto), proto.op_type) in FUNCTIONS and self.expand(schema, proto, types, scope):
            return
        inferred = inferred_types(schema, proto, types, operands, scope.opsets)
        if unroll_loop(self, proto, scope) or convert_if(self, proto, scope):
            return
        if len(operands) == len(reads) and self.fold(schema, proto, operands, inferred, scope):
            return
        # The type of an operator that waits for values is not inferred by its body.
        waits = (_node_domain(proto), proto.op_type) in self.lowered and any(n not in operands for n in shape_operands(proto))
        if not waits and any(nd.tensor_type(inferred.get(o, TypeProto())) is None for o in proto.output if o):
            inferred |= self.types_by_body(schema, proto, types, scope)
        if self.expand(schema, proto, types, scope):
            return
        self.keep(schema, proto, inferred, scope)

    def converted(self, proto: NodeProto, scope: Scope) -> NodeProto:
        """Return ``proto`` with constant operands in the type of its first operand. ONNX's version converter makes them float32
        where they were attributes."""
        places = [i for i in _MADE_FLOAT.get(proto.op_type, ()) if i < len(proto.input) and proto.input[i]]
        if not places or _node_domain(proto):
            return proto
        first = scope.values[proto.input[0]]
        dtype = self.known[first].dtype if first in self.known else np.dtype(self.types[first].dtype)
        result = proto
        for i in places:
            value = self.known.get(scope.values[proto.input[i]])
            if value is None or value.dtype == dtype or value.dtype != np.float32:
                continue
            if result is proto:
                result = NodeProto.FromString(proto.SerializeToString())
            result.input[i] = f"{proto.input[i]}:{dtype}"
            with np.errstate(over="ignore"):
                self.constant(result.input[i], value.astype(dtype), scope)
        return result

    def onnx_type(self, name: str) -> TypeProto:
        """Return the ONNX type of a value of the Graph."""
        if name in self.known:
            return nd.type_proto(self.known[name].dtype, self.known[name].shape)
        return nd.type_proto(np.dtype(self.types[name].dtype), self.types[name].shape)

    def fold_type_only(self, proto: NodeProto, scope: Scope) -> bool:
        """Fold Shape or Size of a value whose type is known. Returns False for other operators."""
        if proto.op_type not in operators(Trait.TYPE_ONLY) or _node_domain(proto):
            return False
        name = scope.values[proto.input[0]]
        shape = self.known[name].shape if name in self.known else self.types[name].shape
        self.constant(proto.output[0], nd.shape_or_size(proto, shape), scope)
        self.shaped.update([] if name in self.known else [scope.values[proto.output[0]]])
        return True

    def fold(
        self,
        schema: defs.OpSchema,
        proto: NodeProto,
        operands: Mapping[str, np.ndarray],
        inferred: Mapping[str, TypeProto],
        scope: Scope,
    ) -> bool:
        """Evaluate an operator with constant operands, unless the result is large or random. Returns True if it was folded."""
        static = {o: kind for o in proto.output if (kind := nd.tensor_type(inferred.get(o, TypeProto())))}
        made = sum(t.nbytes for t in static.values())
        read = proto.op_type == "Constant" and not _node_domain(proto)  # the file holds its value, so nothing is made
        if nd.is_random(proto) or nd.is_decoding(proto) or not (read or limits.may_fold(made, self.stored)):
            return False
        if any(a.HasField("g") for a in proto.attribute):
            return False
        shaped = not self.shaped.isdisjoint(scope.values[n] for n in operands)
        counted = shaped and any(is_float(t.dtype) for t in static.values())  # floats computed from extents
        if self.ranged is not None and (counted or not self.shaped.isdisjoint(scope.values[n] for n in shape_operands(proto))):
            return False
        try:
            values = evaluate_node(nd.plain_node(proto, schema.since_version), operands, static)
        except NotImplementedError as reason:
            if (_node_domain(proto), proto.op_type) in REGISTRY and isinstance(reason, Unjudged):
                what = f"{proto.op_type} cannot be computed from its constant operands: {reason}"
                raise BadInput(what, nd.node_title(proto), "check the model with onnx.checker") from reason
            # Without a judged implementation the operator stays, and the program names its host implementation.
            return False
        except Exception as error:
            what = f"{proto.op_type} fails on its constant operands: {nd.first_line(error)}"
            raise BadInput(what, nd.node_title(proto), "check the model with onnx.checker") from error
        for name, value in values.items():
            self.constant(name, value.astype(static[name].dtype, copy=False) if name in static else value, scope)
            self.shaped.update([scope.values[name]] if shaped else ())
        return True

    def types_by_body(
        self, schema: defs.OpSchema, proto: NodeProto, types: Mapping[str, TypeProto], scope: Scope
    ) -> dict[str, TypeProto]:
        """Infer the output types of an operator that ONNX cannot infer (GroupNormalization), by a trial walk over its body."""
        trial = Binder(
            (),
            self.custom,
            types=ChainMap({}, self.types),
            known=ChainMap({}, self.known),
            taken=Names(outer=self.taken),
            stored=self.stored,
            budget=self.budget,
        )
        names = Scope(ChainMap({}, scope.values), scope.opsets)
        if not trial.expand(schema, proto, types, names):
            return {}
        return {o: trial.onnx_type(names.values[o]) for o in proto.output if o}

    def expand(self, schema: defs.OpSchema, proto: NodeProto, types: Mapping[str, TypeProto], scope: Scope) -> bool:
        """Replace an operator without a lowering by the body that ONNX defines. Returns True if it was replaced."""
        if (_node_domain(proto), proto.op_type) in self.lowered:
            return False
        body = self.written(proto, scope) if (_node_domain(proto), proto.op_type) in FUNCTIONS else None
        if body is None and function_bodies.has_function(schema):
            body = function_bodies.expand_function(proto, types, scope.opset(proto))
        if body is None:
            return False
        actual = {formal: scope.values[n] for formal, n in zip(body.inputs, proto.input, strict=False) if n}
        inner = Scope(actual, {**scope.opsets, **body.opsets}, body.titles(proto, scope.titles))
        for name, value in body.constants.items():
            self.constant(name, value, inner)
        self.nodes_of(body.local(proto), [r for r, name in zip(body.outputs, proto.output, strict=False) if name], inner)
        for result, name in zip(body.outputs, proto.output, strict=False):
            if name:
                scope.values[name] = inner.values[result]
        return True

    def written(self, proto: NodeProto, scope: Scope) -> function_bodies.Expansion | None:
        """Return the body of an operator that is defined by our functions (``contrib``), for its operands' types and values."""
        inputs = [scope.values[n] if n else "" for n in proto.input]
        kinds = [nd.tensor_type(self.onnx_type(n)) if n else None for n in inputs]
        check_decided(proto, [n for n in proto.input if n and scope.values[n] in self.known])
        return expand_use(proto, scope.opset(proto), kinds, [self.known.get(n) for n in inputs])

    def keep(self, schema: defs.OpSchema, proto: NodeProto, inferred: Mapping[str, TypeProto], scope: Scope) -> None:
        """Add the operator as a Node. Raises Unknown if it is compiled for values that are not constant."""
        attributes, captured = nd.attributes_of(proto, scope.opsets, model_checks.free_values)
        inputs = tuple(scope.values[n] if n else "" for n in (*proto.input, *captured))
        outputs = []
        for onnx_name in proto.output:
            kind = nd.tensor_type(inferred.get(onnx_name, TypeProto()))
            if onnx_name and kind is None:
                raise make_type_error(schema, proto, onnx_name, inferred.get(onnx_name))
            # Inference also types omitted outputs.
            outputs.append(self.result(onnx_name, kind, scope) if onnx_name and kind is not None else "")
        if (_node_domain(proto), proto.op_type) in self.lowered:
            check_decided(proto, [n for n in proto.input if n and scope.values[n] in self.known])
        self.add(proto, proto.op_type, inputs, outputs, attributes, schema.since_version)

    def keep_custom(self, proto: NodeProto, operator: CustomOperator, scope: Scope) -> None:
        """Add a plugin's operator as a Node, with the types that the plugin infers and the defaults of its attributes."""
        inputs = [scope.values[n] if n else "" for n in proto.input]
        kinds = [nd.tensor_type(self.onnx_type(n)) if n else None for n in inputs]
        version = scope.opset(proto)
        attributes, found = custom.types_of(proto, operator, version, kinds, [self.known.get(n) for n in inputs])
        outputs = [self.result(o, kind, scope) if o else "" for o, kind in zip(proto.output, found, strict=True)]
        self.add(proto, operator.title, inputs, outputs, attributes, version)

    def add(
        self,
        proto: NodeProto,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Any],
        version: int,
    ) -> None:
        """Append a Node for ``proto``."""
        title = shorten_name(proto.name) or f"{proto.op_type}_{len(self.nodes)}"
        self.nodes.append(Node(op, tuple(inputs), tuple(outputs), attributes, title, _node_domain(proto), version))

    def result(self, onnx_name: str, kind: TensorType, scope: Scope) -> str:
        """Return the name of a Node's result: the reserved one for a graph output, else a new one."""
        title = scope.titles.get(onnx_name, onnx_name)
        name = self.reserved.get(title, "")
        if not name or name in self.types:
            name = make_identifier(title, self.taken)
        scope.values[onnx_name] = name
        self.types[name] = kind
        return name

    def output(self, onnx_name: str, declared: int, scope: Scope) -> Value:
        """Return the Value of a graph output. An output that is an input, a constant or another output gets an Identity."""
        name, wanted = scope.values[onnx_name], self.reserved[onnx_name]
        if declared and declared != (made := self.onnx_type(name).tensor_type.elem_type):
            what = f"output {onnx_name!r} is declared {nd.element_type(declared)}, and computed as {nd.element_type(made)}"
            raise BadInput(what, f"output {onnx_name}", "export the model again")
        if name != wanted:
            array = self.known.get(name)
            if array is not None:
                check_constant(onnx_name, array, f"output {onnx_name}")
            self.types[wanted] = self.types[name] if array is None else TensorType(str(array.dtype), array.shape)
            self.nodes.append(Node("Identity", (name,), (wanted,), {}, f"output {shorten_name(onnx_name)}", "", 19))
        return Value(wanted, self.types[wanted], onnx_name)


def _node_domain(proto: NodeProto) -> str:
    return "" if proto.domain == "ai.onnx" else proto.domain


#: Minimum size in bytes for a search for later readers of a constant.
WORTH: Final = 1 << 20


@dataclass
class Readers:
    """The readers of values of a walk over ``order``: each name's last reader, and the constants that emitted operators read."""

    order: Sequence[NodeProto]
    outputs: Collection[str]
    last: dict[str, int] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    seen: int = 0

    def __post_init__(self) -> None:
        self.last = {n: i for i, proto in enumerate(self.order) for n in model_checks.node_reads(proto)}

    def passed(
        self, place: int, nodes: Sequence[Node], names: Mapping[str, str], known: MutableMapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """Drop large constants without readers after the operator at ``place``. ``names`` maps ONNX
        names to those of the Graph."""
        self.kept.update(n for node in nodes[self.seen :] for n in node.inputs)
        self.seen = len(nodes)
        for name in self._dead_values(place, names):
            if (
                name in known
                and known[name].nbytes >= WORTH
                and name not in self.kept
                and name not in self._live_values(place, names)
            ):
                del known[name]

    def _dead_values(self, place: int, names: Mapping[str, str]) -> Iterator[str]:
        reads = dict.fromkeys(model_checks.node_reads(self.order[place]))
        return (names[n] for n in reads if self.last[n] == place and n in names)

    def _live_values(self, place: int, names: Mapping[str, str]) -> set[str]:
        """Return the values that are read later or are results: several names may refer to one value."""
        read = [*(n for n, i in self.last.items() if i > place), *self.outputs]
        return {names[n] for n in read if n in names}
