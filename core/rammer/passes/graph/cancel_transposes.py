"""Cancellation of transpositions: of inverse pairs, and of those around element-wise operators.

Exporters of channels-last models (Keras, by tf2onnx) write every convolution as Transpose, Conv, Transpose. The operators after
it are in channels-last order. A transposition is a free view, but results computed after it are stored in its order. Convolutions
would then read and write in two orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np

from rammer.frontend.op_traits import Trait, has_trait
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import GraphRewriter, find_producers, output_names, rebuild_graph, rename_values
from rammer.ir.types import TensorType

Order: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelTransposes:
    """A rewrite of ``Transpose(Op(Transpose(x)))`` to ``Op(x)`` if fewer elements remain to transpose. ``Op`` is any region of
    operators that can be reordered (element-wise operators, reductions, Concat, Pad)."""

    name: ClassVar[str] = "cancel_transposes"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        before: Graph | None = None
        while graph is not before:  # a region may begin where another ends; every iteration reduces the transposed elements
            before = graph
            graph = _without_pairs(graph)
            for order in sorted({order_of(n, graph) for n in graph.nodes if _is_transpose(n)}):
                moved = _Reordering(graph, order).rewritten()
                graph = graph if moved is graph else _without_pairs(_without_unread(moved))
        return graph


def _is_transpose(node: Node) -> bool:
    return node.op == "Transpose" and not node.domain


def order_of(node: Node, graph: Graph) -> Order:
    """Return the permutation of a Transpose."""
    given = node.attributes.get("perm")
    return tuple(given) if given is not None else tuple(reversed(range(len(graph.types[node.inputs[0]].shape))))


def invert_order(order: Order) -> Order:
    """Return the inverse permutation of ``order``."""
    return tuple(order.index(i) for i in range(len(order)))


def _without_pairs(graph: Graph) -> Graph:
    """Return the graph without pairs of transpositions that cancel."""
    made, outputs, names = find_producers(graph), output_names(graph), dict[str, str]()
    nodes, changed = list[Node](), False
    for node in graph.nodes:
        before = made.get(node.inputs[0]) if _is_transpose(node) else None
        if before is None or not _is_transpose(before) or order_of(node, graph) != invert_order(order_of(before, graph)):
            nodes.append(node)
        elif node.outputs[0] in outputs:
            changed = True
            nodes.append(Node("Identity", before.inputs, node.outputs, {}, node.name, "", 19))
        else:
            names[node.outputs[0]] = before.inputs[0]
    return rebuild_graph(graph, rename_values(nodes, names)) if names or changed else graph


def _without_unread(graph: Graph) -> Graph:
    """Return the graph without unread transpositions."""
    read = {i for n in graph.nodes for i in n.inputs} | output_names(graph)
    nodes = [n for n in graph.nodes if not _is_transpose(n) or n.outputs[0] in read]
    return rebuild_graph(graph, nodes) if len(nodes) < len(graph.nodes) else graph


class _Reordering(GraphRewriter):
    """The operators of ``graph`` that can move before the transpositions by ``order`` that they read."""

    def __init__(self, graph: Graph, order: Order) -> None:
        super().__init__(graph)
        self.order = order
        self.back = invert_order(self.order)
        self.sources = {n.outputs[0]: n.inputs[0] for n in graph.nodes if _is_transpose(n) and order_of(n, graph) == self.order}
        self.inner: dict[str, str] = {}
        self.turnable: dict[str, Node] = {}
        for node in graph.nodes:
            if self._can_transpose(node):
                self.turnable[node.outputs[0]] = node
        self.moved = self.chosen()

    # --- selection --------------------------------------------------------------------------------

    def _is_transposed(self, value: str) -> bool:
        """Return True if ``value`` is a matching transposition, or can move before one and keeps its axes."""
        node = self.turnable.get(value)
        return value in self.sources or (node is not None and not self._has_dropped_axes(node))

    def _can_transpose(self, node: Node) -> bool:
        if node.domain or len(node.outputs) != 1 or not any(self._is_transposed(i) for i in node.inputs):
            return False
        data = node.inputs[:1]
        if has_trait(node, Trait.ELEMENTWISE):
            rank = len(self.types[node.outputs[0]].shape)
            return rank == len(self.order) and all(self._can_reorder(i) for i in node.inputs)
        if node.op == "Concat":
            return all(self._is_transposed(i) for i in node.inputs)
        if node.op == "Pad":
            steering = all(i in self.constants for i in node.inputs[1:] if i)
            return self._is_transposed(data[0]) and steering and not (len(node.inputs) > 3 and node.inputs[3])
        return has_trait(node, Trait.REDUCTION) and self._is_transposed(data[0]) and len(self._reduction_axes(node)) > 0

    def _can_reorder(self, value: str) -> bool:
        """Return True if an operand has that order or can be reordered at no cost."""
        if not value or self._is_transposed(value) or value in self.constants:
            return True
        shape = self.types[value].shape
        return math.prod(shape) == 1 or (len(shape) == len(self.order) and not _can_move_elements(shape))

    def _reduction_axes(self, node: Node) -> Order:
        """Return the axes of a reduction, or () if they are not constant."""
        axes = self.constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
        return () if axes is None else tuple(int(a) % len(self.order) for a in axes.reshape(-1))

    def _has_dropped_axes(self, node: Node) -> bool:
        return has_trait(node, Trait.REDUCTION) and not node.attributes.get("keepdims", 1)

    def chosen(self) -> dict[str, Node]:
        """Return the operators of regions whose rewrite transposes fewer elements, by result name."""
        readers = dict[str, list[Node | None]]()
        for node in self.graph.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        for name in output_names(self.graph):
            readers.setdefault(name, []).append(None)
        found = dict[str, Node]()
        for region in self._find_regions():
            if self._count_saved_elements(region, readers) > 0:
                found |= region
        return found

    def _find_regions(self) -> list[dict[str, Node]]:
        """Return regions of operators that are connected by results or read the same transposition."""
        above = dict[str, str]()

        def top(name: str) -> str:
            while (found := above.setdefault(name, name)) != name:
                above[name] = above[found]
                name = found
            return name

        for result, node in self.turnable.items():
            for name in filter(self._is_transposed, node.inputs):
                above[top(name)] = top(result)
        regions = dict[str, dict[str, Node]]()
        for result, node in self.turnable.items():
            regions.setdefault(top(result), {})[result] = node
        return list(regions.values())

    def _count_saved_elements(self, region: dict[str, Node], readers: dict[str, list[Node | None]]) -> int:
        """Return the number of elements that the rewrite saves from transposition, minus the newly transposed ones."""
        inside = {id(n) for n in region.values()}
        saved = 0
        for name in dict.fromkeys(i for n in region.values() for i in n.inputs if i in self.sources):
            if all(id(r) in inside for r in readers[name]):
                saved += self._transposed_elements(name)
        for name, node in region.items():
            outside = [r for r in readers.get(name, []) if id(r) not in inside]
            if self._has_dropped_axes(node):
                saved -= self._transposed_elements(name) if self._left(node) != tuple(sorted(self._left(node))) else 0
                continue
            undone = [r for r in outside if r is not None and _is_transpose(r) and order_of(r, self.graph) == self.back]
            saved += len(undone) * self._transposed_elements(name)
            saved -= self._transposed_elements(name) if len(undone) < len(outside) else 0
        return saved

    def _transposed_elements(self, name: str) -> int:
        shape = self.types[name].shape
        return math.prod(shape) if _can_move_elements(shape) else 1

    # --- rewriting --------------------------------------------------------------------------------

    def rule(self, node: Node) -> bool:
        if node.outputs[0] not in self.moved:
            return False
        self._turn(node)
        return True

    def _turn(self, node: Node) -> None:
        result = node.outputs[0]
        if has_trait(node, Trait.REDUCTION):
            self._transpose_reduction(node)
            return
        attributes, inputs = dict(node.attributes), tuple(self._reorder_operand(i) for i in node.inputs)
        if node.op == "Concat":
            attributes["axis"] = self.order[int(attributes["axis"]) % len(self.order)]
        if node.op == "Pad":
            pads = self.constants[node.inputs[1]].reshape(2, -1)[:, list(self.back)]
            steering = (self.add_constant(node.inputs[1], pads.reshape(-1)), *node.inputs[2:])
            inputs = (self._reorder_operand(node.inputs[0]), *steering)
        self._add_transposed(replace(node, inputs=inputs, attributes=attributes), result)

    def _add_transposed(self, node: Node, result: str) -> None:
        """Append ``node`` with its result in the source order, and the transposition that computes ``result``."""
        kind = self.types[result]
        inner = self.inner[result] = self.new_value(result, TensorType(kind.dtype, _permute_shape(kind.shape, self.back)))
        self.append(replace(node, outputs=(inner,)))
        self._add_transpose(inner, result, self.order)

    def _left(self, node: Node) -> Order:
        """Return the axes that a reduction keeps, in result order, numbered as before the transposition."""
        gone = self._reduction_axes(node)
        return tuple(axis for i, axis in enumerate(self.order) if i not in gone)

    def _transpose_reduction(self, node: Node) -> None:
        axes = np.array(sorted(self.order[a] for a in self._reduction_axes(node)), np.int64)
        inputs = (self._reorder_operand(node.inputs[0]), self.add_constant(node.inputs[1], axes), *node.inputs[2:])
        result, left = node.outputs[0], self._left(node)
        if not self._has_dropped_axes(node):
            self._add_transposed(replace(node, inputs=inputs), result)
        elif left == tuple(sorted(left)):
            self.append(replace(node, inputs=inputs))
        else:
            after = tuple(sorted(left).index(a) for a in left)
            kind = self.types[result]
            inner = self.new_value(result, TensorType(kind.dtype, _permute_shape(kind.shape, invert_order(after))))
            self.append(replace(node, inputs=inputs, outputs=(inner,)))
            self._add_transpose(inner, result, after)

    def _reorder_operand(self, value: str) -> str:
        """Return an operand in the order before the transposition."""
        if not value or value in self.inner or value in self.sources:
            return self.inner.get(value) or self.sources.get(value, value)
        shape = self.types[value].shape
        if math.prod(shape) == 1:
            return value
        full = (1,) * (len(self.order) - len(shape)) + shape
        if value in self.constants:
            return self.add_constant(value, self.constants[value].reshape(full).transpose(self.back))
        return self._add_transpose(
            value, self.new_value(value, TensorType(self.types[value].dtype, _permute_shape(full, self.back))), self.back
        )

    def _add_transpose(self, value: str, result: str, order: Order) -> str:
        self.append(Node("Transpose", (value,), (result,), {"perm": order}, version=21))
        return result


def _permute_shape(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    return tuple(shape[i] for i in order)


def _can_move_elements(shape: Sequence[int]) -> bool:
    """Return True if a permutation of these extents can change the order of elements."""
    return sum(n != 1 for n in shape) > 1
