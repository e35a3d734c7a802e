"""Partition of a graph's nodes into programs and host operators, and the parts as separate graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rammer.frontend.bind.evaluator import check_host, host_caveat
from rammer.frontend.bind.loop_body import is_turns
from rammer.frontend.lower.graph_lowering import Lowerings, can_lower
from rammer.frontend.lower.lowering_registry import REGISTRY
from rammer.frontend.lower.operators.topk import count_sort_steps
from rammer.ir.graph import Graph, Node, Value


def split_segments(graph: Graph, lowerings: Lowerings = REGISTRY, sort_steps: int = 0) -> list[tuple[list[Node], str]]:
    """Cut the nodes into device segments and single host nodes, in a legal order.

    A node's depth is the number of device/host transitions on the path to it; nodes of one depth form a segment. Returns (nodes,
    reason), with an empty reason for device segments. Sorts of more than ``sort_steps`` steps run on the host (0: none)."""
    depth_of: dict[str, int] = {}
    groups: dict[int, list[tuple[Node, str]]] = {}
    for node in graph.nodes:
        why = "it is a loop program" if is_turns(node) else can_lower(graph, node, lowerings) or ""
        if not why and 0 < sort_steps < count_sort_steps(graph, node):
            why = "the host sorts faster than this device counts"
        if why and not is_turns(node):
            check_host(node, graph.types)
            why += f"; {doubt}" if (doubt := host_caveat(node)) else ""
        depth = max((depth_of.get(i, 0) for i in node.inputs if i), default=0)
        depth += (depth % 2 == 1) != bool(why)
        depth_of.update({o: depth for o in node.outputs if o})
        groups.setdefault(depth, []).append((node, why))
    result: list[tuple[list[Node], str]] = []
    for depth in sorted(groups):
        if depth % 2:
            result += [([node], why) for node, why in groups[depth]]
        else:
            result.append(([node for node, _ in groups[depth]], ""))
    return result


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
