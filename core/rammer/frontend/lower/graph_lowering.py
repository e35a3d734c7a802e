"""The lowering Graph -> ComputeGraph: every node becomes tensor expressions through the registry of lowerings."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

import rammer.frontend.lower.operators  # noqa: F401  (importing it fills the registry)
from rammer.errors import attribute_errors
from rammer.frontend.lower.lowering_registry import REGISTRY, CannotLower, Lowering, LoweringFn
from rammer.ir.compute import Compute, ComputeGraph, verify_compute_graph
from rammer.ir.graph import Graph, Node
from rammer.ir.names import Names
from rammer.ir.types import TensorType
from rammer.verify.expressions import Bodies

#: Lowerings by (domain, operator).
Lowerings: TypeAlias = Mapping[tuple[str, str], LoweringFn]


def lower_node(
    graph: Graph,
    node: Node,
    taken: set[str],
    lowerings: Lowerings = REGISTRY,
    ranged: bool = False,
    any_ratio: bool = False,
) -> Lowering:
    """Lower one node, for all lengths of a range if ``ranged``. Its intermediates get names that are not in ``taken``, and these
    names are added to it.

    Raises CannotLower if the operator has no tensor expression here. Raises ValueError if a lowering breaks its contract: an
    output is missing, or its type differs from shape inference."""
    function = lowerings.get((node.domain, node.bare))
    if function is None:
        raise CannotLower(f"{f'{node.domain}.' if node.domain else ''}{node.bare} has no lowering")
    context = Lowering(graph, node, taken=taken, ranged=ranged, any_ratio=any_ratio)
    with attribute_errors(function):
        function(context)
        for output in node.outputs:
            if output and context.types.get(output) != graph.types[output]:
                raise ValueError(
                    f"the lowering of {node.op} gives {context.types.get(output)} for output {output}, "
                    f"which is declared {graph.types[output]}\n  {node}"
                )
        if function is not REGISTRY.get((node.domain, node.bare)):
            # An out-of-bounds read of a plugin's lowering is reported here, not later by the planner.
            bodies = Bodies(ChainMap(context.types, graph.types))  # type: ignore[arg-type]  # which is only read
            for compute in context.computes:
                bodies.check(compute, node.op)
    return context


def can_lower(graph: Graph, node: Node, lowerings: Lowerings = REGISTRY) -> str | None:
    """Return None if ``node`` can be lowered, else the reason for running it on the host."""
    try:
        # The result is discarded, so only the node's names matter; all names of the graph would make this quadratic.
        lower_node(graph, node, Names(n for n in (*node.inputs, *node.outputs) if n), lowerings)
    except CannotLower as reason:
        return str(reason)
    return None


def lower(
    graph: Graph,
    lowerings: Lowerings = REGISTRY,
    otherwise: Callable[[Node], Sequence[Compute]] | None = None,
    ranged: bool = False,
    any_ratio: bool = False,
) -> ComputeGraph:
    """Lower every node of ``graph``, in order, and verify the result. With ``ranged``, it has the form of all lengths; with
    ``any_ratio``, also of resizes by a ratio that depends on the length. Nodes for which ``otherwise`` returns computes are not
    lowered. Raises CannotLower, ValueError."""
    taken = Names(graph.types)
    computes: list[Compute] = []
    types: dict[str, TensorType] = {v.name: v.type for v in graph.inputs}
    constants: dict[str, np.ndarray] = dict(graph.constants)
    for node in graph.nodes:
        if otherwise is not None and (others := otherwise(node)):
            computes += others
            types |= {c.name: c.type for c in others}
            continue
        context = lower_node(graph, node, taken, lowerings, ranged, any_ratio)
        computes += context.computes
        constants |= context.constants
        types |= context.types
    outputs = tuple(v.name for v in graph.outputs)
    used = {name for c in computes for name in c.reads} | set(outputs)
    constants = {n: v for n, v in constants.items() if n in used}
    types |= {n: TensorType(str(v.dtype), v.shape) for n, v in constants.items()}
    aliases = {v.name: v.external or v.name for v in (*graph.inputs, *graph.outputs)}
    result = ComputeGraph(graph.name, tuple(v.name for v in graph.inputs), outputs, tuple(computes), types, constants, aliases)
    verify_compute_graph(result)
    return result
