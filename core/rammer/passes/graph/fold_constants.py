"""Constant folding: operators on constants are replaced by their values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rammer.frontend.bind.evaluator import evaluate_node
from rammer.frontend.op_traits import Trait, has_trait
from rammer.frontend.read import limits
from rammer.frontend.read.node_protos import body_graphs, is_random
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import output_names, rebuild_graph


@dataclass(frozen=True, slots=True)
class FoldConstants:
    """A pass that folds ``y = Op(constants)`` to a constant ``y``.

    Results may have at most ``limit`` bytes and ``times`` the bytes of their operands. Graph outputs stay results of nodes; only
    their operands fold. Operators that the evaluator (``frontend.bind.evaluator``) does not support, random operators and those
    with subgraphs stay. Weights of matrix products that are stored as codes also stay: kernels decode them.
    """

    limit: int = field(default_factory=lambda: limits.MAX_FOLDED_BYTES)
    times: int = 1  #: With a factor of 1, repeated folding cannot grow the constants without bound.
    name: ClassVar[str] = "fold_constants"

    def __str__(self) -> str:
        return self.name if self.limit == limits.MAX_FOLDED_BYTES else f"{self.name}{{limit={self.limit}}}"

    def __call__(self, graph: Graph) -> Graph:
        known = dict(graph.constants)
        outputs = output_names(graph) | _find_coded_operands(graph)
        nodes = [node for node in graph.nodes if not self._try_fold(node, graph, known, outputs)]
        return graph if len(nodes) == len(graph.nodes) else rebuild_graph(graph, nodes, known)

    def _try_fold(self, node: Node, graph: Graph, known: dict[str, np.ndarray], outputs: set[str]) -> bool:
        """Return True if ``node`` folds; its values are then added to ``known``."""
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
        """Return True if the results may become constants."""
        made = sum(graph.types[o].nbytes for o in node.outputs if o)
        return made <= max(self.limit, self.times * sum(known[n].nbytes for n in {*node.inputs} if n))


def _find_coded_operands(graph: Graph) -> set[str]:
    """Return the operands of matrix products that are decoded from codes."""
    read = {n for node in graph.nodes if has_trait(node, Trait.MATRIX_PRODUCT) for n in node.inputs[:2]}
    return {o for node in graph.nodes if node.op == "DequantizeLinear" and not node.domain for o in node.outputs if o in read}
