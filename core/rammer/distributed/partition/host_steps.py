"""Steps without tensor expressions: host operators, and recurrent layers that run as loop programs.

In a graph that is cut, each has one Compute per output. The Compute reads all operands and does not describe the computation.
Placement and transfers therefore treat it as any other Compute. It is a separate step, and one task in the table of all devices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rammer.distributed.partition.cut_graph import Spot
from rammer.frontend.bind.partition import split_segments
from rammer.frontend.lower.graph_lowering import Lowerings, lower
from rammer.ir.compute import Axis, Compute, ComputeGraph
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref
from rammer.ir.graph import Graph, Node
from rammer.ir.names import Names, make_identifier
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, Port, RProgram, Task, dense
from rammer.ir.types import TensorType

__all__ = [
    "STEP",
    "UnloweredNode",
    "lower_whole_graph",
    "make_placeholder",
    "order_spots",
    "outline_program",
    "remove_host_nodes",
]

#: The kernel family of an operator that represents a whole step.
STEP: Final = "step"


@dataclass(frozen=True, eq=False)
class UnloweredNode:
    """A node without a tensor expression, and the reason."""

    node: Node
    why: str


def lower_whole_graph(graph: Graph, lowerings: Lowerings, ranged: bool = False) -> tuple[ComputeGraph, dict[str, UnloweredNode]]:
    """Return all of ``graph`` lowered, and the nodes without tensor expressions by the tensors that they write. Tensors without
    elements need not be computed. Outputs that are an input, a constant or another output are copies."""
    nodes = [UnloweredNode(n, why) for some, why in split_segments(graph, lowerings) if why for n in some]
    made = {o: one for one in nodes for o in one.node.outputs if o}

    def otherwise(node: Node) -> Sequence[Compute]:
        outputs = [(o, graph.types[o]) for o in node.outputs if o in made]
        reads = {n: graph.types[n] for n in node.inputs if n}
        return [make_placeholder(o, t, reads if t.size else {}, node.name) for o, t in outputs]

    return _with_copies(graph, lower(graph, lowerings, otherwise, ranged)), {o: n for o, n in made.items() if graph.types[o].size}


def make_placeholder(name: str, kind: TensorType, reads: Mapping[str, TensorType], origin: str = "") -> Compute:
    """Return a Compute that reads all of ``reads``. One axis per extent runs over all dimensions that have it."""
    axes = tuple(Axis(f"i{k}", n) for k, n in enumerate(kind.shape))
    over = tuple(Axis(f"r{n}", n) for n in dict.fromkeys(n for t in reads.values() for n in t.shape))
    body: Expr | None = None
    for tensor, t in reads.items():
        read: Expr = Load(tensor, tuple(Ref(f"r{n}") for n in t.shape))
        read = read if t.dtype == kind.dtype else Cast(kind.dtype, read)
        body = read if body is None else Op("max", (body, read))
    return Compute(name, kind.dtype, axes, body or Const(0, kind.dtype), over, "max" if over else None, origin)


def _with_copies(graph: Graph, found: ComputeGraph) -> ComputeGraph:
    taken, made = Names(found.types), set(found.producers)
    aliases = {v.name: v.external or v.name for v in graph.inputs}
    computes, outputs = list(found.computes), list[str]()
    for value in graph.outputs:
        name, kind = value.name, found.types[value.name]
        if name not in made or name in outputs:
            axes = tuple(Axis(f"i{k}", n) for k, n in enumerate(kind.shape))
            name = make_identifier(f"{value.name}_again", taken)
            computes.append(Compute(name, kind.dtype, axes, Load(value.name, tuple(Ref(a.name) for a in axes))))
        outputs.append(name)
        aliases[name] = value.external or value.name
    types = {**found.types, **{c.name: c.type for c in computes}}
    return replace(found, computes=tuple(computes), outputs=tuple(outputs), types=types, aliases=aliases)


def remove_host_nodes(graph: ComputeGraph, host_nodes: Collection[str]) -> ComputeGraph:
    """Return the tensor expressions of ``graph`` without the placeholders ``host_nodes``. Tensors that placeholders read become
    outputs, tensors that they write become inputs."""
    computes = tuple(c for c in graph.computes if c.name not in host_nodes)
    made, read = {c.name for c in computes}, {n for c in computes for n in c.reads}
    wanted = {n for c in graph.computes if c.name in host_nodes for n in c.reads} | set(graph.outputs)
    inputs = tuple(n for n in (*graph.inputs, *(c.name for c in graph.computes if c.name in host_nodes)) if n in read)
    constants = {n: v for n, v in graph.constants.items() if n in read}
    types = {n: t for n, t in graph.types.items() if n in made or n in read}
    outputs = tuple(c.name for c in computes if c.name in wanted)
    return replace(graph, inputs=inputs, outputs=outputs, computes=computes, types=types, constants=constants, aliases={})


def order_spots(graph: ComputeGraph, spots: Mapping[str, Spot], host_nodes: Mapping[str, UnloweredNode]) -> dict[str, Spot]:
    """Return ``spots`` at later stages where needed, so that every Compute reads only from its spot or earlier ones.

    The order of spots (stage, then device) is then one order of all steps, transfers and host operators on every device. They
    therefore cannot deadlock. Each node in ``host_nodes`` has a separate odd stage, and other stages are even."""
    found = dict[str, Spot]()
    if host_nodes:
        return _order_host_nodes(graph, spots, host_nodes)
    made = graph.producers
    for c in graph.computes:
        spot = spots[c.name]
        before = [found[n] for n in c.reads if n in made]
        stage = max((s.stage + (s.device > spot.device) for s in before), default=0)
        found[c.name] = Spot(max(stage, spot.stage), spot.device)
    return found


def _order_host_nodes(graph: ComputeGraph, spots: Mapping[str, Spot], host_nodes: Mapping[str, UnloweredNode]) -> dict[str, Spot]:
    found, of, taken, made = dict[str, Spot](), dict[int, Spot](), set[Spot](), graph.producers
    devices = {id(host_nodes[c.name]): spots[c.name].device for c in graph.computes if c.name in host_nodes}
    for c in graph.computes:
        node = host_nodes.get(c.name)
        device = devices[id(node)] if node else spots[c.name].device
        before = [found[n] for n in c.reads if n in made]
        stage = max((s.stage + (s.device != device or s.stage % 2) for s in before), default=0)
        if node is None:
            found[c.name] = Spot(stage + stage % 2, device)
            continue
        if id(node) not in of:
            spot = Spot(stage + 1 - stage % 2, device)
            while spot in taken:
                spot = Spot(spot.stage + 2, device)
            of[id(node)] = spot
            taken.add(spot)
        found[c.name] = of[id(node)]
    return found


def outline_program(graph: ComputeGraph, predicted: float, precision: str) -> RProgram:
    """Return a step's program for the table of all devices: one task per output that reads all inputs."""
    reads = {n: graph.types[n] for n in graph.inputs}
    computes = [make_placeholder(n, graph.types[n], reads) for n in graph.outputs]
    operators = tuple(ROperator(c.name, (c,), (), (c.name,), tuple(max(n, 1) for n in c.shape), STEP) for c in computes)
    kinds = [(n, "input") for n in graph.inputs] + [(n, "output") for n in graph.outputs]
    buffers = [Buffer(n, graph.types[n].dtype, graph.types[n].size, kind) for n, kind in kinds]  # type: ignore[arg-type]
    return RProgram(
        graph.name,
        "whole",
        tuple(Port(n, n) for n in graph.inputs),
        tuple(Port(n, n) for n in graph.outputs),
        tuple(buffers),
        tuple(dense(n, n, graph.types[n].shape) for n, _ in kinds),
        operators,
        (),
        (tuple(Task(o.name, 0) for o in operators if o.task_count),),
        predicted=predicted,
        precision=precision,
    )
