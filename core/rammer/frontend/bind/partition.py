"""Partition of a graph's nodes into programs and host operators."""

from __future__ import annotations

from rammer.frontend.bind.evaluator import check_host, host_caveat
from rammer.frontend.bind.loop_body import is_turns
from rammer.frontend.lower.graph_lowering import Lowerings, can_lower
from rammer.frontend.lower.lowering_registry import REGISTRY
from rammer.frontend.lower.operators.topk import count_sort_steps
from rammer.ir.graph import Graph, Node


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
