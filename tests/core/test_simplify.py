"""Dead code elimination: no expression remains that reaches no output, whatever the nodes around it read."""

from __future__ import annotations

import numpy as np
import pytest

from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import ComputeGraph
from rammer.passes.compute.simplify import simplify_graph
from rammer_testing.graphs.case import Call, GraphCase
from rammer_testing.graphs.generate import graph as drawn

#: Operators with several expressions, some of which may ignore operands.
READERS = (
    "LpNormalization",
    "MeanVarianceNormalization",
    "Softmax",
    "EyeLike",
    "IsInf",
    "Resize",
    "Slice",
    "Gather",
    "Pad",
    "Concat",
    "MatMul",
    "Expand",
)


def unread(graph: ComputeGraph) -> list[str]:
    """Return the names of computes and constants without a reader."""
    read = {n for c in graph.computes for n in c.reads} | set(graph.outputs)
    return [n for n in (*(c.name for c in graph.computes), *graph.constants) if n not in read]


@pytest.mark.slow
def test_nothing_unread_is_left_of_random_graphs() -> None:
    dropped = 0
    for seed in range(60):
        case = drawn(5, seed, 20, READERS, longest=12)
        if case is None:
            continue
        try:
            graph = lower(bind(read_model(case.model()), {n: a.shape for n, a in case.inputs.items()}))
        except (BadInput, CannotLower):
            continue
        left = simplify_graph(graph)
        assert not unread(left), f"seed {seed}"
        dropped += bool(unread(graph))
    assert dropped, "no graph had anything to drop: the search would find nothing"


def test_a_graph_that_is_read_stays_itself() -> None:
    x = np.ones((2, 3), np.float32)
    graph = lower(bind(read_model(GraphCase(17, {"x": x}, {}, (Call("Relu", ("x",), ("y",)),), ("y",)).model()), {}))
    assert simplify_graph(graph) is graph
