"""Chunking of a model's long Scan or Loop, for devices that repeat programs.

One light step per iteration would be a launch for a few operators. An iteration therefore runs a chunk of steps in a nested Scan
or Loop, which becomes part of its program. The chunk is small enough to have few operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.bind.bind_state import MOST_UNROLLED
from rammer.frontend.bind.loop_body import RolledTurn, rolled_turn
from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.loops.trip_count import always_goes
from rammer.frontend.read import model_checks
from rammer.frontend.read.node_protos import captured_names
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.names import Names, make_identifier
from rammer.ir.types import TensorType
from rammer.passes.loops.chunk_recurrent import turn_of
from rammer.passes.loops.recurrent_stacks import STATES

#: Maximum steps of a chunk, and minimum steps that are worth a launch.
MOST_STEPS: Final = 128
LEAST_STEPS: Final = 16
#: Maximum trip count of a Loop that the host does not supervise.
MOST_TRIPS: Final = 1 << 16


@dataclass(frozen=True)
class NestedTurns:
    """A chunk as a model, and the graph that computes its initial values."""

    graph: Graph
    turn: RolledTurn


def nested_turns(graph: Graph, node: Node) -> NestedTurns:
    """Return the chunks of a Scan or Loop of ``graph``. Raises BadInput unless the trip count is constant, equal for all inputs,
    and divisible into chunks."""
    if node.op == "Loop":
        graph, node = _scan_of(graph, node)
    body, scanned = graph_of(node.attributes["body"]), int(node.attributes["num_scan_inputs"])
    if any(any(node.attributes.get(k) or ()) for k in ("scan_input_axes", "scan_output_axes")):
        raise BadInput("it scans along an axis other than the first")
    formal = node.inputs[: len(node.inputs) - len(captured_names(node))]
    lengths = {graph.types[n].shape[0] for n in formal[len(formal) - scanned :]}
    step = _chunk_steps(body, lengths)
    return NestedTurns(graph, turn_of_steps(graph, node, len(formal) - scanned, step, lengths.pop() // step))


def _chunk_steps(body: GraphProto, lengths: set[int]) -> int:
    """Return the steps of a chunk, or raise BadInput."""
    nodes = [n for g in model_checks.graphs_below([body]) for n in g.node]
    most = min(MOST_STEPS, MOST_UNROLLED // max(len(nodes), 1))
    if len(lengths) != 1 or any(n.op_type in (*STATES, "Loop", "Scan", "If") for n in nodes):
        raise BadInput("its inputs differ in length, or its body has recurrent layers or control flow")
    (steps,) = lengths
    turn = turn_of(steps, most)
    if turn < LEAST_STEPS or steps < 2 * turn or steps % turn:
        raise BadInput(f"{steps} steps cannot be split into chunks of {LEAST_STEPS} to {most}")
    return turn


def turn_of_steps(graph: Graph, node: Node, states: int, step: int, count: int) -> RolledTurn:
    """Return one of ``count`` chunks of ``step`` steps of a Scan with ``states`` states. Values have their names in ``graph``."""
    names, types = Names(graph.types), dict(graph.types)
    scanned = int(node.attributes["num_scan_inputs"])
    first, slices = node.inputs[:states], node.inputs[states : states + scanned]

    def turned(name: str) -> str:
        kind, made = graph.types[name], make_identifier(f"{name}_turns", names)
        types[made] = TensorType(kind.dtype, (count, step, *kind.shape[1:]))
        return made

    given = {turned(n): n for n in slices}
    shown = [(turned(n) if n else "", n) for n in node.outputs[states:]]
    stacked = dict(shown)
    body = replace(node.attributes["body"], proto=_wrap_body(node).SerializeToString())
    outer = replace(
        node,
        inputs=(*first, *given, *node.inputs[states + scanned :]),
        outputs=(*node.outputs[:states], *(made for made, _ in shown)),
        attributes={**node.attributes, "body": body},
    )
    read = {i for n in graph.nodes for i in n.inputs} | {v.name for v in graph.outputs}
    ends = tuple(Value(o, types[o]) for o in outer.outputs if stacked.get(o, o) in read)
    found = rolled_turn(replace(graph, nodes=(outer,), outputs=ends, types=types), outer)
    return replace(
        found,
        slices=tuple((i, given[value], back) for i, value, back in found.slices),
        gathered=tuple((r, stacked.get(value, ""), back) for r, value, back in found.gathered),
        step=step,
    )


def _wrap_body(node: Node) -> GraphProto:
    """Return the body of a chunk: a Scan over its steps."""
    body = graph_of(node.attributes["body"])
    given, made = (_numbered_names(body, what, len(values)) for what, values in (("in", body.input), ("out", body.output)))
    kept = {k: v for k, v in node.attributes.items() if k != "body" and v}
    inner: NodeProto = helper.make_node("Scan", given, made, f"{node.name}.turn", body=body, **kept)
    return helper.make_graph([inner], f"{body.name}_turn", _make_ports(given, body.input), _make_ports(made, body.output))


def _numbered_names(body: GraphProto, what: str, count: int) -> list[str]:
    return [f"{body.name}.turn.{what}{i}" for i in range(count)]


def _make_ports(names: Iterable[str], like: Iterable[Any]) -> list[Any]:
    found = []
    for name, port in zip(names, like, strict=True):
        value = helper.make_empty_tensor_value_info(name)
        value.type.tensor_type.elem_type = port.type.tensor_type.elem_type
        found.append(value)
    return found


# --- loops ------------------------------------------------------------------------------------------


def _scan_of(graph: Graph, node: Node) -> tuple[Graph, Node]:
    """Return a Loop with constant trip count and true condition as a Scan over its indices."""
    formal = node.inputs[: len(node.inputs) - len(captured_names(node))]
    trips, going = (graph.constant(n) if n else None for n in formal[:2])
    body = graph_of(node.attributes["body"])
    outer = zip(captured_names(node), node.inputs[len(formal) :], strict=True)
    known = {n: graph.constants[o] for n, o in outer if o in graph.constants}
    if trips is None or (formal[1] and (going is None or not bool(going.all()))) or not always_goes(body, known):
        raise BadInput("its trip count is unknown")
    if not 0 < int(trips.item()) <= MOST_TRIPS:
        raise BadInput(f"its trip count is {int(trips.item())}")
    index = make_identifier(f"{node.outputs[0] or node.name}_indices", Names(graph.types))
    count = np.arange(int(trips.item()), dtype=np.int64)
    constants = {**graph.constants, index: count}
    types = {**graph.types, index: TensorType("int64", count.shape)}
    scan = replace(
        node,
        op="Scan",
        inputs=(*formal[2:], index, *node.inputs[len(formal) :]),
        attributes={
            "body": replace(node.attributes["body"], proto=_to_scan_body(body).SerializeToString()),
            "num_scan_inputs": 1,
        },
    )
    nodes = tuple(scan if n is node else n for n in graph.nodes)
    return replace(graph, nodes=nodes, types=types, constants=constants), scan


def _to_scan_body(body: GraphProto) -> GraphProto:
    """Return a Loop's body as a Scan body: the index is its last input, and the condition is true."""
    made, (index, condition, *states) = GraphProto(), body.input
    made.CopyFrom(body)
    del made.input[:], made.output[:]
    made.input.extend([*states, index])
    made.output.extend(body.output[1:])
    yes = numpy_helper.from_array(np.array(True))
    made.node.insert(0, helper.make_node("Constant", [], [condition.name], value=yes))
    for value in made.input:
        if value.name == index.name:
            value.type.tensor_type.elem_type = TensorProto.INT64
    return made
