"""Stacks of recurrent layers that can be stepped together, connected by operators that work on each step separately."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from rammer.frontend.loops.loop_chunk import STATES
from rammer.frontend.op_traits import Trait, operators
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import output_names


def is_cell(node: Node) -> bool:
    """Return True if a node is a recurrent layer."""
    return node.op in STATES and not node.domain


def steps_of(graph: Graph, node: Node) -> int:
    """Return the time steps of a recurrent layer whose layout is 0."""
    return graph.types[node.inputs[0]].shape[0]


def is_backwards(node: Node) -> bool:
    """Return True if a unidirectional layer runs backwards."""
    return str(node.attributes.get("direction", "forward")) == "reverse"


@dataclass(frozen=True)
class Stack:
    """Recurrent layers over ``steps`` and the nodes in between, in order, each with True if it runs backwards. A layer that reads
    another layer runs in the same direction. ``read`` are results with consumers outside, and graph outputs."""

    steps: int
    nodes: tuple[tuple[Node, bool], ...]
    read: frozenset[str]

    @property
    def cells(self) -> list[tuple[Node, bool]]:
        """The layers of the stack, with their directions."""
        return [(n, way) for n, way in self.nodes if is_cell(n)]

    @property
    def ways(self) -> dict[str, bool]:
        """Map from results to their direction: True if backwards."""
        return {n.outputs[0]: way for n, way in self.nodes}

    @property
    def made(self) -> set[str]:
        """All results of the nodes."""
        return {o for node, _ in self.nodes for o in node.outputs if o}


def first_stack(graph: Graph, most: int, only: Collection[str] | None = None) -> Stack | None:
    """Return the stack of the first layer of more than ``most`` steps, or None if that does not exist. ``only`` restricts the
    layers, by their first results."""
    growing: _Growing | None = None
    for node in graph.nodes:
        chosen = is_cell(node) and (only is None or node.outputs[0] in only)
        if is_cell(node) and not chosen:
            if growing is not None:
                growing.leave(node)
            continue
        if growing is None and chosen and steps_of(graph, node) > most:
            growing = _Growing(graph, steps_of(graph, node))
        if growing is not None:
            growing.offer(node)
    return growing.stack() if growing is not None else None


class _Growing:
    """A stack under construction. ``ways`` are values with one part per step; ``tainted`` are other
    values that depend on them."""

    def __init__(self, graph: Graph, steps: int) -> None:
        self.graph, self.steps = graph, steps
        self.nodes: list[tuple[Node, bool]] = []
        self.ways: dict[str, bool] = {}
        self.tainted: set[str] = set()

    def offer(self, node: Node) -> None:
        """Add ``node`` to the stack, or record that it depends on the stack."""
        way = self._node_direction(node)
        if way is None:
            self.leave(node)
            return
        self.nodes.append((node, way))
        self.ways[node.outputs[0]] = way
        self.tainted.update(filter(None, node.outputs[1:]))
        self.ways.pop("", None)

    def leave(self, node: Node) -> None:
        """Record if ``node``, which is outside the stack, depends on it."""
        if any(i in self.ways or i in self.tainted for i in node.inputs):
            self.tainted.update(filter(None, node.outputs))

    def _node_direction(self, node: Node) -> bool | None:
        """Return the direction of a node in the stack, or None if it does not fit."""
        inputs = [i for i in node.inputs if i]
        if self.tainted.intersection(inputs):
            return None
        if is_cell(node):
            own, x = is_backwards(node), node.inputs[0]
            fits = steps_of(self.graph, node) == self.steps and self.ways.get(x, own) == own
            return own if fits and not any(i in self.ways for i in inputs[1:]) else None
        given = {self.ways[i] for i in inputs if i in self.ways}
        if len(given) != 1 or not _each_step(self.graph, node, self.ways, self.steps):
            return None
        return given.pop()

    def stack(self) -> Stack:
        """Return the stack without nodes that follow its last layers."""
        needed, kept = set[str](), list[tuple[Node, bool]]()
        for node, way in reversed(self.nodes):
            if is_cell(node):
                needed.add(node.inputs[0])
            elif node.outputs[0] in needed:
                needed.update(i for i in node.inputs if i in self.ways)
            else:
                continue
            kept.append((node, way))
        inside = {id(n) for n, _ in kept}
        read = {i for n in self.graph.nodes if id(n) not in inside for i in n.inputs} | output_names(self.graph)
        return Stack(self.steps, tuple(reversed(kept)), frozenset(read))


def _each_step(graph: Graph, node: Node, ways: Collection[str], steps: int) -> bool:
    """Return True if a node with one result computes each step from the same step of its operands in ``ways``."""
    shape = graph.types[node.outputs[0]].shape if len([o for o in node.outputs if o]) == 1 else ()
    test = _TESTS.get(node.op) if not node.domain else None
    return test is not None and bool(shape) and shape[0] == steps and test(graph, node, ways)


def _is_stepwise(graph: Graph, node: Node, ways: Collection[str]) -> bool:
    return node.inputs[0] in ways and not any(i in ways for i in node.inputs[1:])


def _is_step_reshape(graph: Graph, node: Node, ways: Collection[str]) -> bool:
    """Return True if a node only reshapes the elements of a step."""
    return _is_stepwise(graph, node, ways) and graph.types[node.inputs[0]].shape[:1] == graph.types[node.outputs[0]].shape[:1]


def _is_step_transpose(graph: Graph, node: Node, ways: Collection[str]) -> bool:
    return bool(node.attributes.get("perm")) and int(node.attributes["perm"][0]) == 0


def _is_step_broadcast(graph: Graph, node: Node, ways: Collection[str]) -> bool:
    """Return True if operands in ``ways`` have the result's rank, and other operands are equal for all steps."""
    rank = len(graph.types[node.outputs[0]].shape)
    shapes = [(i in ways, graph.types[i].shape) for i in node.inputs if i]
    return all(len(s) == rank if inside else len(s) < rank or s[0] == 1 for inside, s in shapes)


def _is_step_product(graph: Graph, node: Node, ways: Collection[str]) -> bool:
    a, b = node.inputs
    return a in ways and b not in ways and len(graph.types[a].shape) > 2 and len(graph.types[b].shape) <= 2


def _is_step_row_operator(graph: Graph, node: Node, ways: Collection[str]) -> bool:
    axis, rank = int(node.attributes.get("axis", -1)), len(graph.types[node.inputs[0]].shape)
    return (
        axis % rank != 0
        and _is_stepwise(graph, node, ways)
        and all(len(graph.types[i].shape) < rank for i in node.inputs[1:] if i)
    )


def _is_step_concat(graph: Graph, node: Node, ways: Collection[str]) -> bool:
    rank = len(graph.types[node.outputs[0]].shape)
    return int(node.attributes["axis"]) % rank != 0 and all(i in ways for i in node.inputs)


_TESTS: Final[Mapping[str, Callable[[Graph, Node, Collection[str]], bool]]] = {
    **dict.fromkeys(operators(Trait.RESHAPES), _is_step_reshape),
    **dict.fromkeys(operators(Trait.ELEMENTWISE), _is_step_broadcast),
    "Transpose": _is_step_transpose,
    "MatMul": _is_step_product,
    "LayerNormalization": _is_step_row_operator,
    "Concat": _is_step_concat,
}
