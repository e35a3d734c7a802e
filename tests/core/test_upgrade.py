"""Old opsets: operators that changed their form or meaning keep their values, and failed upgrades are noted."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, version_converter
from onnx_models import bound, message, model, tensor

import rammer
from rammer.frontend.bind.binder import bind
from rammer.frontend.read import opset_upgrade
from rammer.frontend.read.reader import TARGET_OPSET, read_model
from rammer_testing import models as zoo
from rammer_testing.graph_reference import evaluate_graph
from rammer_testing.nonempty import some
from rammer_testing.operators import DESCRIBED, drawn


def test_upgrade_keeps_the_meaning(rng: np.random.Generator) -> None:
    """Check Softmax of opset 11 on the flattened tail, and Squeeze with its axes as an attribute."""
    nodes = [helper.make_node("Softmax", ["x"], ["s"], axis=1), helper.make_node("Unsqueeze", ["s"], ["y"], axes=[0])]
    proto = model(nodes, [tensor("x", [2, 3, 4])], ["y"], opset=11)
    x = rng.standard_normal((2, 3, 4)).astype(np.float32)
    result = evaluate_graph(bound(proto), {"x": x})["y"]
    wide = np.exp(x.astype(np.float64)).reshape(2, 12)
    np.testing.assert_allclose(result, (wide / wide.sum(1, keepdims=True)).reshape(1, 2, 3, 4), rtol=1e-5)


SCALES = {"s": np.array([1, 1, 1.5, 2.5], np.float32)}


@pytest.mark.parametrize("version", [3, 8], ids=["constants-had-to-be-inputs", "they-need-not"])
@pytest.mark.parametrize(
    "op, inputs, constants, opset, attributes",
    [
        ("Resize", ["x", "s"], SCALES, 10, {"mode": "linear"}),
        ("Resize", ["x", "s"], SCALES, 10, {"mode": "nearest"}),
        ("Resize", ["x", "s"], {"s": np.array([1, 1, 0.5, 0.7], np.float32)}, 10, {"mode": "nearest"}),
        ("Upsample", ["x", "s"], SCALES, 9, {"mode": "linear"}),
        ("Upsample", ["x"], {}, 7, {"mode": "linear", "scales": [1.0, 1.0, 2.0, 2.0]}),
        ("Hardmax", ["x"], {}, 7, {}),
        ("Hardmax", ["x"], {}, 12, {"axis": 2}),
        ("LogSoftmax", ["x"], {}, 12, {}),
        ("GroupNormalization", ["x", "s", "b"], {"s": (2,), "b": (2,)}, 18, {"num_groups": 2}),
        (
            "RoiAlign",
            ["x", "r", "i"],
            {"r": np.array([[0, 0, 3, 3]], np.float32), "i": np.array([0])},
            10,
            {"output_height": 2, "output_width": 2},
        ),
        ("Slice", ["x"], {}, 9, {"starts": [1, -2], "ends": [3, 99], "axes": [2, 3]}),
        ("ReduceLogSumExp", ["x"], {}, 11, {"axes": [1, 2], "keepdims": 0}),
        ("BatchNormalization", ["x", *"sbmv"], dict.fromkeys("sbmv", (4,)), 7, {}),
    ],
)
def test_upgrade_agrees_with_onnx_runtime(
    op: str,
    inputs: list[str],
    constants: dict[str, Any],
    opset: int,
    attributes: dict[str, Any],
    version: int,
    rng: np.random.Generator,
) -> None:
    """Check operators that changed their form or meaning up to opset 21. Constants with only a shape are positive."""
    drawn = {n: rng.uniform(0.1, 2, c).astype(np.float32) if isinstance(c, tuple) else c for n, c in constants.items()}
    x = rng.standard_normal((1, 4, 4, 4)).astype(np.float32)
    proto = model([helper.make_node(op, inputs, ["y"], name="n", **attributes)], [tensor("x", [1, 4, 4, 4])], ["y"], opset, drawn)
    proto.ir_version = version
    loaded = read_model(proto)
    assert loaded.opset == TARGET_OPSET
    proto.ir_version = 8
    have = evaluate_graph(bind(loaded, {}), {"x": x})["y"]
    np.testing.assert_allclose(have, zoo.forward(proto, {"x": x})["y"], rtol=1e-4, atol=1e-5)


def test_resize_10_that_shrinks_and_enlarges() -> None:
    node = helper.make_node("Resize", ["x", "s"], ["y"], name="r")
    proto = model([node], [tensor("x", [1, 1, 4, 4])], ["y"], 10, {"s": np.array([1, 1, 2, 0.5], np.float32)})
    assert message(proto) == (
        "Resize of opset 10 to the nearest pixel needs constant scales, all at least 1 or all at most 1\n"
        "  at: node r (Resize)\n  hint: export the model with opset 11 or newer"
    )


def test_upgrade_that_fails_is_noted() -> None:
    """Check statistics per element (spatial=0), which do not exist after opset 8: the model stays unchanged."""
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], spatial=0)
    constants = {name: np.ones((2, 4), np.float32) for name in "sbmv"}
    loaded = read_model(model([node], [tensor("x", [1, 2, 4])], ["y"], opset=7, constants=constants))
    assert loaded.opset == 7
    assert loaded.notes == ("opset 7 could not be upgraded to 21, only to 7: Attribute spatial must have value 1",)


def test_operator_without_shape_inference() -> None:
    training = "ai.onnx.preview.training"
    total = helper.make_node("ReduceSum", ["x"], ["s"])
    node = helper.make_node("Gradient", ["x"], ["y"], name="n", domain=training, xs=["x"], y="s")
    proto = model([total, node], [tensor("x", [3, 4])], ["y"], imports=[helper.make_opsetid(training, 1)])
    assert message(proto) == (
        "ONNX cannot infer the shape of 'y', the result of Gradient\n  at: node n (Gradient)\n"
        "  hint: export the model without Gradient"
    )


@pytest.mark.slow
def test_what_has_not_changed_is_as_the_converter_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the converter runs only if an operator of the model has changed."""
    older = [m for op in sorted(DESCRIBED)[::3] if (m := drawn(op, 0, 1).model()).opset_import[0].version < TARGET_OPSET]
    calls = list[int]()
    real = version_converter.convert_version
    monkeypatch.setattr(version_converter, "convert_version", lambda m, o: [calls.append(o), real(m, o)][1])
    at_once = [read_model(m) for m in older]
    asked = len(calls)
    monkeypatch.setattr(opset_upgrade, "_means_the_same", lambda *_: False)
    for proto, quick in some(zip(older, at_once, strict=True)):
        slow = read_model(proto)
        assert (quick.opset, quick.notes) == (slow.opset, slow.notes)
        assert quick.proto.SerializeToString(deterministic=True) == slow.proto.SerializeToString(deterministic=True)
    assert 10 < asked < (len(calls) - asked) - 10


