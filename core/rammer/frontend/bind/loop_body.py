"""One iteration of a Scan with uniform iterations, as a model: the source of a loop program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import NodeProto, ValueInfoProto, helper

from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.loops.loop_chunk import body_model
from rammer.frontend.lower.graph_lowering import Lowerings
from rammer.frontend.read.node_protos import SubGraph, captured_names, carried_dtypes
from rammer.frontend.read.reader import Model
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.port import ModelPort
from rammer.ir.types import TensorType

#: The domain of the node that represents all iterations of recurrent layers with a dynamic trip count; models never use it.
DOMAIN: Final = "rammer.turns"
TURNS: Final = f"{DOMAIN}.Turns"
#: Prefix of the operators at the end of an iteration, which give each result a separate value.
_END = "turn.end"


def is_turns(node: Node) -> bool:
    """Return True if a node represents the iterations of recurrent layers."""
    return node.op == TURNS


@dataclass(frozen=True)
class RolledTurn:
    """One iteration of a Scan as a ``model``, with the roles of its values.

    ``states`` are (input, first value, output, last value). ``slices`` and ``gathered`` are (input or output, the value of all
    iterations, reversed). ``fixed`` are (input, value). Inputs and outputs are names of the model, values are names of the Graph;
    "" is an unread value. Gathered values have an axis of iterations, or with ``step`` an axis of steps, ``step`` per iteration.
    """

    model: Model
    count: int
    states: tuple[tuple[str, str, str, str], ...]
    slices: tuple[tuple[str, str, bool], ...]
    gathered: tuple[tuple[str, str, bool], ...]
    fixed: tuple[tuple[str, str], ...]
    step: int = 0


def rolled_turn(graph: Graph, node: Node) -> RolledTurn:
    """Return one iteration of a Scan of ``graph``. Raises BadInput if its iterations differ, or its slices are not in memory
    order."""
    captured = captured_names(node)
    formal, outer = (
        node.inputs[: len(node.inputs) - len(captured)],
        dict(zip(captured, node.inputs[-len(captured) :], strict=False)),
    )
    body, scanned = node.attributes["body"], int(node.attributes["num_scan_inputs"])
    if carried_dtypes(node) or any(any(node.attributes.get(k) or ()) for k in ("scan_input_axes", "scan_output_axes")):
        raise BadInput("it scans along an axis other than the first")
    names, results = [v.name for v in graph_of(body).input], [f"{_END}{i}" for i in range(len(graph_of(body).output))]
    first = len(formal) - scanned
    lengths = {graph.types[n].shape[0] for n in formal[first:]}
    if len(lengths) != 1 or min(lengths) < 1 or len(names) != len(formal):
        raise BadInput("it has no iterations")
    (count,) = lengths
    kinds = [graph.types[n] for n in formal[:first]]
    kinds += [TensorType((k := graph.types[n]).dtype, k.shape[1:]) for n in formal[first:]]
    read, outputs = _read_names(graph), [*node.outputs, *[""] * (len(results) - len(node.outputs))]
    wanted = [o if o in read else "" for o in outputs]
    free = [n for n in outer if outer[n] not in graph.constants]
    ports = [ModelPort(n, k.dtype, k.shape) for n, k in zip(names, kinds, strict=True)]
    ports += [ModelPort(n, graph.types[outer[n]].dtype, graph.types[outer[n]].shape) for n in free]
    known = {n: graph.constants[o] for n, o in outer.items() if o in graph.constants}
    model = _turn_model(body, ports, known, results)
    ways, out_ways = (
        [*map(bool, node.attributes.get(k) or (0,) * n)]
        for k, n in (("scan_input_directions", scanned), ("scan_output_directions", len(results) - first))
    )
    return RolledTurn(
        model,
        count,
        tuple(zip(names[:first], formal[:first], results[:first], wanted[:first], strict=True)),
        tuple(zip(names[first:], formal[first:], ways, strict=True)),
        tuple(zip(results[first:], wanted[first:], out_ways, strict=True)),
        tuple((n, outer[n]) for n in free),
    )


def chunk_turn(graph: Graph, scan: Node, values: Mapping[str, str], step: int) -> RolledTurn:
    """Return one iteration of ``scan``, which runs ``step`` steps. ``values`` maps what it slices, and results that are read,
    to their names in the graph outside."""
    ends = tuple(Value(o, graph.types[o]) for o in scan.outputs if values.get(o))
    turn = rolled_turn(replace(graph, nodes=(scan,), outputs=ends), scan)
    return replace(
        turn,
        states=tuple((i, first, r, values.get(last, "")) for i, first, r, last in turn.states),
        slices=tuple((i, values[value], back) for i, value, back in turn.slices),
        gathered=tuple((r, values.get(value, ""), back) for r, value, back in turn.gathered),
        step=step,
    )


def bound_turn(turn: RolledTurn, graph: Graph, lowerings: Lowerings) -> Graph:
    """Return the iteration bound to its shapes, with a name prefix unused in ``graph``. Raises BadInput if shapes, for example
    those of its states, change between iterations."""
    bound, rest = bind_until(turn.model, {}, lowerings)
    if rest is not None:
        raise rest.why
    given, made = ({v.external or v.name: v.type for v in values} for values in (bound.inputs, bound.outputs))
    steps = (turn.step,) if turn.step else ()
    slices = [(r, TensorType((k := graph.types[v]).dtype, (*steps, *k.shape[1:]))) for r, v, _ in turn.gathered if v]
    for result, kind in [*((r, given[i]) for i, _, r, _ in turn.states), *slices]:
        if made[result] != kind:
            raise BadInput(f"an iteration returns {made[result]} for a value of {kind}")
    number = 0
    while any(n.startswith(_iteration_prefix(number)) for n in graph.types):
        number += 1
    return _prefix_values(bound, _iteration_prefix(number))


def _iteration_prefix(number: int) -> str:
    return f"turn{number or ''}_"


def _prefix_values(graph: Graph, prefix: str) -> Graph:
    def new(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + n if n else "" for n in names)

    def ports(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(replace(v, name=prefix + v.name, external=v.external or v.name) for v in values)

    return replace(
        graph,
        inputs=ports(graph.inputs),
        outputs=ports(graph.outputs),
        nodes=tuple(replace(n, inputs=new(n.inputs), outputs=new(n.outputs)) for n in graph.nodes),
        types={prefix + n: k for n, k in graph.types.items() if n},
        constants={prefix + n: a for n, a in graph.constants.items()},
    )


def _turn_model(body: SubGraph, ports: Sequence[ModelPort], known: Mapping[str, np.ndarray], results: Sequence[str]) -> Model:
    graph = graph_of(body)
    ends: list[NodeProto] = [helper.make_node("Identity", [o.name], [r]) for o, r in zip(graph.output, results, strict=True)]
    outputs = [ValueInfoProto(name=r) for r in results]
    whole = helper.make_graph([*graph.node, *ends], graph.name or "turn", [], outputs, graph.initializer)
    return body_model(body, whole, ports, known)


def _read_names(graph: Graph) -> set[str]:
    return {i for n in graph.nodes for i in n.inputs} | {v.name for v in graph.outputs}
