"""Operators with unread expressions that would otherwise be stages of a kernel."""

from __future__ import annotations

import numpy as np
import pytest

from rammer_testing.graphs.case import Call, GraphCase
from rammer_testing.graphs.judge import Judge, Setting


def shape_alone() -> GraphCase:
    """Return EyeLike of a normalisation: it reads only the shape, so the expressions of the normalisation are unread."""
    x = np.full((1, 1), 2.3, np.float32)
    nodes = (
        Call("Round", ("x",), ("r",)),
        Call("Sin", ("r",), ("s",)),
        Call("LpNormalization", ("r",), ("n",)),
        Call("HardSigmoid", ("s",), ("y",)),
        Call("EyeLike", ("n",), ("z",)),
    )
    return GraphCase(11, {"x": x}, {}, nodes, ("y", "z"))


def nothing_detected() -> GraphCase:
    """Return IsInf that detects neither sign and therefore reads nothing."""
    x, w = np.array([-0.6, -0.5, -0.2], np.float32).reshape(1, 1, 3, 1), np.ones(1, np.float32)
    nodes = (
        Call("MeanVarianceNormalization", ("x",), ("m",), {"axes": [1, 1]}),
        Call("Atan", ("x",), ("a",)),
        Call("IsInf", ("m",), ("y",), {"detect_negative": 0, "detect_positive": 0}),
        Call("MatMul", ("a", "w"), ("z",)),
    )
    return GraphCase(13, {"x": x, "w": w}, {}, nodes, ("y", "z"))


def resized_away() -> GraphCase:
    """Return Resize to zero rows, which reads nothing of its input."""
    x = np.zeros((1, 1, 1, 1), np.float32)
    constants = {"h": np.float32(0.5), "s": np.array([1.5, 0.75, 1, 1], np.float32), "p": np.array([0.6], np.float32)}
    nodes = (
        Call("Sigmoid", ("x",), ("a",)),
        Call("Add", ("a", "h"), ("b",)),
        Call("ReduceProd", ("b",), ("c",)),
        Call("Resize", ("c", "", "s"), ("y",)),
        Call("PRelu", ("a", "p"), ("z",)),
    )
    return GraphCase(21, {"x": x}, {n: np.asarray(a) for n, a in constants.items()}, nodes, ("y", "z"))


KNOWN = (shape_alone(), nothing_detected(), resized_away())


@pytest.mark.parametrize("case", KNOWN, ids=("shape", "nothing", "resized"))
@pytest.mark.parametrize("precision", ("float32", "float16"))
def test_operators_without_readers_of_a_stage(case: GraphCase, precision: str) -> None:
    verdict = Judge(voices=False)(case, Setting("ipu_sim", precision=precision))
    assert verdict.kind == "ok", verdict
