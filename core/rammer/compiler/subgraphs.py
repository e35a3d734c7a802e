"""The parts of a graph as separate graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rammer.ir.graph import Graph, Node, Value


class SubgraphIndex:
    """An index of a graph for its segments, built once: segments may be as many as operators."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers: dict[str, list[int]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self.readers.setdefault(name, []).append(id(node))
        self.outputs = {v.name for v in graph.outputs}
        self.external = {v.name: v.external for v in (*graph.inputs, *graph.outputs)}
        self.place = {name: i for i, name in enumerate(graph.constants)}

    def subgraph(self, nodes: list[Node], number: int) -> Graph:
        """Return the graph of ``nodes``: inputs are values computed elsewhere, outputs are values needed elsewhere."""
        graph, inside = self.graph, {id(n) for n in nodes}
        made = dict.fromkeys(o for n in nodes for o in n.outputs if o)
        used = dict.fromkeys(i for n in nodes for i in n.inputs if i)
        constants = sorted((n for n in used if n in self.place), key=self.place.__getitem__)

        def values(names: Iterator[str]) -> tuple[Value, ...]:
            return tuple(Value(n, graph.types[n], self.external.get(n, "")) for n in names)

        def wanted(name: str) -> bool:
            return name in self.outputs or any(reader not in inside for reader in self.readers.get(name, ()))

        return replace(
            graph,
            name=graph.name if number == 0 else f"{graph.name}_{number}",
            nodes=tuple(nodes),
            inputs=values(i for i in used if i not in made and i not in self.place),
            outputs=values(o for o in made if wanted(o)),
            types={n: graph.types[n] for n in (*made, *used)},
            constants={n: graph.constants[n] for n in constants},
        )
