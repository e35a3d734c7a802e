"""The builder of nodes, the rewriter of graphs, and helpers of passes: replacing nodes, renaming values, counting readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from rammer.ir.graph import Graph, Node
from rammer.ir.names import Names, make_identifier
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


class NodeBuilder:
    """New nodes, and the types and constants of their values. ``taken`` are names in use, ``version`` is that of the nodes."""

    def __init__(self, taken: Names, version: int = 21) -> None:
        self.taken, self.version, self.nodes = taken, version, list[Node]()
        self.types: dict[str, TensorType] = {}
        self.constants: dict[str, np.ndarray] = {}

    def append(self, node: Node) -> None:
        """Add a node as it is."""
        self.nodes.append(node)

    def new_value(self, near: str, kind: TensorType) -> str:
        """Return a new name, derived from ``near``, for a value of type ``kind``."""
        name = make_identifier(near, self.taken)
        self.types[name] = kind
        return name

    def add_constant(self, near: str, value: np.ndarray) -> str:
        """Add a constant and return its name."""
        name = self.new_value(near, TensorType(str(value.dtype), value.shape))
        self.constants[name] = np.asarray(value, order="C")
        return name

    def add_node(self, op: str, inputs: Sequence[str], result: str, like: Node | None = None, **attributes: Any) -> str:
        """Add a node with one ``result``, which is returned. Its name and version are those of ``like``."""
        name, version = (result, self.version) if like is None else (like.name, like.version)
        self.append(Node(op, tuple(inputs), (result,), attributes, name, "", version))
        return result

    def reshape(self, value: str, shape: tuple[int, ...], result: str) -> str:
        """Add a Reshape of ``value`` to ``shape`` and return its ``result``."""
        return self.add_node("Reshape", (value, self.add_constant(f"{result}_shape", np.array(shape, np.int64))), result)


class GraphRewriter(NodeBuilder):
    """The graph that a pass builds, node by node.

    A subclass is a pass: ``rule`` matches a node, checks it, and adds its replacement. ``producers`` contains the new nodes, and
    ``counts`` the reads of each value in the original graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(Names(graph.types))
        self.graph, self.changed = graph, False
        self.types |= graph.types
        self.constants |= graph.constants
        self.outputs, self.counts, self.producers = output_names(graph), count_readers(graph), find_producers(graph)
        self.names: dict[str, str] = {}  #: Values that were replaced by other values.

    def rule(self, node: Node) -> bool:
        """Add the replacement of ``node``, or return False to keep it."""
        raise NotImplementedError

    def rewritten(self) -> Graph:
        """Return the graph after the rule for each node, or the graph itself if nothing changed."""
        for node in self.graph.nodes:
            node = rename_values([node], self.names)[0] if self.names else node
            if self.rule(node):
                self.changed = True
            else:
                self.append(node)
        nodes = rename_values(self.nodes, self.names)
        return rebuild_graph(replace(self.graph, types=self.types), nodes, self.constants) if self.changed else self.graph

    def append(self, node: Node) -> None:
        super().append(node)
        self.producers.update({o: node for o in node.outputs if o})

    def replace_node(self, node: Node, *others: Node) -> None:
        """Put ``others`` in the place of ``node``, which is one of the new nodes."""
        at = next(i for i in reversed(range(len(self.nodes))) if self.nodes[i] is node)
        self.nodes[at : at + 1] = others
        self.producers.update({o: other for other in others for o in other.outputs if o})

    def produced(self, value: str, op: str) -> Node | None:
        """Return the node that computes ``value`` if it is the standard operator ``op``, else None."""
        node = self.producers.get(value)
        return node if node is not None and is_operator(node, op) else None


@dataclass(frozen=True)
class RewritePass:
    """A pass that runs a ``GraphRewriter`` once over a graph."""

    name: ClassVar[str]
    rewriter: ClassVar[type[GraphRewriter]]

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""
        return self.rewriter(graph).rewritten()


def is_operator(node: Node, *ops: str) -> bool:
    """Return True if ``node`` is one of these operators of the standard domain."""
    return node.op in ops and not node.domain
