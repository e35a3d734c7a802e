"""Common subexpression elimination: equal operators on equal operands are computed once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rammer.frontend.op_traits import Trait, has_trait
from rammer.frontend.read.node_protos import is_random
from rammer.ir.constants.digest import digest_array
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import output_names, rebuild_graph, rename_values


@dataclass(frozen=True, slots=True)
class CommonSubexpressions:
    """A pass that merges equal nodes and equal constants. Nodes that compute graph outputs stay."""

    name: ClassVar[str] = "cse"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        names = _equal_constants(graph)
        outputs = output_names(graph)
        first: dict[Hashable, Node] = {}
        nodes = []
        for original in graph.nodes:
            node = rename_values([original], names)[0]
            same = first.setdefault(_node_key(node), node)
            if same is node or is_random(node) or outputs.intersection(node.outputs):
                nodes.append(node)
            else:
                names |= {dead: kept for dead, kept in zip(node.outputs, same.outputs, strict=True) if dead}
        return rebuild_graph(graph, nodes) if names else graph


def _equal_constants(graph: Graph) -> dict[str, str]:
    """Return a map from each repeated constant to the first equal one."""
    first: dict[Hashable, str] = {}
    names = {}
    for name, array in graph.constants.items():
        kept = first.setdefault(digest_array(array), name)
        if kept != name:
            names[name] = kept
    return names


def _node_key(node: Node) -> Hashable:
    present = tuple(bool(o) for o in node.outputs)
    attributes = tuple(sorted((name, _attribute_key(value)) for name, value in node.attributes.items()))
    commutes = has_trait(node, Trait.COMMUTATIVE) and len(node.inputs) == 2
    inputs = tuple(sorted(node.inputs)) if commutes else node.inputs
    return node.domain, node.op, node.version, inputs, present, attributes


def _attribute_key(value: Any) -> Hashable:
    """Return a key that is equal for equal attributes. It includes the type, since 1 == 1.0 == True."""
    if isinstance(value, np.ndarray):
        return "array", digest_array(value)
    if isinstance(value, tuple):
        return "tuple", tuple(_attribute_key(v) for v in value)
    return type(value).__name__, value if not isinstance(value, float) else repr(value)
