"""Folding of affine maps into weights: legal cases, illegal cases, and unchanged values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from pass_graphs import NORM, agree, graph_of, norm, normal, ops

from rammer.passes.graph.fold_affine import FoldAffine
from rammer.passes.pass_pipeline import Pipeline, default_passes


@pytest.mark.parametrize(
    "op, weight, channels, attributes",
    [
        ("Conv", (6, 4, 3, 3), 6, {"pads": [1, 1, 1, 1]}),
        ("Conv", (6, 2, 3, 3), 6, {"group": 2}),
        ("ConvTranspose", (4, 6, 2, 2), 6, {"strides": [2, 2]}),
        ("ConvTranspose", (4, 3, 2, 2), 6, {"group": 2}),
        ("Gemm", (4, 6), 6, {}),
        ("Gemm", (6, 4), 6, {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_batch_norm_folds_into(
    op: str, weight: tuple[int, ...], channels: int, attributes: dict[str, Any], biased: bool, rng: np.random.Generator
) -> None:
    constants = norm(rng, channels) | {"w": normal(rng, *weight)} | ({"c": normal(rng, channels)} if biased else {})
    nodes = [
        helper.make_node(op, ["x", "w", *(["c"] if biased else [])], ["t"], **attributes),
        helper.make_node("BatchNormalization", ["t", *NORM], ["y"], epsilon=1e-3),
    ]
    before = graph_of(nodes, (2, 4) if op == "Gemm" else (2, 4, 5, 5), constants)
    after = FoldAffine()(before)
    assert ops(after) == [op] and len(after.constants) == 2
    agree(rng, before, after)


@pytest.mark.parametrize("op, swapped", [(op, side) for op in ("Add", "Sub", "Mul") for side in (0, 1)] + [("Div", 0)])
@pytest.mark.parametrize("shape", [(), (6, 1, 1), (1, 6, 1, 1), (1,)])
def test_constants_per_channel_fold_into_conv(op: str, swapped: int, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    operands = ["k", "t"] if swapped else ["t", "k"]
    nodes = [helper.make_node("Conv", ["x", "w"], ["t"]), helper.make_node(op, operands, ["y"])]
    before = graph_of(nodes, (1, 4, 4, 4), {"w": normal(rng, 6, 4, 3, 3), "k": np.abs(normal(rng, *shape)) + np.float32(0.5)})
    after = FoldAffine()(before)
    assert ops(after) == ["Conv"]
    agree(rng, before, after)


def test_a_chain_folds_at_once(rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["t"]),
        helper.make_node("BatchNormalization", ["t", *NORM], ["u"]),
        helper.make_node("Mul", ["u", "k"], ["p"]),
        helper.make_node("Add", ["p", "c"], ["y"]),
    ]
    constants = norm(rng, 6) | {"w": normal(rng, 6, 4, 1, 1), "k": normal(rng, 6, 1, 1), "c": normal(rng, 6, 1, 1)}
    before = graph_of(nodes, (1, 4, 3, 3), constants)
    after, reports = Pipeline(default_passes()).run(before)
    assert ops(after) == ["Conv"]
    assert [str(r) for r in reports] == ["fold_affine            nodes 4 -> 1         constants 7 -> 2"]
    agree(rng, before, after)


@pytest.mark.parametrize(
    "nodes, factor",
    [
        ([("Conv", ["x", "w"], "t"), ("Mul", ["t", "k"], "y")], (1, 1, 1, 4)),  # per column
        ([("Conv", ["x", "w"], "t"), ("Mul", ["t", "k"], "y")], (2, 6, 1, 1)),  # broadcasts the batch
        ([("Conv", ["x", "w"], "t"), ("Div", ["k", "t"], "y")], (6, 1, 1)),  # a reciprocal
        ([("Conv", ["x", "w"], "t"), ("Div", ["t", "k"], "y")], np.zeros((6, 1, 1), np.float32)),
        ([("Conv", ["x", "w"], "t"), ("Mul", ["t", "k"], "u"), ("Add", ["u", "t"], "y")], (6, 1, 1)),
        ([("Conv", ["x", "w"], "t"), ("Mul", ["t", "t"], "y")], None),
    ],
)
def test_what_must_not_fold(nodes: list[Any], factor: tuple[int, ...] | np.ndarray | None, rng: np.random.Generator) -> None:
    """Check cases that must not fold; ``factor`` is the constant k or its shape."""
    protos = [helper.make_node(op, inputs, [output]) for op, inputs, output in nodes]
    constants = {} if factor is None else {"k": normal(rng, *factor) if isinstance(factor, tuple) else factor}
    graph = graph_of(protos, (1, 4, 4, 4), {"w": normal(rng, 6, 4, 1, 1), **constants})
    assert FoldAffine()(graph) is graph


def test_an_output_in_between_stays(rng: np.random.Generator) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["t"]), helper.make_node("BatchNormalization", ["t", *NORM], ["y"])]
    graph = graph_of(nodes, (1, 4, 4, 4), {"w": normal(rng, 6, 4, 1, 1), **norm(rng, 6)}, outputs=("t", "y"))
    assert FoldAffine()(graph) is graph


@pytest.mark.parametrize("pads, folds", [([0, 0, 0, 0], True), ([1, 1, 1, 1], False)])
def test_a_shift_before_a_conv_needs_no_padding(pads: list[int], folds: bool, rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("BatchNormalization", ["x", *NORM], ["t"]),
        helper.make_node("Conv", ["t", "w", "c"], ["y"], pads=pads, group=2),
    ]
    before = graph_of(nodes, (1, 4, 5, 5), norm(rng, 4) | {"w": normal(rng, 6, 2, 3, 3), "c": normal(rng, 6)})
    after = FoldAffine()(before)
    assert ops(after) == (["Conv"] if folds else ["BatchNormalization", "Conv"])
    agree(rng, before, after)


def test_a_scale_before_a_padded_conv_folds(rng: np.random.Generator) -> None:
    nodes = [helper.make_node("Mul", ["x", "k"], ["t"]), helper.make_node("Conv", ["t", "w"], ["y"], pads=[1, 1, 1, 1])]
    before = graph_of(nodes, (1, 4, 5, 5), {"k": normal(rng, 4, 1, 1), "w": normal(rng, 6, 4, 3, 3)})
    after = FoldAffine()(before)
    assert ops(after) == ["Conv"]
    agree(rng, before, after)


def test_shared_weights_stay_for_the_other_reader(rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["t"]),
        helper.make_node("Mul", ["t", "k"], ["y"]),
        helper.make_node("Conv", ["x", "w"], ["z"], strides=[2, 2]),
    ]
    before = graph_of(nodes, (1, 4, 4, 4), {"k": normal(rng, 6, 1, 1), "w": normal(rng, 6, 4, 1, 1)}, outputs=("y", "z"))
    after = FoldAffine()(before)
    assert ops(after) == ["Conv", "Conv"]
    agree(rng, before, after)


def test_weights_are_rounded_once(rng: np.random.Generator) -> None:
    """Check in float64 that the folded weight is the exact product, rounded once to float32."""
    w, k = normal(rng, 6, 4, 1, 1), normal(rng, 6, 1, 1)
    nodes = [helper.make_node("Conv", ["x", "w"], ["t"]), helper.make_node("Mul", ["t", "k"], ["y"])]
    after = FoldAffine()(graph_of(nodes, (1, 4, 2, 2), {"w": w, "k": k}))
    want = (w.astype(np.float64) * k.astype(np.float64)[..., None]).astype(np.float32)
    np.testing.assert_array_equal(after.constants[after.nodes[0].inputs[1]], want)
