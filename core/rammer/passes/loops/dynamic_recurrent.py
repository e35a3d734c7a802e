"""Recurrences with a dynamic trip count: each stack of layers becomes one node, with its chunk as a model.

A layer of ``n`` steps is a longer layer with ONNX's ``sequence_lens`` of ``n``. A chunk is the layers over a number of steps,
with the count of valid steps in it; states pass unchanged through the others. The number of chunks follows from the length of a
run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from rammer.device.manifest import IterationCost
from rammer.errors import BadInput
from rammer.frontend.bind.loop_body import DOMAIN, TURNS, RolledTurn, chunk_turn
from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.loops.loop_chunk import best_steps, most_steps
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import NodeBuilder, rebuild_graph
from rammer.ir.names import Names
from rammer.ir.port import ModelPort
from rammer.ir.types import TensorType
from rammer.passes.loops.chunk_loop import forward_loops, is_loop, loop_title, opened_loop
from rammer.passes.loops.chunk_recurrent import MOST_TURN, Rolling, in_order, valid_steps
from rammer.passes.loops.recurrent_stacks import Stack, first_stack, is_cell, steps_of
from rammer.passes.loops.split_bidirectional import one_way

#: The input of a chunk that holds the total number of steps.
_STEPS: Final = "turn.steps"


def split_layers(graph: Graph) -> tuple[Graph, dict[str, int]]:
    """Return ``graph`` with unidirectional layers and forward loops, and the steps of each by its first result."""
    graph, found = forward_loops(one_way(graph, 0))
    return graph, {**found, **{n.outputs[0]: steps_of(graph, n) for n in graph.nodes if is_cell(n)}}


@dataclass(frozen=True)
class OpenSize:
    """Maximum steps of a layer or loop, steps of its chunk, and True if the steps are a model length."""

    most: int
    turn: int
    plain: bool

    @property
    def count(self) -> int:
        """Maximum number of chunks."""
        return -(-self.most // self.turn)


def size_of(graph: Graph, title: str, span: tuple[int, int], plain: bool, between: IterationCost) -> OpenSize:
    """Return the size of a layer or loop in ``graph`` whose steps are in ``span``."""
    least, most = span
    loop = next((n for n in graph.nodes if is_loop(n) and loop_title(n) == title), None)
    limit, cost = MOST_TURN, between.cells
    if loop is not None:
        body = graph_of(loop.attributes["body"])
        limit, cost = most_steps(body, len(body.output)), between.light
    return OpenSize(most, best_steps(limit, least, most, cost), plain)


@dataclass(frozen=True)
class OpenStack:
    """A stack or loop in a graph: its first ``layer``, the ``node`` in its place, and one chunk as a model if requested.
    ``steps`` is the scalar of its trip count ("" if the chunk does not need it)."""

    layer: str
    node: Node
    turn: RolledTurn | None
    steps: str = ""


def open_loops(graph: Graph, sizes: Mapping[str, OpenSize], same: Collection[str]) -> tuple[Graph, list[OpenStack]]:
    """Return ``graph`` with a node in place of each loop and stack of layers in ``sizes``. Loops, and stacks of maximal steps,
    include their chunks. ``same`` are constants that are equal at all lengths, up to their extent."""
    found = list[OpenStack]()
    for node in [n for n in graph.nodes if is_loop(n) and loop_title(n) in sizes]:
        size = sizes[loop_title(node)]
        graph, loop = opened_loop(graph, node, size.turn, size.count, size.plain, same)
        found.append(OpenStack(loop_title(node), loop.node, loop.turn, loop.steps))
    while (stack := first_stack(graph, 0, sizes)) is not None:
        size = sizes[stack.cells[0][0].outputs[0]]
        graph, made = _open_stack(graph, stack, size, stack.steps == size.most)
        found.append(made)
    return graph, found


def _open_stack(graph: Graph, stack: Stack, size: OpenSize, told: bool) -> tuple[Graph, OpenStack]:
    turn, count, lens = size.turn, size.count, _Lens(graph, stack, size)
    given = replace(stack, nodes=lens.nodes)
    added = lens.made.constants
    whole = replace(graph, types={**graph.types, **lens.made.types}, constants={**graph.constants, **added})
    rolling = Rolling(whole, given, turn)
    rolling.count, rolling.rest, made = count, 0, rolling.made
    states = {n.outputs[0]: rolling.initial(n) for n, _ in given.cells}
    mains = [
        made.new_value(f"{n}_turns", _chunked_type(whole.types[n], count, turn, n in lens.parts)) for n, _, _ in rolling.sliced
    ]
    turned = rolling.scan(states, mains)
    scan = made.nodes.pop()
    outside = {m: lens.parts.get(n, n) for m, (n, _, _) in zip(mains, rolling.sliced, strict=True)}
    named = {stacked: name for name, stacked in turned.values.items()}
    for node, _ in given.cells:
        results = zip(turned.states[node.outputs[0]], [*node.outputs[1:], "", ""], strict=False)
        named |= {last: name if name in stack.read else "" for last, name in results}
    outputs = tuple(n for o in scan.outputs if (n := named.get(o, "")))
    node = Node(TURNS, tuple(outside.get(i, i) for i in scan.inputs), outputs, {}, scan.name, DOMAIN, scan.version)
    types = {**whole.types, **made.types}
    inside = {id(n) for n, _ in stack.nodes}
    nodes = [*(n for n in graph.nodes if id(n) not in inside), *lens.made.nodes, *made.nodes, node]
    known = {*graph.constants, *added, *made.constants, *(v.name for v in graph.inputs)}
    result = rebuild_graph(replace(graph, types=types), in_order(nodes, known), {**added, **made.constants})
    found = chunk_turn(replace(result, types={**types, **result.types}), scan, {**outside, **named}, turn) if told else None
    if found is not None and lens.starts:
        found = _count_remaining_steps(found, lens.starts, lens.steps, turn)
    return result, OpenStack(stack.cells[0][0].outputs[0], node, found, lens.steps)


def _chunked_type(kind: TensorType, count: int, turn: int, lengths: bool) -> TensorType:
    """Return the type of a chunked value, with the chunks as its first axis."""
    return TensorType(kind.dtype, (count, *kind.shape) if lengths else (count, turn, *kind.shape[1:]))


def _count_remaining_steps(turn: RolledTurn, starts: str, steps: str, step: int) -> RolledTurn:
    """Return ``turn`` with its number of valid steps computed from its start, for the whole batch."""
    model, front = turn.model, list[NodeProto]()
    ports = {p.name: p for p in model.inputs}
    for name in (i for i, value, _ in turn.slices if value == starts):
        (batch,), prefix = ports.pop(name).shape, f"{name}.left"
        ports |= {n: ModelPort(n, "int64", ()) for n in (f"{prefix}.start", _STEPS)}
        for what, value in (("none", np.array(0)), ("most", np.array(step)), ("shape", np.array([batch]))):
            tensor = numpy_helper.from_array(value.astype(np.int64))
            front.append(helper.make_node("Constant", [], [f"{prefix}.{what}"], value=tensor))
        lines = [
            ("Sub", _STEPS, f"{prefix}.start", f"{prefix}.rest"),
            ("Max", f"{prefix}.rest", f"{prefix}.none", f"{prefix}.some"),
        ]
        lines.append(("Min", f"{prefix}.some", f"{prefix}.most", f"{prefix}.count"))
        front += [helper.make_node(op, [a, b], [result]) for op, a, b, result in lines]
        front.append(helper.make_node("Expand", [f"{prefix}.count", f"{prefix}.shape"], [f"{prefix}.all"]))
        front.append(helper.make_node("Cast", [f"{prefix}.all"], [name], to=TensorProto.INT32))
    proto = ModelProto.FromString(model.proto.SerializeToString())
    nodes = [*front, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    slices = tuple((f"{i}.left.start" if value == starts else i, value, back) for i, value, back in turn.slices)
    model = replace(model, proto=proto, inputs=tuple(ports.values()))
    return replace(turn, model=model, slices=slices, fixed=(*turn.fixed, (_STEPS, steps)))


class _Lens:
    """The layers of a stack with sequence lengths, and the valid steps of each chunk. If all sequences have all steps, and these
    are a length, a chunk computes them from ``steps`` and its ``starts``."""

    def __init__(self, graph: Graph, stack: Stack, size: OpenSize) -> None:
        self.graph, self.size, self.starts, self.steps = graph, size, "", ""
        self.made = NodeBuilder(Names(graph.types), max(n.version for n, _ in stack.nodes))
        self.parts: dict[str, str] = {}  #: Lengths -> valid steps per chunk.
        self.nodes = tuple((self._add_lengths(n, stack.steps) if is_cell(n) else n, way) for n, way in stack.nodes)

    def _add_lengths(self, cell: Node, steps: int) -> Node:
        inputs, constants = [*cell.inputs, *[""] * (5 - len(cell.inputs))], self.made.constants
        if not inputs[4]:
            batch = self.graph.types[cell.inputs[0]].shape[1]
            inputs[4] = next((n for n, a in constants.items() if a.shape == (batch,)), "") or self.made.add_constant(
                f"{cell.outputs[0]}_steps", np.full(batch, steps, np.int32)
            )
        if inputs[4] not in self.parts:
            whole = inputs[4] in constants and self.size.plain
            self.parts[inputs[4]] = self._chunk_starts() if whole else self._split_lengths(inputs[4])
        return replace(cell, inputs=tuple(inputs))

    def _chunk_starts(self) -> str:
        """Return the name of the first step of each chunk."""
        if not self.starts:
            self.starts = self.made.add_constant("turn_starts", np.arange(self.size.count) * self.size.turn)
            self.steps = self.made.new_value("turn_steps", TensorType("int64", ()))
        return self.starts

    def _split_lengths(self, lens: str) -> str:
        """Return the name of the number of valid steps in each chunk."""
        made, size = self.made, self.size
        known = {**self.graph.types, **made.types}[lens]
        if len(known.shape) != 1:
            raise BadInput("sequence_lens must have one length for each sequence of the batch")
        starts = made.add_constant(f"{lens}_starts", (np.arange(size.count) * size.turn)[:, None].astype(known.dtype))
        most = made.add_constant(f"{lens}_most", np.array(size.turn, known.dtype))
        return valid_steps(made, lens, starts, most, TensorType(known.dtype, (size.count, *known.shape)))