def _ran(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    executable = rammer.compile(model, "toy")
    try:
        (y,) = executable.run(feeds).values()
        return np.asarray(y)
    finally:
        executable.close()


def test_a_slope_of_opset_6_belongs_to_channels(rng: np.random.Generator) -> None:
    for shape in some([(2, 3), (2, 3, 4), (1, 3, 2, 5)]):
        x, slope = rng.standard_normal(shape).astype(np.float32), rng.uniform(0.1, 2, 3).astype(np.float32)
        node, port = helper.make_node("PRelu", ["x", "s"], ["y"]), helper.make_tensor_value_info
        known = [onnx.numpy_helper.from_array(slope, "s")]
        graph = helper.make_graph([node], "g", [port("x", 1, shape)], [port("y", 1, shape)], known)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 6)], ir_version=4)
        wanted = np.where(x < 0, x * slope.reshape(1, 3, *[1] * (len(shape) - 2)), x)
        np.testing.assert_allclose(_ran(model, {"x": x}), wanted, rtol=1e-6)


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("constant", ["", "s", "x", "sx"])
def test_a_scan_of_opset_8_over_constants(constant: str, version: int, rng: np.random.Generator) -> None:
    """Check that its batch axis is handled, and that only the upgraded form is computed."""
    values = {"s": rng.standard_normal((2, 3)).astype(np.float32), "x": rng.standard_normal((2, 4, 3)).astype(np.float32)}
    port = helper.make_tensor_value_info
    nodes = [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Identity", ["c"], ["d"])]
    body = helper.make_graph(nodes, "body", [port(n, 1, (3,)) for n in "ab"], [port(n, 1, (3,)) for n in "cd"])
    scan = helper.make_node("Scan", ["", "s", "x"], ["end", "y"], body=body, num_scan_inputs=1)
    graph = helper.make_graph(
        [scan],
        "g",
        [port(n, 1, v.shape) for n, v in values.items() if n not in constant],
        [port("y", 1, (2, 4, 3))],
        [onnx.numpy_helper.from_array(values[n], n) for n in constant],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=version)
    wanted = values["s"][:, None] + np.cumsum(values["x"], axis=1)
    feeds = {n: v for n, v in values.items() if n not in constant}
    np.testing.assert_allclose(_ran(proto, feeds), wanted, rtol=1e-4, atol=1e-5)


def test_scales_of_an_upsample_may_come_with_the_run(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 2, 3, 2)).astype(np.float32)
    node, port = helper.make_node("Upsample", ["x", "s"], ["y"]), helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [port("x", 1, x.shape), port("s", 1, [4])], [port("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4)
    for by in some([(1, 1, 2, 3), (1, 1, 1.5, 1)]):
        scales = np.array(by, np.float32)
        rows, columns = (np.floor(np.arange(int(n * s)) / s).astype(int) for n, s in zip(x.shape[2:], by[2:], strict=True))
        np.testing.assert_array_equal(_ran(model, {"x": x, "s": scales}), x[:, :, rows][:, :, :, columns])
