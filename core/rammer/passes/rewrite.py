"""Helpers of passes: replacing nodes, renaming values, counting readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from rammer.ir.graph import Graph, Node
from rammer.ir.types import TensorType


def count_readers(graph: Graph) -> Counter[str]:
    """Return the number of reads of each value; a graph output counts as one."""
    counts = Counter(name for node in graph.nodes for name in node.inputs if name)
    counts.update(v.name for v in graph.outputs)
    return counts


def find_producers(graph: Graph) -> dict[str, Node]:
    """Return a map from value name to the node that computes it."""
    return {name: node for node in graph.nodes for name in node.outputs if name}


def output_names(graph: Graph) -> set[str]:
    """Return the names of the graph's outputs."""
    return {v.name for v in graph.outputs}


def rename_values(nodes: Iterable[Node], names: Mapping[str, str]) -> list[Node]:
    """Return ``nodes`` with inputs and outputs renamed; chains of renamings are resolved."""

    def final(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    result = []
    for node in nodes:
        inputs, outputs = tuple(map(final, node.inputs)), tuple(map(final, node.outputs))
        changed = (inputs, outputs) != (node.inputs, node.outputs)
        result.append(replace(node, inputs=inputs, outputs=outputs) if changed else node)
    return result


def rebuild_graph(graph: Graph, nodes: Iterable[Node], constants: Mapping[str, np.ndarray] | None = None) -> Graph:
    """Return ``graph`` with other nodes, further constants, and without unread types and constants."""
    nodes = tuple(nodes)
    read = {name for node in nodes for name in node.inputs if name}
    kept = {n: a for n, a in {**graph.constants, **(constants or {})}.items() if n in read}
    types = {v.name: v.type for v in graph.inputs}
    types |= {n: TensorType(str(a.dtype), a.shape) for n, a in kept.items()}
    types |= {o: graph.types[o] for node in nodes for o in node.outputs if o}
    return replace(graph, nodes=nodes, constants=kept, types=types)


def is_filled_with(value: np.ndarray | None, number: float) -> bool:
    """Return True if every element of a constant is ``number``."""
    return value is not None and value.size > 0 and bool(np.all(value == number))
