"""Reference evaluation of a Graph: every node is computed separately on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rammer.frontend.bind.evaluator import evaluate_node
from rammer.ir.formats import from_carrier, to_carrier
from rammer.ir.graph import Graph


def evaluate_graph(graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of ``graph``; inputs and outputs have their ONNX names."""
    values = dict(graph.constants)
    values |= {v.name: to_carrier(inputs[v.external or v.name]) for v in graph.inputs}
    for node in graph.nodes:
        values |= evaluate_node(node, values, graph.types, host=True)
    return {v.external or v.name: from_carrier(values[v.name], v.port.dtype) for v in graph.outputs}
