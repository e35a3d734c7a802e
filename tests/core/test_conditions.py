"""Inlining of conditions into their consumer maps."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import NodeProto, helper
from pass_graphs import graph_of, normal

from rammer.frontend.lower.graph_lowering import lower
from rammer.ir.compute import verify_compute_graph
from rammer.ir.evaluate import run_graph
from rammer.passes.compute.inline_maps import inline_conditions

GUARD = [helper.make_node("IsNaN", ["p"], ["n"]), helper.make_node("Where", ["n", "zero", "p"], ["g"])]
ZERO = {"zero": np.zeros((), np.float32)}


def kinds(rng: np.random.Generator, nodes: list[NodeProto], outputs: tuple[str, ...] = ("y",)) -> list[str]:
    """Return the element types of the Computes after inlining conditions; check equal values, including NaN."""
    before = lower(graph_of(nodes, (3, 5), ZERO, outputs))
    after = inline_conditions(before)
    verify_compute_graph(after)
    x = normal(rng, 3, 5)
    x[1] = -np.inf
    want, have = (run_graph(g, {g.inputs[0]: x}, precise=False) for g in (before, after))
    for name in before.outputs:
        np.testing.assert_array_equal(want[name], have[name])
    return [c.dtype for c in after.computes]


def test_the_guard_of_a_softmax_is_one_map(rng: np.random.Generator) -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["p"]), *GUARD, helper.make_node("Neg", ["g"], ["y"])]
    assert "bool" not in kinds(rng, nodes)


def test_conditions_of_conditions(rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["a"]),
        helper.make_node("IsInf", ["x"], ["b"]),
        helper.make_node("Or", ["a", "b"], ["c"]),
        helper.make_node("Where", ["c", "zero", "x"], ["y"]),
    ]
    assert kinds(rng, nodes) == ["float32"]


@pytest.mark.parametrize("outputs", [("y", "n"), ("y", "m")])
def test_a_condition_that_others_want_stays(outputs: tuple[str, ...], rng: np.random.Generator) -> None:
    nodes = [helper.make_node("Softmax", ["x"], ["p"]), *GUARD, helper.make_node("Neg", ["g"], ["y"])]
    nodes += [helper.make_node("Not", ["n"], ["m"])] if "m" in outputs else []
    assert "bool" in kinds(rng, nodes, outputs)
