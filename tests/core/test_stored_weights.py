"""Weights of matrix products that are stored as codes stay codes, in as few bits as they have, and mean what ONNX says."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from stored_weights import KINDS, stored

from rammer.frontend.bind import bind
from rammer.frontend.lower import lower
from rammer.frontend.reader import read_model
from rammer.ir.evaluate import run_graph
from rammer.passes.pipeline import Pipeline, default_passes

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_weights_stay_codes(kind: str, seed: int) -> None:
    for number in range(6):
        model, numbers, size = stored(Random(f"{seed} {number}"), kind)
        graph = Pipeline(default_passes())(bind(read_model(model), {}))
        x = np.random.default_rng(seed).standard_normal((3, numbers.shape[0])).astype(np.float32)
        assert [n.op for n in graph.nodes] == ["StoredMatMul"], f"{seed} {number}: {graph}"
        codes = [a for a in graph.constants.values() if a.dtype != np.float32 and a.size * 8 > numbers.size]
        assert [a.nbytes for a in codes] == [size], f"{seed} {number}: {graph}"
        computes = lower(graph)
        assert len(computes.computes) == 1  # nothing writes numbers of weights
        have = run_graph(computes, {"x": x}, precise=False)["y"]
        want = x.astype(np.float64) @ numbers
        atol = 1e-5 * np.abs(x).sum(1).max() * np.abs(numbers).max()
        np.testing.assert_allclose(have, want, rtol=0, atol=atol, err_msg=f"{seed} {number}")


def test_what_cannot_stay_codes_is_folded() -> None:
    rng = np.random.default_rng(4)
    codes, scale = rng.integers(-8, 8, (128, 64)).astype(np.int8), rng.uniform(0.1, 1, (128,)).astype(np.float32)
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0), helper.make_node("MatMul", ["x", "d"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "folded",  # a scale for each row of the sum
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 64])],
        [numpy_helper.from_array(codes, "w"), numpy_helper.from_array(scale, "s")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)
    made = Pipeline(default_passes())(bind(read_model(model), {}))
    assert [n.op for n in made.nodes] == ["MatMul"]
    (weights,) = made.constants.values()
    np.testing.assert_array_equal(weights, codes * scale[:, None])
