"""Dead code elimination: unread nodes, optional results and constants are removed."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from onnx import defs

from rammer.frontend.read import schemas
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import output_names, rebuild_graph


@dataclass(frozen=True, slots=True)
class DeadCode:
    """A pass that removes nodes that do not reach a graph output; unread optional results become absent (``_``)."""

    name: ClassVar[str] = "dce"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        live = output_names(graph)
        kept: list[Node] = []
        for node in reversed(graph.nodes):
            if not live.intersection(node.outputs):
                continue
            kept.append(_trim_outputs(node, live))
            live.update(n for n in node.inputs if n)
        kept.reverse()
        same = len(kept) == len(graph.nodes) and all(map(operator.is_, kept, graph.nodes))
        return graph if same and graph.constants.keys() <= live else rebuild_graph(graph, kept)


def _trim_outputs(node: Node, live: set[str]) -> Node:
    """Return ``node`` without unread optional results."""
    schema = node.domain, node.op, node.version
    dead = [i for i, o in enumerate(node.outputs) if o and o not in live and _is_optional_output(*schema, i)]
    if not dead:
        return node
    outputs = ["" if i in dead else o for i, o in enumerate(node.outputs)]
    while not outputs[-1]:
        outputs.pop()
    return replace(node, outputs=tuple(outputs))


@cache
def _is_optional_output(domain: str, op: str, version: int, index: int) -> bool:
    if not schemas.has_schema(op, version, domain):  # operators of plugins: their lowering defines the results
        return False
    formal = schemas.get_schema(op, version, domain).outputs
    return index < len(formal) and formal[index].option == defs.OpSchema.FormalParameterOption.Optional
