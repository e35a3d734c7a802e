"""Chunks of a model's Scan or Loop, for devices that repeat programs.

One light step per iteration would be a launch for a few operators. An iteration therefore runs a chunk of steps in a nested Scan,
which becomes part of its program. The chunk is small enough to have few operators.

A loop is a Scan over its indices. If its trip count depends on a length, the steps of a chunk past the trip count are masked: the
loop of ``n`` steps becomes one of more steps, which keep its states from step ``n`` on. Their other results are undefined, since
they are past the length."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import GraphProto

from rammer.errors import BadInput
from rammer.frontend.bind.loop_body import DOMAIN, TURNS, RolledTurn, chunk_turn
from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.loops.loop_chunk import STATES, even_steps, most_steps, nested_scan, step_body, unused_prefix
from rammer.frontend.loops.trip_count import loop_trips
from rammer.frontend.read import model_checks
from rammer.frontend.read.node_protos import captured_names, carried_dtypes
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import NodeBuilder, output_names, rebuild_graph
from rammer.ir.names import Names, make_identifier
from rammer.ir.types import TensorType

#: Minimum steps of a chunk that are worth a launch.
LEAST_STEPS: Final = 16
#: Maximum trip count of a Loop that the host does not supervise.
MOST_TRIPS: Final = 1 << 16


def is_loop(node: Node) -> bool:
    """Return True if a node is a Loop or Scan."""
    return node.op in ("Loop", "Scan") and not node.domain


def loop_title(node: Node) -> str:
    """Return the name that identifies a loop: its first result."""
    return next(filter(None, node.outputs), "")


def forward_loops(graph: Graph) -> tuple[Graph, dict[str, int]]:
    """Return ``graph`` with forward Scans along first axes, and the constant trip counts of loops by title."""
    made, nodes, steps = NodeBuilder(Names(graph.types), 0), list[Node](), dict[str, int]()
    for node in graph.nodes:
        count = trip_count(graph, node) if is_loop(node) and not carried_dtypes(node) else None
        if count is None or not loop_title(node):
            nodes.append(node)
            continue
        made.nodes = list[Node]()
        ahead = _Ahead(graph, node, made).scan() if node.op == "Scan" else node
        nodes += made.nodes or [node]
        steps[loop_title(ahead)] = count
    return rebuild_graph(replace(graph, types={**graph.types, **made.types}), nodes, made.constants), steps


def trip_count(graph: Graph, node: Node) -> int | None:
    """Return the constant trip count of a loop, or None if it is decided at run time."""
    first, states, formal = _split_inputs(node)
    body = graph_of(node.attributes["body"])
    if node.op == "Loop":
        outer = zip(captured_names(node), node.inputs[formal:], strict=True)
        known = {n: graph.constants[o] for n, o in outer if o in graph.constants}
        trips, going = (graph.constant(n) if n else None for n in node.inputs[:2])
        return loop_trips(body, trips, going, not node.inputs[1], known)
    sliced = node.inputs[first + states : formal]
    axes = node.attributes.get("scan_input_axes") or (0,) * len(sliced)
    found = {graph.types[n].shape[a] for n, a in zip(sliced, axes, strict=True)}
    return found.pop() if len(found) == 1 and formal == len(body.input) else None


class _Ahead:
    """Rewrite of a Scan to run forward along first axes, with its inputs and results reordered outside."""

    def __init__(self, graph: Graph, node: Node, made: NodeBuilder) -> None:
        self.graph, self.node, self.made, made.version = graph, node, made, node.version
        self.scanned = int(node.attributes["num_scan_inputs"])
        self.formal = len(node.inputs) - len(captured_names(node))
        self.states = self.formal - self.scanned

    def _each(self, what: str, count: int) -> Sequence[int]:
        return [int(n) for n in self.node.attributes.get(what) or (0,) * count]

    def scan(self) -> Node:
        """Return the rewritten Scan; all nodes are added to ``made``."""
        node, graph, made = self.node, self.graph, self.made
        inputs, outputs, restoring = list(node.inputs), list(node.outputs), list[Node]()
        ways = zip(self._each("scan_input_axes", self.scanned), self._each("scan_input_directions", self.scanned), strict=True)
        for i, (axis, back) in enumerate(ways, self.states):
            inputs[i] = self._turned(inputs[i], graph.types[inputs[i]], axis, back)
        gathered = len(graph_of(node.attributes["body"]).output) - self.states
        ends = list(zip(self._each("scan_output_axes", gathered), self._each("scan_output_directions", gathered), strict=True))
        for i, name in enumerate(outputs[self.states :], self.states):
            axis, back = ends[i - self.states]
            if name and (axis or back):
                restoring += self._restore_axis(outputs, i, axis, back)
        kept = {k: v for k, v in node.attributes.items() if k in ("body", "num_scan_inputs")}
        found = replace(node, inputs=tuple(inputs), outputs=tuple(outputs), attributes=kept)
        made.nodes += [found, *restoring]
        return found

    def _turned(self, name: str, kind: TensorType, axis: int, back: int) -> str:
        """Return ``name`` with ``axis`` moved first and, if ``back``, reversed."""
        rank = len(kind.shape)
        order = (axis % rank, *(d for d in range(rank) if d != axis % rank))
        if axis % rank:
            kind = TensorType(kind.dtype, tuple(kind.shape[d] for d in order))
            name = self.made.add_node("Transpose", [name], self.made.new_value(f"{name}_ahead", kind), perm=order)
        return self._reverse_steps(name, self.made.new_value(f"{name}_back", kind)) if back else name

    def _reverse_steps(self, name: str, result: str) -> str:
        bounds = [self.made.add_constant(f"{result}_bound", np.array([n], np.int64)) for n in (-1, -(1 << 31), 0, -1)]
        return self.made.add_node("Slice", [name, *bounds], result)

    def _restore_axis(self, outputs: list[str], place: int, axis: int, back: int) -> list[Node]:
        """Return the nodes that restore an output from the values that the Scan gathers along the first axis."""
        name, made, before = outputs[place], self.made, len(self.made.nodes)
        kind, rank = self.graph.types[name], len(self.graph.types[name].shape)
        axis %= rank
        first = TensorType(kind.dtype, (kind.shape[axis], *kind.shape[:axis], *kind.shape[axis + 1 :]))
        found = outputs[place] = made.new_value(f"{name}_ahead", first)
        if back:
            found = self._reverse_steps(found, made.new_value(f"{name}_back", first) if axis else name)
        if axis:
            made.add_node("Transpose", [found], name, perm=(*range(1, axis + 1), 0, *range(axis + 1, rank)))
        restoring = made.nodes[before:]
        del made.nodes[before:]
        return restoring


# --- chunks ----------------------------------------------------------------------------------------


def turn_of_steps(graph: Graph, node: Node, states: int, step: int, count: int) -> RolledTurn:
    """Return one of ``count`` chunks of ``step`` steps of a Scan with ``states`` states. Values have their names in ``graph``."""
    names, types, body = Names(graph.types), dict(graph.types), node.attributes["body"]
    scanned = int(node.attributes["num_scan_inputs"])
    first, slices = node.inputs[:states], node.inputs[states : states + scanned]

    def turned(name: str) -> str:
        kind, made = graph.types[name], make_identifier(f"{name}_turns", names)
        types[made] = TensorType(kind.dtype, (count, step, *kind.shape[1:]))
        return made

    given = {turned(n): n for n in slices}
    shown = [(turned(n) if n else "", n) for n in node.outputs[states:]]
    inner = nested_scan(graph_of(body), f"{node.name}.turn", {k: v for k, v in node.attributes.items() if k != "body" and v})
    outer = replace(
        node,
        inputs=(*first, *given, *node.inputs[states + scanned :]),
        outputs=(*node.outputs[:states], *(made for made, _ in shown)),
        attributes={**node.attributes, "body": replace(body, proto=inner.SerializeToString())},
    )
    read = {i for n in graph.nodes for i in n.inputs} | output_names(graph)
    ends = {made: n for made, n in (*((n, n) for n in node.outputs[:states]), *shown) if n in read}
    return chunk_turn(replace(graph, types=types), outer, {**given, **ends}, step)


# --- constant trip counts ---------------------------------------------------------------------------


def static_chunk(graph: Graph, node: Node) -> tuple[Graph, RolledTurn]:
    """Return the chunks of a Scan or Loop of ``graph``, and the graph that computes their initial values. Raises BadInput unless
    the trip count is constant and divisible into chunks."""
    if any(any(node.attributes.get(k) or ()) for k in ("scan_input_axes", "scan_output_axes")):
        raise BadInput("it scans along an axis other than the first")
    steps, made = trip_count(graph, node), NodeBuilder(Names(graph.types), node.version)
    if steps is None:
        raise BadInput("its trip count is unknown, or its inputs differ in length")
    if node.op == "Loop" and not 0 < steps <= MOST_TRIPS:
        raise BadInput(f"its trip count is {steps}")
    step = _chunk_steps(graph_of(node.attributes["body"]), steps)
    scan, states = (node, _split_inputs(node)[1]) if node.op == "Scan" else _to_scan(node, made, steps, "")
    nodes = tuple(scan if n is node else n for n in graph.nodes)
    constants, types = {**graph.constants, **made.constants}, {**graph.types, **made.types}
    whole = replace(graph, nodes=nodes, types=types, constants=constants)
    return whole, turn_of_steps(whole, scan, states, step, steps // step)


def _chunk_steps(body: GraphProto, steps: int) -> int:
    """Return the steps of a chunk, or raise BadInput."""
    if any(n.op_type in (*STATES, "Loop", "Scan", "If") for g in model_checks.graphs_below([body]) for n in g.node):
        raise BadInput("its body has recurrent layers or control flow")
    most = most_steps(body)
    turn = even_steps(steps, most)
    if turn < LEAST_STEPS or steps < 2 * turn or steps % turn:
        raise BadInput(f"{steps} steps cannot be split into chunks of {LEAST_STEPS} to {most}")
    return turn


# --- trip counts that depend on a length ------------------------------------------------------------


@dataclass(frozen=True)
class OpenLoop:
    """A loop in a graph: the ``node`` in its place, one ``turn`` (chunk) as a model, and the int64 scalar of its trip count."""

    node: Node
    turn: RolledTurn
    steps: str


def opened_loop(graph: Graph, node: Node, turn: int, count: int, plain: bool, same: Collection[str]) -> tuple[Graph, OpenLoop]:
    """Return ``graph`` with a node for ``count`` chunks of ``turn`` steps in place of a loop.

    If ``plain``, its trip count is a length that is named later; otherwise it is computed. ``same`` are constants that are equal
    at all lengths, up to their extent."""
    steps, made = trip_count(graph, node), NodeBuilder(Names(graph.types), node.version)
    assert steps is not None, "forward_loops reports the known ones"
    first, _, formal = _split_inputs(node)
    given = [_wrap_varying_constant(graph, made, n, same) for n in node.inputs[first:formal]]
    left = made.new_value(f"{loop_title(node)}_steps", TensorType("int64", ()))
    if not plain:
        known = made.add_constant(f"{loop_title(node)}_known", np.array(steps, np.int64))
        made.add_node("Identity", [known], left)
    wrapped = replace(node, inputs=(*node.inputs[:first], *given, *node.inputs[formal:]))
    scan, states = _to_scan(wrapped, made, count * turn, left)
    whole = replace(graph, types={**graph.types, **made.types}, constants={**graph.constants, **made.constants})
    rolled = turn_of_steps(whole, scan, states, turn, count)
    read = tuple(i for i in scan.inputs if i and not (plain and i == left))
    placed = Node(TURNS, read, tuple(filter(None, node.outputs)), {}, node.name, DOMAIN, node.version)
    nodes = [m for n in graph.nodes for m in ([*made.nodes, placed] if n is node else [n])]
    return rebuild_graph(replace(graph, types=whole.types), nodes, made.constants), OpenLoop(placed, rolled, left)


def _wrap_varying_constant(graph: Graph, made: NodeBuilder, name: str, same: Collection[str]) -> str:
    """Return ``name``, or an Identity of it if the constant differs between lengths."""
    if name not in graph.constants or name in same:
        return name
    return made.add_node("Identity", [name], made.new_value(f"{name}_value", graph.types[name]))


# --- Scans over indices -----------------------------------------------------------------------------


def _split_inputs(node: Node) -> tuple[int, int, int]:
    """Return the number of inputs before a loop's first state, the number of its states, and the number of inputs in all,
    without captured values."""
    first, formal = 2 if node.op == "Loop" else 0, len(node.inputs) - len(captured_names(node))
    return first, formal - int(node.attributes.get("num_scan_inputs", 0)) - first, formal


def _to_scan(node: Node, made: NodeBuilder, extent: int, left: str) -> tuple[Node, int]:
    """Return a loop of ``extent`` steps as a Scan whose last input is the index of the step, and its number of states. If
    ``left`` names the trip count, steps past it keep the states."""
    first, states, formal = _split_inputs(node)
    body = node.attributes["body"]
    index = made.add_constant(f"{loop_title(node) or node.name}_indices", np.arange(extent, dtype=np.int64))
    until = f"{unused_prefix(body)}steps" if left else ""
    proto = step_body(body, node.op == "Loop", states, until).SerializeToString()
    captures = (*body.captures, *([until] if left else ()))
    scan = replace(
        node,
        op="Scan",
        inputs=(*node.inputs[first:formal], index, *node.inputs[formal:], *([left] if left else ())),
        attributes={"body": replace(body, proto=proto, captures=captures), "num_scan_inputs": formal - first - states + 1},
    )
    return scan, states
