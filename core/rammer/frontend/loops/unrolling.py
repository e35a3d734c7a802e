"""Control flow that is resolved at compile time and merged into the surrounding program.

An If with a constant condition becomes its branch. A Loop with constant trip count and conditions, and a Scan, are unrolled if
all iterations together are few operators. ``jit.control_flow`` compiles the bodies of the remaining operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, helper

from rammer.errors import BadInput
from rammer.frontend.bind.bind_state import MOST_UNROLLED, BindState, Scope, TooManyOperators
from rammer.frontend.loops.control_operators import CONTROL
from rammer.frontend.loops.trip_count import loop_trips, unrolled_size
from rammer.frontend.lower.contrib import FUNCTIONS
from rammer.frontend.read import function_bodies, model_checks, schemas


def unroll_loop(walk: BindState, proto: NodeProto, scope: Scope) -> bool:
    """Replace a Loop or Scan with its iterations; return False if it stays an operator. Nodes added to ``walk`` are removed if
    unrolling fails."""
    if proto.op_type not in ("Loop", "Scan") or proto.domain not in ("", "ai.onnx"):
        return False
    if walk.ranged is None:
        return _try_unroll(walk, proto, scope)
    with walk.ranged.met(_steps_of(walk, proto, scope)) as stays:
        return not stays and _try_unroll(walk, proto, scope)


def _steps_of(walk: BindState, proto: NodeProto, scope: Scope) -> int | None:
    """Return the number of iterations of a Loop or Scan, or None if it is not constant."""
    attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
    names = [scope.values[n] if n else "" for n in proto.input]
    if proto.op_type == "Loop":
        known = {n: walk.known[v] for n in model_checks.node_reads(proto) if (v := scope.values[n]) in walk.known}
        return loop_trips(attributes["body"], walk.known.get(names[0]), walk.known.get(names[1]), not names[1], known)
    first = names[-attributes["num_scan_inputs"]]
    shape = walk.known[first].shape if first in walk.known else walk.types[first].shape
    axis = (attributes.get("scan_input_axes") or [0])[0]
    return shape[axis] if -len(shape) <= axis < len(shape) else None


def _try_unroll(walk: BindState, proto: NodeProto, scope: Scope) -> bool:
    made, inside = len(walk.nodes), walk.budget.left is not None
    try:
        with walk.budget.of_loop():
            steps = _Steps.of(walk, proto, scope)
            done = steps is not None and (steps.loop() if proto.op_type == "Loop" else steps.scan())
    except BadInput:  # a data-dependent shape, or an error that running the loop reports better
        done = False
    except TooManyOperators:
        if inside:
            raise
        done = False
    if not done:
        del walk.nodes[made:]
    return done


def branch_taken(walk: BindState, proto: NodeProto, scope: Scope) -> bool:
    """Replace an If that has a constant condition with its branch; return False if the condition is not constant."""
    if proto.op_type != "If" or proto.domain not in ("", "ai.onnx"):
        return False
    condition = walk.known.get(scope.values[proto.input[0]])
    if condition is None:
        return False
    wanted = "then_branch" if bool(condition.all()) else "else_branch"
    branch = next(a.g for a in proto.attribute if a.name == wanted)
    inner = scope.inner()
    walk.initializers(branch, inner)
    order = model_checks.sorted_nodes(branch, scope.values)
    walk.nodes_of(order, [o.name for o in branch.output], inner)
    for outer, result in zip(proto.output, branch.output, strict=True):
        scope.values[outer] = inner.values[result.name]
    return True


@dataclass
class _Steps:
    """A loop that is being unrolled, with its body; ``base`` is the scope of the body's constants."""

    walk: BindState
    proto: NodeProto
    scope: Scope
    body: GraphProto
    base: Scope
    attributes: Mapping[str, Any]
    most: int

    @staticmethod
    def of(walk: BindState, proto: NodeProto, scope: Scope) -> _Steps | None:
        """Return the unrolling of ``proto``, or None if an operator of its body has no tensor expression."""
        body = next(a.g for a in proto.attribute if a.name == "body")
        # Scan 8 starts with optional lengths; ONNX's converter to version 9 keeps them.
        if len(body.input) != len(proto.input) or (proto.op_type == "Scan" and "" in proto.input):
            return None
        nodes = [n for g in model_checks.graphs_below([body]) for n in g.node]
        if not all(_has_expression(walk, node, scope) for node in nodes):
            return None
        base = scope.inner()
        walk.initializers(body, base)
        attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute if a.name != "body"}
        known = {n: walk.known[v] for n in model_checks.node_reads(proto) if (v := scope.values[n]) in walk.known}
        return _Steps(walk, proto, scope, body, base, attributes, MOST_UNROLLED // max(unrolled_size(body, known), 1))

    def loop(self) -> bool:
        """Unroll "for (int i=0; i < max_trip_count && cond; ++i)" if both are constant; return False otherwise."""
        trips, condition = self._known(0), self._known(1) if self.proto.input[1] else np.array(True)
        if trips is None or condition is None or (turns := int(trips.item())) > self.most:  # one element, of any rank
            return False
        state = [self.scope.values[n] for n in self.proto.input[2:]]
        scanned: list[list[str]] = [[] for _ in self.body.output[1 + len(state) :]]
        going, step = bool(condition.all()), 0
        while going and step < turns:
            inner = self.base.inner()
            self.walk.constant(self.body.input[0].name, np.array(step, np.int64), inner)
            self.walk.constant(self.body.input[1].name, np.array(True), inner)
            cond, *results = self._step(inner, self.body.input[2:], state)
            if cond not in self.walk.known:
                return False
            going, state = bool(self.walk.known[cond].all()), results[: len(state)]
            for made, value in zip(scanned, results[len(state) :], strict=True):
                made.append(value)
            step += 1
        return self._bind_results(state, [(made, 0) for made in scanned])

    def scan(self) -> bool:
        """Unroll one iteration per slice of the scanned inputs, along the axes and in the directions of the attributes."""
        count = int(self.attributes["num_scan_inputs"])
        names = list(self.proto.input)
        state = [self.scope.values[n] for n in names[: len(names) - count]]
        scanning = [self.scope.values[n] for n in names[len(names) - count :]]
        shapes = [self._shape(n) for n in scanning]
        places = list(self.attributes.get("scan_input_axes") or (0,) * count)
        axes = [a + len(s) * (a < 0) for a, s in zip(places, shapes, strict=True)]
        back = list(self.attributes.get("scan_input_directions") or (0,) * count)
        lengths = {s[a] for s, a in zip(shapes, axes, strict=True)}
        if len(lengths) != 1 or max(lengths) > self.most:
            return False
        (length,) = lengths
        scanned: list[list[str]] = [[] for _ in self.body.output[len(state) :]]
        for step in range(length):
            inner = self.base.inner()
            at = [length - 1 - step if b else step for b in back]
            slices = [self._slice(x, i, a, inner) for x, i, a in zip(scanning, at, axes, strict=True)]
            results = self._step(inner, self.body.input, [*state, *slices])
            state = results[: len(state)]
            for made, value in zip(scanned, results[len(state) :], strict=True):
                made.append(value)
        ends = list(self.attributes.get("scan_output_axes") or (0,) * len(scanned))
        turned = list(self.attributes.get("scan_output_directions") or (0,) * len(scanned))
        parts = [(made[::-1] if b else made, a) for made, a, b in zip(scanned, ends, turned, strict=True)]
        return self._bind_results(state, parts)

    def _known(self, place: int) -> np.ndarray | None:
        """Return the value of an operand, or None if it is absent or not constant."""
        return self.walk.known.get(self.scope.values[self.proto.input[place]]) if self.proto.input[place] else None

    def _shape(self, name: str) -> tuple[int, ...]:
        known = self.walk.known.get(name)
        return known.shape if known is not None else self.walk.types[name].shape

    def _step(self, inner: Scope, formal: Sequence[Any], given: Sequence[str]) -> list[str]:
        """Bind the body once and return the names of its results."""
        self.walk.budget.spend(len(self.body.node))
        inner.values.update({v.name: name for v, name in zip(formal, given, strict=True)})
        order = model_checks.sorted_nodes(self.body, inner.values)
        self.walk.nodes_of(order, [o.name for o in self.body.output], inner)
        return [inner.values[o.name] for o in self.body.output]

    def _slice(self, name: str, place: int, axis: int, scope: Scope) -> str:
        return self._emit_node("Gather", [name, np.array(place, np.int64)], scope, axis=axis)

    def _emit_node(self, op: str, operands: Sequence[str | np.ndarray], scope: Scope, **attributes: Any) -> str:
        """Add one ONNX operator on values of the Graph and constants; return the name of its result."""
        inner = scope.inner()
        names = [f"{self.proto.name or self.proto.op_type}/{op}{i}" for i in range(len(operands) + 1)]
        for name, value in zip(names, operands, strict=False):
            if isinstance(value, str):
                inner.values[name] = value
            else:
                self.walk.constant(name, value, inner)
        self.walk.step(helper.make_node(op, names[:-1], names[-1:], **attributes), inner)
        return inner.values[names[-1]]

    def _bind_results(self, state: Sequence[str], scanned: Sequence[tuple[Sequence[str], int]]) -> bool:
        """Bind the outputs to the last states and to the results of all iterations, concatenated along a new axis. Return False
        if no type or extent can be derived."""
        results = list(state)
        for (parts, axis), wanted in zip(scanned, self.proto.output[len(state) :], strict=False):
            if not wanted:
                results.append("")
                continue
            shapes = {self._shape(p) for p in parts}
            if len(shapes) != 1 or 0 in (shape := shapes.pop()):  # neither a type nor a count can be derived
                return False
            at = axis + (len(shape) + 1) * (axis < 0)
            target = np.array([*shape[:at], 1, *shape[at:]], np.int64)
            rows = [self._emit_node("Reshape", [p, target], self.base) for p in parts]
            results.append(self._emit_node("Concat", rows, self.base, axis=at) if len(rows) > 1 else rows[0])
        self.scope.values.update({n: r for n, r in zip(self.proto.output, results, strict=False) if n})
        return True


def _has_expression(walk: BindState, node: NodeProto, scope: Scope) -> bool:
    """Return True if an operator becomes tensor expressions, judged by its name."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if (domain, node.op_type) in walk.lowered or (domain, node.op_type) in FUNCTIONS or (not domain and node.op_type in CONTROL):
        return True
    if domain not in scope.opsets or not schemas.has_schema(node.op_type, scope.opset(node), domain):
        return False  # an operator of a plugin
    return function_bodies.has_function(schemas.get_schema(node.op_type, scope.opset(node), domain))
