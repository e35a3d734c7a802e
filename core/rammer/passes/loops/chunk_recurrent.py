"""Chunking of long recurrences into a Scan over many steps per iteration, so that code does not grow with the sequence.

All layers that can be stepped together (``recurrent_stacks``) become one Scan. Its body is the same layers over fewer steps,
unrolled and scheduled concurrently like those of a short sequence. The remaining steps become layers after the Scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from onnx import GraphProto, helper

from rammer.frontend.loops.loop_chunk import STATES, even_steps
from rammer.frontend.read.node_protos import SubGraph, element_code, node_proto
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import NodeBuilder, rebuild_graph
from rammer.ir.names import Names
from rammer.ir.types import TensorType
from rammer.passes.loops.recurrent_stacks import Stack, first_stack, is_cell
from rammer.passes.loops.split_bidirectional import one_way

#: Number of steps beyond which a recurrence is chunked, and maximum steps per chunk.
MOST_STEPS: Final = 256
MOST_TURN: Final = 64


@dataclass(frozen=True, slots=True)
class ChunkRecurrent:
    """A pass that rewrites LSTM, GRU and RNN over more than ``max_steps`` steps to a Scan of chunks of at most ``chunk``
    steps."""

    max_steps: int = MOST_STEPS
    chunk: int = MOST_TURN
    name: ClassVar[str] = "chunk_recurrent"

    def __str__(self) -> str:
        return self.name if self == ChunkRecurrent() else f"{self.name}{{max_steps={self.max_steps},chunk={self.chunk}}}"

    def __call__(self, graph: Graph) -> Graph:
        graph = one_way(graph, self.max_steps)
        while (stack := first_stack(graph, self.max_steps)) is not None:
            graph = Rolling(graph, stack, even_steps(stack.steps, min(self.chunk, self.max_steps))).graph()
        return graph


def cut_steps(made: NodeBuilder, name: str, first: int, last: int, kind: TensorType) -> str:
    """Return elements ``first .. last-1`` along the first axis of ``name``, whose type is ``kind``."""
    bounds = [made.add_constant(f"{name}_bound", np.array([n], np.int64)) for n in (first, last, 0)]
    return made.add_node("Slice", [name, *bounds], made.new_value(f"{name}_part", with_step_count(kind, last - first)))


def with_step_count(kind: TensorType, steps: int) -> TensorType:
    """Return ``kind`` with its first extent replaced by ``steps``."""
    return TensorType(kind.dtype, (steps, *kind.shape[1:]))


@dataclass
class StackPart:
    """A stack over a slice of its steps: nodes, the new name of each value, and the last states of each layer."""

    nodes: list[Node]
    values: dict[str, str]
    states: dict[str, list[str]]


class Rolling:
    """Rewrite of one stack into a Scan."""

    def __init__(self, graph: Graph, stack: Stack, turn: int) -> None:
        self.whole, self.stack, self.turn = graph, stack, turn
        self.count, self.rest = divmod(stack.steps, turn)
        first = stack.cells[0][0]
        self.title, version = first.outputs[0] or first.outputs[1], max(n.version for n, _ in stack.nodes)
        self.made = NodeBuilder(Names(graph.types), version)
        made = stack.made
        sliced = [(n.inputs[0], way, False) for n, way in stack.cells if n.inputs[0] not in made]
        sliced += [(lens, way, True) for n, way in stack.cells if (lens := n.inputs[4] if len(n.inputs) > 4 else "")]
        #: Values that are sliced per chunk: name, True if sliced backwards, True if it holds lengths.
        self.sliced = list(dict.fromkeys(sliced))

    def graph(self) -> Graph:
        """Return the graph with the Scan in place of the stack."""
        states = {n.outputs[0]: self.initial(n) for n, _ in self.stack.cells}
        pieces = {key: self._pieces(*key) for key in self.sliced}
        tails = {(v, way): tail for (v, way, _), (_, tail) in pieces.items()}
        remainder = self._part(self.rest, True, states, tails) if self.rest else StackPart([], {}, {})
        self.made.nodes += remainder.nodes
        turned = self.scan({**states, **remainder.states}, [main for main, _ in pieces.values()])
        ahead = self._part(self.rest, False, turned.states, tails) if self.rest else StackPart([], {}, {})
        self.made.nodes += ahead.nodes
        self._finish_outputs(turned, {**remainder.values, **ahead.values}, {**turned.states, **ahead.states})
        return self._rebuild_graph()

    def initial(self, cell: Node) -> list[str]:
        """Return the initial states of a layer."""
        hidden = self.whole.types[cell.inputs[2]]
        kind = TensorType(hidden.dtype, (1, self.whole.types[cell.inputs[0]].shape[1], hidden.shape[-1]))
        given = [cell.inputs[5 + i] if len(cell.inputs) > 5 + i else "" for i in range(STATES[cell.op])]
        return [n or self.made.add_constant(f"{cell.outputs[0]}_zero", np.zeros(kind.shape, kind.dtype)) for n in given]

    def _pieces(self, name: str, way: bool, lengths: bool) -> tuple[str, str]:
        """Return the values that chunks slice, and the part for the remaining steps ("" if none remain)."""
        made, kind, steps = self.made, self.whole.types[name], self.count * self.turn
        if lengths:
            starts = np.append(np.arange(self.count) * self.turn, steps)[:, None].astype(kind.dtype)
            most = np.array([[self.turn]] * self.count + [[self.rest]], kind.dtype)
            left = TensorType(kind.dtype, (self.count + 1, *kind.shape))
            parts = valid_steps(
                made, name, made.add_constant(f"{name}_starts", starts), made.add_constant(f"{name}_most", most), left
            )
            main = cut_steps(made, parts, 0, self.count, left)
            tail = cut_steps(made, parts, self.count, self.count + 1, left) if self.rest else ""
            return main, made.reshape(tail, kind.shape, made.new_value(f"{name}_rest", kind)) if tail else ""
        main = cut_steps(made, name, 0, steps, kind) if self.rest else name
        tail = cut_steps(made, name, steps, self.stack.steps, kind) if self.rest else ""
        shape = TensorType(kind.dtype, (self.count, self.turn, *kind.shape[1:]))
        return made.reshape(main, shape.shape, made.new_value(f"{name}_turns", shape)), tail

    def _part(
        self, steps: int, only: bool | None, states: Mapping[str, list[str]], given: Mapping[tuple[str, bool], str]
    ) -> StackPart:
        """Return the stack over ``steps``, starting from ``states``. ``given`` names the slices of sliced values. ``only``
        restricts the part to layers of one direction."""
        part = StackPart([], {}, {})
        for node, way in self.stack.nodes:
            if only is not None and way != only:
                continue
            inputs = [part.values.get(i) or given.get((i, way), i) if i else "" for i in node.inputs]
            kinds = [with_step_count(self.whole.types[node.outputs[0]], steps)] if node.outputs[0] else []
            outputs = [self.made.new_value(f"{node.outputs[0]}_{steps}", k) for k in kinds] or [""]
            if is_cell(node):
                first = states[node.outputs[0]]
                inputs = [*inputs, *[""] * (5 - len(inputs))]
                inputs[5 : 5 + len(first)] = first
                outputs += [self.made.new_value(f"{s}_next", self._value_type(s)) for s in first]
                part.states[node.outputs[0]] = outputs[1:]
            elif node.op == "Reshape":
                shape = np.array(kinds[0].shape, np.int64)
                inputs[1] = self.made.add_constant(f"{node.outputs[0]}_shape", shape)
            part.values[node.outputs[0]] = outputs[0]
            part.nodes.append(
                replace(node, inputs=tuple(inputs), outputs=tuple(outputs), attributes=_layout_free_attributes(node))
            )
        return part

    def _value_type(self, name: str) -> TensorType:
        return self.made.types[name] if name in self.made.types else self.whole.types[name]

    def scan(self, states: Mapping[str, list[str]], slices: list[str]) -> StackPart:
        """Add the Scan. Return its results: the values of all chunks, stacked, and the last states."""
        made, ways = self.made, self.stack.ways
        formal = {c: [made.new_value(f"{s}_before", self._value_type(s)) for s in first] for c, first in states.items()}
        given = {}
        for (name, way, _), main in zip(self.sliced, slices, strict=True):
            kind = self._value_type(main)
            given[name, way] = made.new_value(f"{main}_slice", TensorType(kind.dtype, kind.shape[1:]))
        turn = self._part(self.turn, None, formal, given)
        shown = [n for n in turn.values if n in self.stack.read]
        ends = [s for first in turn.states.values() for s in first]
        results = {c: [made.new_value(f"{s}_last", self._value_type(s)) for s in first] for c, first in turn.states.items()}
        stacked = [
            made.new_value(f"{n}_turns", TensorType((k := self._value_type(turn.values[n])).dtype, (self.count, *k.shape)))
            for n in shown
        ]
        order = [*turn.states]
        heads = [s for c in order for s in formal[c]]
        inputs = [*(s for c in order for s in states[c]), *slices]
        body = self._make_body(turn, [*heads, *given.values()], [*ends, *(turn.values[n] for n in shown)])
        attributes = {
            "body": body,
            "num_scan_inputs": len(slices),
            "scan_input_directions": tuple(int(way) for _, way, _ in self.sliced),
            "scan_output_directions": tuple(int(ways[n]) for n in shown),
        }
        outputs = (*(s for c in order for s in results[c]), *stacked)
        made.nodes.append(Node("Scan", (*inputs, *body.captures), outputs, attributes, self.title, "", made.version))
        return StackPart([], dict(zip(shown, stacked, strict=True)), results)

    def _make_body(self, turn: StackPart, inputs: Sequence[str], outputs: Sequence[str]) -> SubGraph:
        """Return the body for one chunk; values other than its inputs are captured."""
        inside = {*inputs, *(o for n in turn.nodes for o in n.outputs)}
        outer = tuple(dict.fromkeys(i for n in turn.nodes for i in n.inputs if i and i not in inside))
        nodes = [node_proto(n) for n in turn.nodes]
        proto: GraphProto = helper.make_graph(
            nodes, f"{self.title}_turn", *(list(map(self._make_port, p)) for p in (inputs, outputs))
        )
        return SubGraph(proto.SerializeToString(), outer, (("", self.made.version),))

    def _make_port(self, name: str) -> Any:
        kind = self._value_type(name)
        return helper.make_tensor_value_info(name, element_code(np.dtype(kind.dtype)), kind.shape)

    def _finish_outputs(self, turned: StackPart, rests: Mapping[str, str], states: Mapping[str, list[str]]) -> None:
        """Restore the original names of values that other nodes read."""
        made, steps = self.made, self.count * self.turn
        for name, stacked in turned.values.items():
            kind = self.whole.types[name]
            if self.rest:
                part = with_step_count(kind, steps)
                main = made.reshape(stacked, part.shape, made.new_value(f"{name}_main", part))
                made.add_node("Concat", [main, rests[name]], name, axis=0)
            else:
                made.reshape(stacked, kind.shape, name)
        for node, _ in self.stack.cells:
            for name, last in zip(node.outputs[1:], states[node.outputs[0]], strict=False):
                if name in self.stack.read:
                    made.add_node("Identity", [last], name)

    def _rebuild_graph(self) -> Graph:
        """Return the graph with the stack replaced by the new nodes."""
        inside = {id(n) for n, _ in self.stack.nodes}
        nodes = [*(n for n in self.whole.nodes if id(n) not in inside), *self.made.nodes]
        graph = replace(self.whole, types={**self.whole.types, **self.made.types})
        known = {*self.whole.constants, *self.made.constants, *(v.name for v in graph.inputs)}
        return rebuild_graph(graph, in_order(nodes, known), self.made.constants)


def valid_steps(made: NodeBuilder, lens: str, starts: str, most: str, kind: TensorType) -> str:
    """Add the number of valid steps in each part of sequences of lengths ``lens``: parts begin at ``starts`` and have at most
    ``most`` steps. ``kind`` is the type of the result, whose name is returned."""
    zero = made.add_constant(f"{lens}_none", np.zeros((), kind.dtype))
    left = made.add_node("Sub", [lens, starts], made.new_value(f"{lens}_left", kind))
    some = made.add_node("Max", [left, zero], made.new_value(f"{lens}_some", kind))
    return made.add_node("Min", [some, most], made.new_value(f"{lens}_parts", kind))


def _layout_free_attributes(node: Node) -> Mapping[str, Any]:
    return {k: v for k, v in node.attributes.items() if not (is_cell(node) and k == "layout")}


def in_order(nodes: Sequence[Node], known: set[str]) -> list[Node]:
    """Return the nodes in topological order, keeping their order where possible."""
    waiting, result = list(nodes), list[Node]()
    while waiting:
        later = list[Node]()
        for node in waiting:
            if all(not i or i in known for i in node.inputs):
                known.update(node.outputs)
                result.append(node)
            else:
                later.append(node)
        assert len(later) < len(waiting), "a stack is convex"
        waiting = later
    return result
