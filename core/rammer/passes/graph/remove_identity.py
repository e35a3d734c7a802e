"""Removal of operators that return their operand unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import numpy as np

from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import count_readers, find_producers, is_filled_with, output_names, rebuild_graph, rename_values

Test: TypeAlias = Callable[[Node, Graph], bool]


@dataclass(frozen=True, slots=True)
class RemoveIdentity:
    """A rewrite of ``y = Identity(x)`` that lets every consumer of ``y`` read ``x``, and of operators that act as Identity.

    Examples are Dropout in inference, Cast to the same type, Reshape to the same shape and Transpose that moves nothing. Others
    are Concat and Sum of one operand, Pad by zero, and multiplication by one. If a node computes the operand of a graph output,
    the output's name moves to it. Otherwise the Identity stays.
    """

    name: ClassVar[str] = "remove_identity"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        names: dict[str, str] = {}
        kept: list[Node] = []
        # Outputs that must not be renamed: those of the graph, and those whose names were moved.
        fixed, made = output_names(graph), find_producers(graph)
        read = count_readers(graph).keys()
        changed = False
        for node in graph.nodes:
            source = None if any(o in read for o in node.outputs[1:] if o) else _unchanged_operand(node, graph)
            if source is None:
                kept.append(node)
                continue
            while source in names:
                source = names[source]
            result = node.outputs[0]
            if result not in fixed:
                names[result] = source
            elif source in made and source not in fixed:
                names[source] = result
            else:
                trivial = node.op == "Identity" and not node.domain
                kept.append(node if trivial else Node("Identity", (source,), (result,), {}, node.name, "", 19))
                changed |= not trivial
        return rebuild_graph(graph, rename_values(kept, names)) if names or changed else graph


def _unchanged_operand(node: Node, graph: Graph) -> str | None:
    """Return the operand that ``node`` returns unchanged, or None."""
    if node.domain:
        return None
    if node.op in ("Mul", "Div", "Add", "Sub", "Pow"):
        return _non_neutral_operand(node, graph)
    test = _TESTS.get(node.op)
    if test is None or graph.types[node.inputs[0]] != graph.types[node.outputs[0]]:
        return None
    return node.inputs[0] if test(node, graph) else None


def _non_neutral_operand(node: Node, graph: Graph) -> str | None:
    """Return the non-neutral operand of a multiplication by one and the like. x + 0 maps -0 to 0, so its neutral is -0."""
    a, b = node.inputs
    sides = {"Mul": (a, b), "Add": (a, b)}.get(node.op, (b,))
    for side in sides:
        other = b if side == a else a
        if graph.types[other] == graph.types[node.outputs[0]] and _is_neutral(node.op, graph.constant(side)):
            return other
    return None


def _is_neutral(op: str, value: np.ndarray | None) -> bool:
    if value is None or op not in ("Add", "Sub"):
        return is_filled_with(value, 1)
    negative = np.signbit(value) if value.dtype.kind == "f" else np.full(value.shape, op == "Add")
    return is_filled_with(value, 0) and bool(np.all(negative == (op == "Add")))


def _is_always_identity(node: Node, graph: Graph) -> bool:
    return True


def _is_inference(node: Node, graph: Graph) -> bool:
    # Until opset 12 the training mode is not an operand, and inference graphs omit it.
    return len(node.inputs) < 3 or not node.inputs[2] or is_filled_with(graph.constant(node.inputs[2]), 0)


def _in_place(node: Node, graph: Graph) -> bool:
    order = node.attributes.get("perm")
    rank = len(graph.types[node.inputs[0]].shape)
    order = tuple(reversed(range(rank))) if order is None else order
    # Axes of extent 1 may move freely among the others.
    long = [axis for axis in order if graph.types[node.inputs[0]].shape[axis] != 1]
    return long == sorted(long)


def _one_operand(node: Node, graph: Graph) -> bool:
    return len(node.inputs) == 1


def _is_forward_slice(node: Node, graph: Graph) -> bool:
    if len(node.inputs) < 5 or not node.inputs[4]:
        return True
    steps = graph.constant(node.inputs[4])
    return steps is not None and bool(np.all(steps > 0))


def _is_unpadded(node: Node, graph: Graph) -> bool:
    return is_filled_with(graph.constant(node.inputs[1]), 0) if len(node.inputs) > 1 else False


#: Operator -> predicate that is True if a node of unchanged type returns its first operand.
_TESTS: Final[Mapping[str, Test]] = {
    **dict.fromkeys(
        ("Identity", "Cast", "CastLike", "Reshape", "Flatten", "Expand", "Squeeze", "Unsqueeze"), _is_always_identity
    ),
    **dict.fromkeys(("Concat", "Sum", "Max", "Min", "Mean", "Split"), _one_operand),
    "Dropout": _is_inference,
    "Transpose": _in_place,
    "Tile": _is_always_identity,
    "Slice": _is_forward_slice,
    "Pad": _is_unpadded,
}
