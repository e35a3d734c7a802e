"""Quantised groups, dynamic quantisation and stored weights on devices: codes are right, and nothing runs on the host."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from quantised_groups import MAKERS, Group
from stored_weights import KINDS, stored

import rammer
from rammer.compiled.segments import ProgramSegment
from rammer_testing.peer_process import PeerSession

#: Groups of each kind in a run.
COUNT = 2


def run(model: ModelProto, feeds: dict[str, np.ndarray[Any, Any]], device: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the results of a model that is one program."""
    exe = rammer.compile(model, device=device)
    try:
        segments = exe.compile_only({n: a.shape for n, a in feeds.items()}).segments
        assert [type(s) for s in segments] == [ProgramSegment]
        return exe.run(feeds)
    finally:
        exe.close()


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_groups(kind: str, device: str, seed: int) -> None:
    for number in range(COUNT):
        group = MAKERS[kind](Group(Random(f"{seed} {number}")))
        problem = group.problem(run(group.model(), group.inputs, device))
        assert not problem, f"{kind} {seed} {number}: {problem}"


def dynamic(signed: bool) -> ModelProto:
    """Return a dense layer and a convolution as dynamic quantisation writes them."""
    rng = np.random.default_rng(8)
    dense, filters = (rng.integers(-127, 128, s).astype(np.int8) for s in ((6, 9), (4, 6, 3, 3)))
    moved = [np.zeros((), np.int8)] * 2
    if not signed:
        dense, filters, moved = (
            dense.view(np.uint8) ^ 0x80,
            filters.view(np.uint8) ^ 0x80,
            [np.array(n, np.uint8) for n in (121, 130)],
        )
    constants = {"w": filters, "wz": moved[0], "ws": np.float32(0.01), "d": dense, "dz": moved[1], "ds": np.float32(0.02)}
    constants |= {"b": rng.normal(size=9).astype(np.float32), "order": np.array([0, 2, 3, 1])}
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
        helper.make_node("ConvInteger", ["xq", "w", "xz", "wz"], ["c"], pads=[1, 0, 1, 2]),
        helper.make_node("Cast", ["c"], ["cf"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["xs", "ws"], ["cs"]),
        helper.make_node("Mul", ["cf", "cs"], ["y"]),
        helper.make_node("Relu", ["y"], ["r"]),
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("DynamicQuantizeLinear", ["t"], ["tq", "ts", "tz"]),
        helper.make_node("MatMulInteger", ["tq", "d", "tz", "dz"], ["m"]),
        helper.make_node("Cast", ["m"], ["mf"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["ts", "ds"], ["ms"]),
        helper.make_node("Mul", ["mf", "ms"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "dynamic",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 6, 5, 7])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("r", "z")],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("signed", [False, True])
def test_dynamic_quantisation(signed: bool, device: str, rng: np.random.Generator) -> None:
    model, feeds = dynamic(signed), {"x": rng.normal(1, 2, (2, 6, 5, 7)).astype(np.float32)}
    want = PeerSession(model).run(None, feeds)
    have = run(model, feeds, device)
    for name, value in zip("rz", want, strict=True):
        np.testing.assert_allclose(have[name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max())


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_stored_weights(device: str, seed: int) -> None:
    model, numbers, _ = stored(Random(seed), sorted(KINDS)[seed % len(KINDS)])
    x = np.random.default_rng(seed).standard_normal((3, numbers.shape[0])).astype(np.float32)
    have = run(model, {"x": x}, device)["y"]
    atol = 1e-5 * np.abs(x).sum(1).max() * np.abs(numbers).max()
    np.testing.assert_allclose(have, x.astype(np.float64) @ numbers, rtol=0, atol=atol, err_msg=str(seed))
