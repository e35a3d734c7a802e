"""Loops and Scans with a dynamic trip count: a chunk of each, with masked steps after the last. A loop of ``n`` steps becomes one
of more steps, which keep its states from step ``n`` on. Their other results are undefined, since they are past the length."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Final

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from rammer.frontend.bind.bind_state import MOST_UNROLLED
from rammer.frontend.bind.loop_body import DOMAIN, TURNS, RolledTurn
from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.loops.trip_count import always_goes
from rammer.frontend.read import model_checks
from rammer.frontend.read.node_protos import SubGraph, captured_names, carried_dtypes
from rammer.ir.graph import Graph, Node
from rammer.ir.names import Names
from rammer.ir.types import TensorType
from rammer.passes.loops.chunk_recurrent import MadeNodes
from rammer.passes.loops.chunk_scan import MOST_STEPS, turn_of_steps
from rammer.passes.loops.recurrent_stacks import STATES
from rammer.passes.rewrite import rebuild_graph

#: Number of operators that an operator with inner steps counts as.
HEAVY: Final = 32


def is_loop(node: Node) -> bool:
    """Return True if a node is a Loop or Scan."""
    return node.op in ("Loop", "Scan") and not node.domain


def loop_title(node: Node) -> str:
    """Return the name that identifies a loop: its first result."""
    return next(filter(None, node.outputs), "")


@dataclass(frozen=True)
class OpenLoop:
    """A loop in a graph: the ``node`` in its place, one ``turn`` (chunk) as a model, and the int64 scalar of its trip count."""

    node: Node
    turn: RolledTurn
    steps: str


def forward_loops(graph: Graph) -> tuple[Graph, dict[str, int]]:
    """Return ``graph`` with forward Scans along first axes, and the constant trip counts of loops by title."""
    made, nodes, steps = MadeNodes(Names(graph.types), 0), list[Node](), dict[str, int]()
    for node in graph.nodes:
        count = _trip_count(graph, node) if is_loop(node) and not carried_dtypes(node) else None
        if count is None or not loop_title(node):
            nodes.append(node)
            continue
        made.nodes = list[Node]()
        ahead = _Ahead(graph, node, made).scan() if node.op == "Scan" else node
        nodes += made.nodes or [node]
        steps[loop_title(ahead)] = count
    return rebuild_graph(replace(graph, types={**graph.types, **made.types}), nodes, made.constants), steps


def _trip_count(graph: Graph, node: Node) -> int | None:
    """Return the constant trip count of a loop, or None if it is decided at run time."""
    formal = node.inputs[: len(node.inputs) - len(captured_names(node))]
    body = graph_of(node.attributes["body"])
    if node.op == "Loop":
        trips, going = (graph.constant(n) if n else None for n in formal[:2])
        held = not formal[1] or (going is not None and bool(going.all()))
        outer = zip(captured_names(node), node.inputs[len(formal) :], strict=True)
        known = {n: graph.constants[o] for n, o in outer if o in graph.constants}
        return max(int(trips.item()), 0) if trips is not None and held and always_goes(body, known) else None
    scanned = int(node.attributes["num_scan_inputs"])
    axes = node.attributes.get("scan_input_axes") or (0,) * scanned
    found = {graph.types[n].shape[a] for n, a in zip(formal[len(formal) - scanned :], axes, strict=True)}
    return found.pop() if len(found) == 1 and len(formal) == len(body.input) else None


class _Ahead:
    """Rewrite of a Scan to run forward along first axes, with its inputs and results reordered outside."""

    def __init__(self, graph: Graph, node: Node, made: MadeNodes) -> None:
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
            name = self.made.node("Transpose", [name], kind, self.made.fresh(f"{name}_ahead", kind), perm=order)
        return self._reverse_steps(name, kind, self.made.fresh(f"{name}_back", kind)) if back else name

    def _reverse_steps(self, name: str, kind: TensorType, result: str) -> str:
        bounds = [self.made.constant(np.array([n], np.int64), f"{result}_bound") for n in (-1, -(1 << 31), 0, -1)]
        return self.made.node("Slice", [name, *bounds], kind, result)

    def _restore_axis(self, outputs: list[str], place: int, axis: int, back: int) -> list[Node]:
        """Return the nodes that restore an output from the values that the Scan gathers along the first axis."""
        name, made, before = outputs[place], self.made, len(self.made.nodes)
        kind, rank = self.graph.types[name], len(self.graph.types[name].shape)
        axis %= rank
        first = TensorType(kind.dtype, (kind.shape[axis], *kind.shape[:axis], *kind.shape[axis + 1 :]))
        found = outputs[place] = made.fresh(f"{name}_ahead", first)
        if back:
            found = self._reverse_steps(found, first, made.fresh(f"{name}_back", first) if axis else name)
        if axis:
            made.node("Transpose", [found], kind, name, perm=(*range(1, axis + 1), 0, *range(axis + 1, rank)))
        restoring = made.nodes[before:]
        del made.nodes[before:]
        return restoring


# --- chunks -----------------------------------------------------------------------------------------


def steps_of_turn(node: Node, least: int, most: int, between: int) -> int:
    """Return the steps of a chunk of a loop of ``least`` to ``most`` steps; ``between`` is the cost between chunks, in steps."""
    body = graph_of(node.attributes["body"])
    found = [n for g in model_checks.graphs_below([body]) for n in g.node]
    size = sum(HEAVY if n.op_type in (*STATES, "Loop", "Scan") else 1 for n in found) + len(body.output)
    turn = min(MOST_STEPS, max(MOST_UNROLLED // size, 1), isqrt(between * (max(least, 1) + most)), most)
    turn = max(turn, 1)
    return -(-most // -(-most // turn))


def opened_loop(graph: Graph, node: Node, turn: int, count: int, plain: bool, same: Collection[str]) -> tuple[Graph, OpenLoop]:
    """Return ``graph`` with a node for ``count`` chunks of ``turn`` steps in place of a loop.

    If ``plain``, its trip count is a length that is named later; otherwise it is computed. ``same`` are constants that are equal
    at all lengths, up to their extent."""
    steps, made = _trip_count(graph, node), MadeNodes(Names(graph.types), node.version)
    assert steps is not None, "forward_loops reports the known ones"
    formal = len(node.inputs) - len(captured_names(node))
    split = 2 if node.op == "Loop" else 0, formal - int(node.attributes.get("num_scan_inputs", 0))
    given = [_wrap_varying_constant(graph, made, n, same) for n in node.inputs[split[0] : formal]]
    index = made.constant(np.arange(count * turn, dtype=np.int64), f"{loop_title(node)}_indices")
    number = TensorType("int64", ())
    left = made.fresh(f"{loop_title(node)}_steps", number)
    if not plain:
        known = made.constant(np.array(steps, np.int64), f"{loop_title(node)}_known")
        made.node("Identity", [known], number, left)
    body = node.attributes["body"]
    masked = replace(
        body, proto=_mask_body(body, node.op == "Loop", split[1] - split[0]), captures=(*body.captures, _steps_name(body))
    )
    scan = replace(
        node,
        op="Scan",
        inputs=(*given, index, *node.inputs[formal:], left),
        attributes={"body": masked, "num_scan_inputs": formal - split[1] + 1},
    )
    whole = replace(graph, types={**graph.types, **made.types}, constants={**graph.constants, **made.constants})
    states = split[1] - split[0]
    rolled = turn_of_steps(whole, scan, states, turn, count)
    read = tuple(i for i in scan.inputs if i and not (plain and i == left))
    placed = Node(TURNS, read, tuple(filter(None, node.outputs)), {}, node.name, DOMAIN, node.version)
    nodes = [m for n in graph.nodes for m in ([*made.nodes, placed] if n is node else [n])]
    return rebuild_graph(replace(graph, types=whole.types), nodes, made.constants), OpenLoop(placed, rolled, left)


def _wrap_varying_constant(graph: Graph, made: MadeNodes, name: str, same: Collection[str]) -> str:
    """Return ``name``, or an Identity of it if the constant differs between lengths."""
    if name not in graph.constants or name in same:
        return name
    kind = graph.types[name]
    return made.node("Identity", [name], kind, made.fresh(f"{name}_value", kind))


def _fresh_prefix(body: GraphProto) -> str:
    """Return a prefix of no name in a body."""
    graphs = [*model_checks.graphs_below([body])]
    taken = {n for g in graphs for node in g.node for n in (*node.input, *node.output)}
    taken |= {v.name for g in graphs for v in (*g.input, *g.output, *g.initializer)}
    return next(p for p in (f"open{'_' * i}." for i in range(len(taken) + 1)) if not any(n.startswith(p) for n in taken))


def _steps_name(body: SubGraph) -> str:
    return f"{_fresh_prefix(graph_of(body))}steps"


def _mask_body(body: SubGraph, loop: bool, states: int) -> bytes:
    """Return a body whose last input is the step's number; its states are kept once that reaches the trip count."""
    made, prefix = GraphProto(), _fresh_prefix(graph_of(body))
    made.CopyFrom(graph_of(body))
    formal, results = list(made.input)[2 if loop else 0 :], list(made.output)[1 if loop else 0 :]
    at = helper.make_tensor_value_info(f"{prefix}at", TensorProto.INT64, [])
    before: list[NodeProto] = []
    if loop:
        yes = numpy_helper.from_array(np.array(True))
        before.append(helper.make_node("Identity", [at.name], [made.input[0].name]))
        before.append(helper.make_node("Constant", [], [made.input[1].name], value=yes))
    before.append(helper.make_node("Less", [at.name, f"{prefix}steps"], [f"{prefix}on"]))
    restoring, ends = list[NodeProto](), list[Any]()
    for i, (old, new) in enumerate(zip(formal[:states], results[:states], strict=True)):
        ends.append(helper.make_empty_tensor_value_info(f"{prefix}state{i}"))
        ends[-1].type.CopyFrom(new.type)
        restoring.append(helper.make_node("Where", [f"{prefix}on", new.name, old.name], [ends[-1].name]))
    nodes = [*before, *made.node, *restoring]
    whole = helper.make_graph(nodes, made.name or "body", [*formal, at], [*ends, *results[states:]], made.initializer)
    data: bytes = whole.SerializeToString()
    return data
