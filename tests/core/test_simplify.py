"""What nobody reads is not computed: no expression is left that reaches no output, whatever the nodes around it read."""

from __future__ import annotations

import numpy as np
import pytest

from rammer.errors import BadInput
from rammer.frontend.bind import bind
from rammer.frontend.lower import lower
from rammer.frontend.lowering import CannotLower
from rammer.frontend.reader import read_model
from rammer.ir.compute import ComputeGraph
from rammer.plan.simplify import simplified
from rammer.testing.graphs.case import Call, Case
from rammer.testing.graphs.generate import graph as drawn
from rammer.testing.graphs.judge import Judge, Setting


def shape_alone() -> Case:
    """EyeLike reads the shape of a normalisation, whose expressions then reach nothing."""
    x = np.full((1, 1), 2.3, np.float32)
    nodes = (
        Call("Round", ("x",), ("r",)),
        Call("Sin", ("r",), ("s",)),
        Call("LpNormalization", ("r",), ("n",)),
        Call("HardSigmoid", ("s",), ("y",)),
        Call("EyeLike", ("n",), ("z",)),
    )
    return Case(11, {"x": x}, {}, nodes, ("y", "z"))


def nothing_detected() -> Case:
    """IsInf that detects neither sign reads nothing."""
    x, w = np.array([-0.6, -0.5, -0.2], np.float32).reshape(1, 1, 3, 1), np.ones(1, np.float32)
    nodes = (
        Call("MeanVarianceNormalization", ("x",), ("m",), {"axes": [1, 1]}),
        Call("Atan", ("x",), ("a",)),
        Call("IsInf", ("m",), ("y",), {"detect_negative": 0, "detect_positive": 0}),
        Call("MatMul", ("a", "w"), ("z",)),
    )
    return Case(13, {"x": x, "w": w}, {}, nodes, ("y", "z"))


def resized_away() -> Case:
    """Resize to no rows reads nothing of what it would resize."""
    x = np.zeros((1, 1, 1, 1), np.float32)
    constants = {"h": np.float32(0.5), "s": np.array([1.5, 0.75, 1, 1], np.float32), "p": np.array([0.6], np.float32)}
    nodes = (
        Call("Sigmoid", ("x",), ("a",)),
        Call("Add", ("a", "h"), ("b",)),
        Call("ReduceProd", ("b",), ("c",)),
        Call("Resize", ("c", "", "s"), ("y",)),
        Call("PRelu", ("a", "p"), ("z",)),
    )
    return Case(21, {"x": x}, {n: np.asarray(a) for n, a in constants.items()}, nodes, ("y", "z"))


#: Operators with several expressions, and some that need not read what they are given.
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
KNOWN = (shape_alone(), nothing_detected(), resized_away())


def unread(graph: ComputeGraph) -> list[str]:
    """Names of Computes and constants that nobody reads."""
    read = {n for c in graph.computes for n in c.reads} | set(graph.outputs)
    return [n for n in (*(c.name for c in graph.computes), *graph.constants) if n not in read]


@pytest.mark.parametrize("case", KNOWN, ids=("shape", "nothing", "resized"))
@pytest.mark.parametrize("precision", ("float32", "float16"))
def test_operators_without_readers_of_a_stage(case: Case, precision: str) -> None:
    verdict = Judge(voices=False)(case, Setting("ipu_sim", precision=precision))
    assert verdict.kind == "ok", verdict


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
        left = simplified(graph)
        assert not unread(left), f"seed {seed}"
        dropped += bool(unread(graph))
    assert dropped, "no graph had anything to drop: the search would find nothing"


def test_a_graph_that_is_read_stays_itself() -> None:
    x = np.ones((2, 3), np.float32)
    graph = lower(bind(read_model(Case(17, {"x": x}, {}, (Call("Relu", ("x",), ("y",)),), ("y",)).model()), {}))
    assert simplified(graph) is graph
