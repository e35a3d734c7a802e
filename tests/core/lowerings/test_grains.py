"""Scales and zero points of integer products in valid and invalid shapes: ONNX Runtime's numbers, or bad input."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.errors import BadInput, RammerError

SHAPES = (None, (), (1,), (2,), (3,), (4,), (5,), (3, 1), (1, 5), (2, 2), (0,))
#: Operator -> shapes and types of its operands; "?" marks a scale or a zero point that is tested in every shape.
OPERATORS: dict[str, tuple[tuple[Any, str], ...]] = {
    "MatMulInteger": (((3, 4), "u1"), ((4, 5), "u1"), ("?", "u1"), ("?", "u1")),
    "ConvInteger": (((1, 2, 5, 5), "u1"), ((3, 2, 3, 3), "u1"), ("?", "u1"), ("?", "u1")),
    "QLinearMatMul": (((3, 4), "u1"), *(("?", t) for t in ("f4", "u1")), ((4, 5), "u1"), *(("?", t) for t in ("f4", "u1") * 2)),
    "QLinearConv": (
        *(((1, 2, 5, 5), "u1"), ("?", "f4"), ("?", "u1"), ((3, 2, 3, 3), "u1")),
        *(("?", t) for t in ("f4", "u1") * 2),
        ((3,), "i4"),
    ),
}
SAMPLE = 40


def built(op: str, shapes: list[Any], known: set[int], rng: np.random.Generator) -> tuple[onnx.ModelProto, dict[str, Any]]:
    ports, constants, names, feeds = [], [], [], {}
    for i, (shape, (_, kind)) in enumerate(zip(shapes, OPERATORS[op], strict=True)):
        names.append("" if shape is None else f"i{i}")
        if shape is None:
            continue
        value = np.asarray(rng.uniform(0.1, 1, shape) if kind == "f4" else rng.integers(0, 100, shape)).astype(kind)
        if i in known:
            constants.append(numpy_helper.from_array(value, names[-1]))
        else:
            ports.append(helper.make_tensor_value_info(names[-1], helper.np_dtype_to_tensor_dtype(value.dtype), shape))
            feeds[names[-1]] = value
    while not names[-1]:
        names.pop()
    kind = TensorProto.INT32 if op.endswith("Integer") else TensorProto.UINT8
    outputs = [helper.make_tensor_value_info("y", kind, None)]
    graph = helper.make_graph([helper.make_node(op, names, ["y"])], op, ports, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), feeds


def refused(proto: onnx.ModelProto, feeds: dict[str, Any]) -> Any:
    """Return ONNX Runtime's result; None if it refuses the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)[0]
    except Exception:
        return None


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", OPERATORS)
def test_all_shapes(op: str, rng: np.random.Generator) -> None:
    tried = [i for i, (shape, _) in enumerate(OPERATORS[op]) if shape == "?"]
    optional = (None, *SHAPES[1:]) if op.endswith("Integer") else SHAPES[1:]
    taken = 0
    for number in range(SAMPLE):
        shapes: list[Any] = [() if shape == "?" else shape for shape, _ in OPERATORS[op]]
        for place in rng.choice(tried, 2 if number else 0, replace=False):  # the first case has shapes valid for both
            shapes[place] = optional[rng.integers(len(optional))]
        known = {i for i in range(len(shapes)) if rng.random() < 0.5}
        proto, feeds = built(op, shapes, known, rng)
        want = refused(proto, feeds)
        try:
            have = rammer.compile(proto, "toy").run(feeds)["y"]
        except RammerError:
            assert want is None, (shapes, known)
            continue
        taken += want is not None
        if want is not None:
            assert np.abs(have.astype(int) - want.astype(int)).max(initial=0) <= (not op.endswith("Integer")), (shapes, known)
    assert taken


@pytest.mark.parametrize(("op", "place"), [*product(("MatMulInteger", "ConvInteger"), (2, 3))])
def test_a_zero_point_of_wrong_length_is_bad_input(op: str, place: int, rng: np.random.Generator) -> None:
    shapes: list[Any] = [() if shape == "?" else shape for shape, _ in OPERATORS[op]]
    shapes[place] = (2,)
    for known in ({place}, {place - 2, place}, set()):
        proto, feeds = built(op, shapes, known, rng)
        with pytest.raises(BadInput, match=f"input {place} of {op}"):
            rammer.compile(proto, "toy").run(feeds)
