"""Splitting of long bidirectional layers into two unidirectional layers, with time as their first axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rammer.frontend.loops.loop_chunk import STATES
from rammer.frontend.lower.recurrence import PARAMETERS
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import GraphRewriter
from rammer.ir.types import TensorType
from rammer.passes.loops.recurrent_stacks import is_cell

#: Inputs with one part per direction, and inputs whose batch comes first if ``layout`` is set.
_BY_DIRECTION = (1, 2, 3, 5, 6, 7)
_TURNED = (0, 5, 6)


def one_way(graph: Graph, most: int) -> Graph:
    """Return ``graph`` with layers of more than ``most`` steps in that form."""
    return _Splitting(graph, most).rewritten()


def _is_irregular_layer(node: Node) -> bool:
    two = node.attributes.get("direction") == "bidirectional"
    return two or bool(node.attributes.get("layout", 0)) or not node.outputs[0]  # stacks identify a layer by its first output


def _sequence_length(graph: Graph, node: Node) -> int:
    return graph.types[node.inputs[0]].shape[1 if node.attributes.get("layout", 0) else 0]


class _Splitting(GraphRewriter):
    def __init__(self, graph: Graph, most: int) -> None:
        super().__init__(graph)
        self.most = most

    def rule(self, node: Node) -> bool:
        if not is_cell(node) or not _is_irregular_layer(node) or _sequence_length(self.graph, node) <= self.most:
            return False
        self.layer(node)
        return True

    def layer(self, node: Node) -> None:
        """Append one layer in its new form."""
        inputs = [*node.inputs, *[""] * (8 - len(node.inputs))]
        if node.attributes.get("layout", 0):
            for place in _TURNED:
                inputs[place] = self._transpose_value(inputs[place], (1, 0, 2), node) if inputs[place] else ""
        ways = ("forward", "reverse") if node.attributes.get("direction") == "bidirectional" else (_layer_direction(node),)
        made = [self._add_direction(node, inputs, d, way, len(ways)) for d, way in enumerate(ways)]
        for place, name in enumerate(node.outputs):
            if name:
                self._join_result(node, name, [m[place] for m in made], place)

    def _add_direction(self, node: Node, inputs: Sequence[str], d: int, way: str, ways: int) -> list[str]:
        """Append the layer of one direction, and return its results."""
        own = [self._slice_direction(n, d, node) if n and ways > 1 and i in _BY_DIRECTION else n for i, n in enumerate(inputs)]
        while not own[-1]:
            own.pop()
        width = self.types[own[2]].shape[-1]
        steps, batch = self.types[own[0]].shape[:2]
        dtype = self.types[own[0]].dtype
        shapes = [(steps, 1, batch, width), *[(1, batch, width)] * STATES[node.op]]
        outputs = [self.new_value(f"{node.outputs[0] or node.outputs[1]}_{way}", TensorType(dtype, s)) for s in shapes]
        attributes = {**node.attributes, **_direction_activations(node, d, ways), "direction": way}
        attributes.pop("layout", None)
        kept = {k: v for k, v in attributes.items() if v != ()}
        self.append(replace(node, inputs=tuple(own), outputs=tuple(outputs), attributes=kept))
        return outputs

    def _join_result(self, node: Node, name: str, parts: Sequence[str], place: int) -> None:
        """Append the nodes that join a result of the layer from its directions."""
        turned = bool(node.attributes.get("layout", 0))
        order = ((2, 0, 1, 3) if place == 0 else (1, 0, 2)) if turned else ()
        whole = parts[0]
        if len(parts) > 1:
            axis, kind = (1 if place == 0 else 0), self.types[parts[0]]
            shape = tuple(n * len(parts) if i == axis else n for i, n in enumerate(kind.shape))
            whole = self.new_value(f"{name}_both", TensorType(kind.dtype, shape)) if order else name
            self.add_node("Concat", parts, whole, node, axis=axis)
        if order or len(parts) == 1:
            self.add_node("Transpose" if order else "Identity", [whole], name, node, **({"perm": order} if order else {}))

    def _transpose_value(self, name: str, order: tuple[int, ...], node: Node) -> str:
        kind = self.types[name]
        result = self.new_value(f"{name}_turned", TensorType(kind.dtype, tuple(kind.shape[i] for i in order)))
        return self.add_node("Transpose", [name], result, node, perm=order)

    def _slice_direction(self, name: str, d: int, node: Node) -> str:
        """Return the slice of ``name`` for direction ``d``."""
        value, kind = self.graph.constant(name), self.types[name]
        kind = TensorType(kind.dtype, (1, *kind.shape[1:]))
        if value is not None:
            return self.add_constant(f"{name}_{d}", value[d : d + 1])
        bounds = [self.add_constant(f"{name}_bound", np.array([n], np.int64)) for n in (d, d + 1, 0)]
        return self.add_node("Slice", [name, *bounds], self.new_value(f"{name}_{d}", kind), node)


def _layer_direction(node: Node) -> str:
    return str(node.attributes.get("direction", "forward"))


def _direction_activations(node: Node, d: int, ways: int) -> dict[str, tuple[Any, ...]]:
    """Return the activations of one direction and their parameters, in "the order of activation functions"."""
    names = tuple(node.attributes.get("activations") or ())
    count = len(names) // ways
    own = names[d * count : (d + 1) * count]
    found: dict[str, tuple[Any, ...]] = {"activations": own}
    for index, key in enumerate(("activation_alpha", "activation_beta")):
        takes = [PARAMETERS.get(str(n).lower(), (None, None))[index] is not None for n in names]
        before, here = sum(takes[: d * count]), sum(takes[d * count : (d + 1) * count])
        found[key] = tuple(node.attributes.get(key) or ())[before : before + here]
    return found
