"""Matrix products with quantised weights: the weights stay codes of their bit width, with ONNX's meaning."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from stored_weights import KINDS, stored

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute, run_graph
from rammer.passes.compute.rfactor import rfactor
from rammer.passes.graph.weight_only_quant import pack_codes
from rammer.passes.pass_pipeline import Pipeline, default_passes

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
        assert len(computes.computes) == 1  # decoded weights are not written
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


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_product_with_codes_is_a_contraction_whatever_device(kind: str, seed: int) -> None:
    random = Random(f"{seed} {kind}")
    model, numbers, _ = stored(random, kind)
    (product,) = lower(Pipeline(default_passes())(bind(read_model(model), {}))).computes
    assert product.kind == "contraction"
    again = Compute.parse(str(product))
    assert again.decoded == product.decoded is not None
    assert product.decoded is not None and product.decoded.bits <= 8 and product.decoded.block <= numbers.shape[0]
    (deep,) = [c for c in rfactor(product, "k", 2) if len(c.loads) > 1]
    assert deep.decoded is None and deep.kind != "contraction"  # another form, which is not taken for a contraction


def test_weights_of_float16_products_stay_codes(seed: int) -> None:
    """Check that the sum is computed in float32 and rounded once."""
    rng = np.random.default_rng(seed)
    codes, scale = rng.integers(0, 16, (96, 64)), rng.uniform(0.01, 0.1, (96, 2)).astype(np.float16)
    x, weights = rng.standard_normal((3, 64)).astype(np.float16), (codes - 8.0) * np.repeat(scale, 32, 1)
    nodes = [helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=64, N=96, bits=4, block_size=32)]
    kinds = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT16, [3, d]) for n, d in (("x", 64), ("y", 96))}
    given = {"w": pack_codes(codes.astype(np.uint8), 4).reshape(96, 2, 16), "s": scale}
    weighty = [numpy_helper.from_array(v, n) for n, v in given.items()]
    graph = helper.make_graph(nodes, "half", [kinds["x"]], [kinds["y"]], weighty)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    made = Pipeline(default_passes())(bind(read_model(model), {}))
    assert [n.op for n in made.nodes] == ["StoredMatMul"]
    have = run_graph(lower(made), {"x": x}, precise=False)["y"]
    want = (x.astype(np.float64) @ weights.T).astype(np.float16)
    assert have.dtype == np.float16
    np.testing.assert_allclose(have.astype(np.float64), want, rtol=2e-3, atol=2e-3)


def test_sums_of_products_that_are_made_first_are_those_made_point_by_point(seed: int) -> None:
    """Check both modes: the evaluator multiplies by the decoded weights; when watched, it evaluates every point."""
    for number in range(4):
        model, _, _ = stored(Random(f"{seed} made {number}"), "int4")
        computes = lower(Pipeline(default_passes())(bind(read_model(model), {})))
        x = np.random.default_rng(seed).standard_normal(computes.types["x"].shape).astype(np.float32)
        tensors = {**computes.constants, "x": x}
        (product,) = computes.computes
        for precise in (True, False):
            points = evaluate_compute(product, tensors, precise, watch=lambda *step: step[-1])
            np.testing.assert_allclose(
                evaluate_compute(product, tensors, precise), points, rtol=1e-4, atol=1e-4 * np.abs(points).max()
            )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_blocks_stay_codes_of_their_bits(bits: int, seed: int) -> None:
    """Check this at any size: large constants are not folded, so a body has only types that its opset supports."""
    rng = np.random.default_rng(seed)
    given = {"w": rng.integers(0, 256, (64, 4, 16 * bits // 8)).astype(np.uint8), "s": rng.random((64, 4)).astype(np.float32)}
    given |= {"z": rng.integers(0, 256, (64, 4 * bits // 8)).astype(np.uint8)}
    sizes = {"K": 64, "N": 64, "bits": bits, "block_size": 16}
    node = helper.make_node("MatMulNBits", ["x", *given], ["y"], domain="com.microsoft", **sizes)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3, 64]) for n in "xy"]
    graph = helper.make_graph([node], "few", ends[:1], ends[1:], [numpy_helper.from_array(v, n) for n, v in given.items()])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = Pipeline(default_passes())(bind(read_model(helper.make_model(graph, opset_imports=imports, ir_version=10)), {}))
    assert [(n.op, n.attributes["bits"]) for n in made.nodes] == [("StoredMatMul", bits)]
    assert sum(a.nbytes for a in made.constants.values() if a.ndim == 2 and a.shape[1] > 4) == 64 * 64 * bits // 8
