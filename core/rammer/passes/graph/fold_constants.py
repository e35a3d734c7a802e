"""Constant folding: an operator on constants -> its value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rammer.frontend.bind.evaluator import evaluate_node
from rammer.frontend.read import limits
from rammer.frontend.read.node_protos import body_graphs, is_random
from rammer.ir.graph import Graph, Node
from rammer.passes.rewrite import output_names, rebuild_graph


@dataclass(frozen=True, slots=True)
class Fold:
    """``y = Op(constants)`` -> constant ``y``, unless its results exceed ``limit`` bytes, and ``times`` those that it reads.

    A graph output stays the result of a node: only what leads to it folds. Operators that
    nothing judged computes (``frontend.bind.evaluator``), random ones and those with sub-graphs stay.
    So do weights of matrix products that are stored as codes: they are decoded where they are read.
    """

    limit: int = field(default_factory=lambda: limits.MAX_FOLDED_BYTES)
    times: int = 1  #: What is no larger than what it was made of cannot grow without end.
    name: ClassVar[str] = "fold"

    def __str__(self) -> str:
        return self.name if self.limit == limits.MAX_FOLDED_BYTES else f"{self.name}{{limit={self.limit}}}"

    def __call__(self, graph: Graph) -> Graph:
        known = dict(graph.constants)
        outputs = output_names(graph) | _find_coded_operands(graph)
        nodes = [node for node in graph.nodes if not self._try_fold(node, graph, known, outputs)]
        return graph if len(nodes) == len(graph.nodes) else rebuild_graph(graph, nodes, known)

    def _try_fold(self, node: Node, graph: Graph, known: dict[str, np.ndarray], outputs: set[str]) -> bool:
        """Whether ``node`` folds; its values are then in ``known``."""
        results = [o for o in node.outputs if o]
        if any(n and n not in known for n in node.inputs) or outputs.intersection(results):
            return False
        if is_random(node) or body_graphs(node) or not self._can_store_results(node, graph, known):
            return False
        try:
            values = evaluate_node(node, known, graph.types)
        except NotImplementedError:
            return False
        if any(values[o].shape != graph.types[o].shape for o in results):
            return False
        known |= {o: values[o].astype(graph.types[o].dtype, copy=False) for o in results}
        return True

    def _can_store_results(self, node: Node, graph: Graph, known: dict[str, np.ndarray]) -> bool:
        """Whether the results may become constants."""
        made = sum(graph.types[o].nbytes for o in node.outputs if o)
        return made <= max(self.limit, self.times * sum(known[n].nbytes for n in {*node.inputs} if n))


def _find_coded_operands(graph: Graph) -> set[str]:
    """Operands of matrix products that are made of codes."""
    read = {n for node in graph.nodes if node.op in ("MatMul", "Gemm") and not node.domain for n in node.inputs[:2]}
    return {o for node in graph.nodes if node.op == "DequantizeLinear" and not node.domain for o in node.outputs if o in read}
