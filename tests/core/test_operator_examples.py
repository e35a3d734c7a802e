"""Regression examples of operators that were once lowered wrongly, with results by ONNX's specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from rammer.codegen.context import FunctionContext
from rammer.codegen.dialects import C99
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.evaluate import run_graph
from rammer_testing.nonempty import some
from rammer_testing.operators.case import OperatorCase
from rammer_testing.operators.oracles import ours

F32 = np.float32


def row(*values: float, dtype: Any = F32) -> np.ndarray:
    """Make an image of one row: [1, 1, n]."""
    return np.array(values, dtype)[None, None]


def check(case: OperatorCase, *expected: Any, rtol: float = 1e-6) -> None:
    """Check in the tensor's types and, where it matters, in float64."""
    for precise in (False, True):
        said = ours(case, precise)
        assert said.values is not None, said.why
        for have, want in zip(said.values, expected, strict=True):
            assert have.shape == np.shape(want)
            np.testing.assert_allclose(have, want, rtol=rtol)


def windows(n: int, kernel: int, starts: list[int], dilation: int = 1) -> list[list[int]]:
    """Return the elements under a window at each start."""
    return [[p for p in range(s, s + kernel * dilation, dilation) if 0 <= p < n] for s in starts]


#: (extent, kernel, attributes, starts of the windows), by the formulas in the text of MaxPool-22.
POOLS = [
    (6, 1, {"strides": [2], "ceil_mode": 1}, [0, 2, 4]),
    (5, 2, {"strides": [3], "pads": [1, 1], "ceil_mode": 1}, [-1, 2]),
    (4, 2, {"strides": [3], "ceil_mode": 1}, [0, 3]),
    (3, 2, {"strides": [2], "auto_pad": "VALID", "ceil_mode": 1}, [0]),
    (3, 2, {"dilations": [2], "auto_pad": "SAME_UPPER"}, [-1, 0, 1]),
    (5, 4, {"dilations": [2], "strides": [2], "auto_pad": "SAME_LOWER"}, [-3, -1, 1]),
    (3, 1, {"strides": [3], "auto_pad": "SAME_UPPER"}, [1]),
    (2, 1, {"strides": [2], "auto_pad": "SAME_UPPER"}, [0]),
    (2, 1, {"strides": [2], "auto_pad": "SAME_LOWER"}, [1]),
    (2, 3, {"strides": [2]}, []),
]


@pytest.mark.parametrize(("n", "kernel", "attributes", "starts"), POOLS, ids=str)
def test_pools(n: int, kernel: int, attributes: dict[str, Any], starts: list[int], rng: np.random.Generator) -> None:
    x = rng.uniform(-3, 3, n).astype(F32)
    seen = windows(n, kernel, starts, attributes.get("dilations", [1])[0])
    given = {"kernel_shape": [kernel], **attributes}
    largest = [max(w, key=lambda p: x[p]) for w in seen]
    indices = np.array(largest, np.int64)[None, None]
    check(OperatorCase("MaxPool", 22, (row(*x),), given, 2), row(*(x[i] for i in largest)), indices)
    check(OperatorCase("AveragePool", 22, (row(*x),), given), row(*(x[w].mean() for w in seen)), rtol=1e-5)
    check(OperatorCase("LpPool", 22, (row(*x),), {**given, "p": 1}), row(*(np.abs(x[w]).sum() for w in seen)), rtol=1e-5)


def test_columns_first_and_a_window_on_nothing_but_nan() -> None:
    x = np.array([[1, 5, 2], [4, 3, np.nan]], F32)[None, None]
    case = OperatorCase("MaxPool", 22, (x,), {"kernel_shape": [2, 2], "storage_order": 1}, 2)
    check(case, np.array([[[[5, np.nan]]]]), np.array([[[[2, 5]]]]))
    # The storage order numbers elements without selecting them: of equal elements the first row's counts.
    x = np.array([[3, 1, 7], [7, 0, 7]], F32)[None, None].repeat(2, 1)
    case = OperatorCase("MaxPool", 22, (x,), {"kernel_shape": [2, 3], "storage_order": 1}, 2)
    check(case, np.full((1, 2, 1, 1), 7, F32), np.array([[[[4]], [[10]]]]))


@pytest.mark.parametrize(
    ("n", "kernel", "attributes", "starts"),
    [
        (3, 1, {"strides": [3], "auto_pad": "SAME_UPPER"}, [0]),  # a convolution pads and never crops
        (5, 2, {"strides": [2], "auto_pad": "SAME_LOWER"}, [-1, 1, 3]),
        (3, 2, {"dilations": [2], "auto_pad": "SAME_UPPER"}, [-1, 0, 1]),
        (2, 3, {"strides": [3]}, []),
    ],
    ids=str,
)
def test_conv(n: int, kernel: int, attributes: dict[str, Any], starts: list[int]) -> None:
    x, w = np.arange(1, n + 1, dtype=F32), np.array([1, 10, 100, 1000][:kernel], F32)
    step = attributes.get("dilations", [1])[0]
    want = [sum(x[s + k * step] * w[k] for k in range(kernel) if 0 <= s + k * step < n) for s in starts]
    check(OperatorCase("Conv", 11, (row(*x), row(*w)), attributes), row(*want))


@pytest.mark.parametrize(("n", "want"), [(2, 0), (1, 0), (0, None)])
def test_where_no_window_fits_every_convolution_has_no_elements(n: int, want: int | None) -> None:
    """Check floor((n - 3) / 2) + 1, where ONNX's inference may give 1 by rounding up; a negative extent is an error."""
    x, w, one, zero = row(*range(n), dtype=np.uint8), row(1, 2, 3, dtype=np.uint8), F32(1), np.uint8(0)
    cases = [
        OperatorCase("Conv", 11, (x.astype(F32), w.astype(F32)), {"strides": [2]}),
        OperatorCase("ConvInteger", 10, (x, w), {"strides": [2]}),
        OperatorCase("QLinearConv", 10, tuple(map(np.asarray, (x, one, zero, w, one, zero, one, zero))), {"strides": [2]}),
        OperatorCase("MaxPool", 12, (x,), {"kernel_shape": [3], "strides": [2]}),
    ]
    for case in cases:
        said = ours(case)
        if want is None:
            assert said.values is None and not said.broken and "does not fit" in said.why
        else:
            assert said.values is not None and said.values[0].shape == (1, 1, want), (case.op, said.why)


def test_conv_transpose_pads_behind() -> None:
    """Check a stride larger than the kernel: "output_shape[i] = input_shape[i] * strides[i]"."""
    x, w = row(1, 2), row(1)
    for mode in ("SAME_UPPER", "SAME_LOWER"):
        check(OperatorCase("ConvTranspose", 11, (x, w), {"strides": [3], "auto_pad": mode}), row(1, 0, 0, 2, 0, 0))
    attributes = {"strides": [1], "auto_pad": "SAME_UPPER", "output_padding": [1], "dilations": [2]}
    check(OperatorCase("ConvTranspose", 11, (x, row(1, 10)), attributes), row(2, 10))


@pytest.mark.parametrize(
    ("attributes", "weights"),
    [
        ({"group": 0}, (4, 4, 1)),
        ({"group": -1}, (4, 4, 1)),
        ({"group": 2}, (4, 4, 1)),
        ({"group": 3}, (4, 1, 1)),
        ({"kernel_shape": [2]}, (4, 4, 1)),
        ({"strides": [0]}, (4, 4, 1)),
        ({"strides": [1, 1]}, (4, 4, 1)),
        ({}, (4, 4, 9)),
        ({"auto_pad": "SAME"}, (4, 4, 1)),
    ],
    ids=str,
)
def test_wrong_convolutions_are_refused(attributes: dict[str, Any], weights: tuple[int, ...]) -> None:
    for op in ("Conv", "ConvTranspose"):
        if (op == "ConvTranspose" and weights[2] == 9) or (op, attributes.get("group")) == ("ConvTranspose", 2):
            continue  # a transposed convolution always fits, and its weights have swapped axes
        said = ours(OperatorCase(op, 11, (np.ones((1, 4, 5), F32), np.ones(weights, F32)), attributes))
        assert said.values is None and not said.broken and "node node" in said.why, said


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.float32])
def test_attributes_of_old_opsets_take_the_type_of_the_data(dtype: Any) -> None:
    x = np.array([-3, 0.5, 9], dtype)
    check(OperatorCase("Clip", 10, (x,), {"min": -1.0, "max": 2.0}), np.array([-1, 0.5, 2], dtype))
    check(OperatorCase("Pad", 10, (x,), {"pads": [1, 0], "value": 7.5}), np.array([7.5, -3, 0.5, 9], dtype))
    check(OperatorCase("Pad", 10, (x,), {"pads": [1, 0], "value": 7.5, "mode": "edge"}), np.array([-3, -3, 0.5, 9], dtype))


def test_an_old_clip_makes_infinities_finite() -> None:
    """Check Clip-6: 'max: Maximum value, above which element is replaced by max', 3.4028235e+38 by default."""
    check(OperatorCase("Clip", 10, (np.array([np.inf, -np.inf], F32),)), np.array([3.4028235e38, -3.4028235e38]))


def test_small_results_are_kept() -> None:
    x = np.array([-20, -50, -1e-8, 1e-8, 0, 30], F32)
    wide = x.astype(np.float64)
    softplus = np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide)))
    check(OperatorCase("Softplus", 1 + 6, (x,)), softplus)
    check(OperatorCase("Mish", 18, (x,)), wide * np.tanh(softplus), rtol=1e-5)
    check(OperatorCase("Elu", 7, (x,)), np.where(wide < 0, np.expm1(wide), wide))


def test_integers_to_negative_powers() -> None:
    base = np.array([-2, -1, 0, 1, 2, 7], np.int32)
    check(OperatorCase("Pow", 13, (base, np.array(-1, np.int32))), np.array([0, -1, 0, 1, 0, 0]))
    check(OperatorCase("Pow", 13, (base, np.array(-2, np.int64))), np.array([0, 1, 0, 1, 0, 0]))
    check(OperatorCase("Pow", 13, (base, np.array([3, -3, 2, -1, 3, 0], np.int32))), np.array([-8, -1, 0, 1, 8, 1]))


def test_the_least_integer_divides() -> None:
    least = np.array([-128, -128, -127, 127, -128], np.int8)
    check(OperatorCase("Div", 14, (least, np.array([2, -128, 2, -2, 3], np.int8))), np.array([-64, 1, -63, -63, -42]))


def test_nan_is_an_extreme() -> None:
    x = np.array([[1, np.nan, 9, np.nan], [4, 5, 5, 0]], F32)
    check(OperatorCase("ArgMax", 13, (x,), {"axis": 1, "keepdims": 0}), np.array([1, 1]))
    check(OperatorCase("ArgMax", 13, (x,), {"axis": 1, "keepdims": 0, "select_last_index": 1}), np.array([3, 2]))
    check(OperatorCase("ArgMin", 13, (x,), {"axis": 1, "keepdims": 0}), np.array([1, 3]))
    check(OperatorCase("Hardmax", 13, (x,), {"axis": 1}), np.array([[0, 1, 0, 0], [0, 1, 0, 0]]))


def test_a_negative_number_as_unsigned() -> None:
    x = np.array([-1, -3, 2**63, 7], F32)
    check(OperatorCase("Cast", 13, (x,), {"to": 13}), np.array([2**64 - 1, 2**64 - 3, 2**63, 7], np.uint64))


def test_resize_measures_the_whole_length() -> None:
    """Check 'length_resized as the length of the resized tensor': an integer, even if scale times length is not."""
    scales, roi = np.array([1, 1, 0.8], F32), np.array([0, 0, -0.5, 1, 1, 1.5], F32)
    attributes = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    check(OperatorCase("Resize", 13, (row(3, 5), roi, scales), attributes, static=frozenset((1, 2))), row(4))
    attributes = {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"}
    sizes = np.array([1, 1, 1], np.int64)
    check(OperatorCase("Resize", 13, (row(3, 1, 2), None, None, sizes), attributes, static=frozenset((3,))), row(3))


def test_variances_do_not_cancel(rng: np.random.Generator) -> None:
    """Check values far from zero: E(x^2) - E(x)^2 in float32 would lose the variance."""
    x = (rng.uniform(-1, 1, (2, 4, 3, 5)) + 3000).astype(F32)
    wide, ones = x.astype(np.float64), np.ones(4, F32)
    rows = {"InstanceNormalization": (2, 3), "LayerNormalization": (3,), "MeanVarianceNormalization": (0, 2, 3)}
    for op, axes in rows.items():
        want = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)
        scale = {"InstanceNormalization": (ones, ones * 0), "LayerNormalization": (np.ones(5, F32),)}.get(op, ())
        said = ours(OperatorCase(op, 17, (x, *scale)))
        assert said.values is not None
        # The mean of float32 values near 3000 is off by at most half an ulp per term, 2^-24 of 3000; the centred value is divided
        # by the deviation. Cancelling squares would be off by 3000 times that.
        off = np.prod([x.shape[a] for a in axes]) * 2.0**-24 * 3001 / np.sqrt(wide.var(axes, keepdims=True) + 1e-5)
        assert (np.abs(said.values[0] - want) <= off + 1e-6).all(), op
    said = ours(OperatorCase("GroupNormalization", 21, (x, ones, ones * 0), {"num_groups": 2}))
    grouped = wide.reshape(2, 2, 30)
    deviation = np.sqrt(grouped.var(2, keepdims=True) + 1e-5)
    want = (grouped - grouped.mean(2, keepdims=True)) / deviation
    assert said.values is not None
    assert (np.abs(said.values[0].reshape(2, 2, 30) - want) <= 30 * 2.0**-24 * 3001 / deviation + 1e-6).all()


def test_extremes_of_sums_of_exponentials() -> None:
    x = np.array([[1000, 1000], [-1000, -1000], [-np.inf, -np.inf], [np.inf, 0], [np.nan, 0]], F32)
    half = np.log(2)
    want = np.array([1000 + half, -1000 + half, -np.inf, np.inf, np.nan])
    check(OperatorCase("ReduceLogSumExp", 18, (x, np.array([1])), {"keepdims": 0}, static=frozenset((1,))), want)
    check(OperatorCase("Softmax", 13, (x,)), np.array([[0.5, 0.5], [0.5, 0.5], *[[np.nan] * 2] * 3]))
    check(OperatorCase("LogSoftmax", 13, (np.array([[-np.inf, 0, 0]], F32),)), np.array([[-np.inf, -half, -half]]))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_weights_of_half_precision_are_float32(mode: str) -> None:
    """Check that constants are float32, since C lacks half precision: some compilers refuse it, and integers would be 0."""
    x = np.arange(6, dtype=np.float16).reshape(1, 1, 6)
    case = OperatorCase("Resize", 19, (x, None, np.array([1, 1, 2], F32)), {"mode": mode}, static=frozenset((2,)))
    texts = [str(c) for c in lower(bind(read_model(case.model()), {})).computes]
    assert any("table(float32" in t for t in texts) and not any("table(float16" in t for t in some(texts))
    unit = FunctionContext(C99, {}, {}, {}, {})
    assert f"static const float {unit.table((0.5, 0.25), 'float16')}[2] = {{0.5f, 0.25f}};" in "".join(unit.tables.values())


def test_a_split_may_leave_parts_out() -> None:
    x = np.arange(10, dtype=F32).reshape(2, 5)
    nodes = [
        helper.make_node("Split", ["x"], ["", "b", ""], axis=1, num_outputs=3),
        helper.make_node("Split", ["x", "n"], ["c", "", "d"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [2, 5])],
        [onnx.ValueInfoProto(name=n) for n in "bcd"],
        [numpy_helper.from_array(np.array([1, 3, 1]), "n")],
    )
    bound = bind(read_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])), {})
    values = run_graph(lower(bound), {"x": x})
    for name, want in (("b", x[:, 2:4]), ("c", x[:, :1]), ("d", x[:, 4:])):
        np.testing.assert_array_equal(values[name], want)


def test_nothing_to_sum_and_no_steps() -> None:
    check(OperatorCase("Conv", 11, (np.ones((1, 0, 2, 2), F32), np.ones((3, 0, 1, 1), F32))), np.zeros((1, 3, 2, 2)))
    x, w, r, h = np.ones((0, 2, 3), F32), np.ones((1, 4, 3), F32), np.ones((1, 4, 4), F32), np.full((1, 2, 4), 5, F32)
    check(OperatorCase("RNN", 14, (x, w, r, None, None, h), {"hidden_size": 4}, 2), np.zeros((0, 1, 2, 4)), h)


def test_lengths_at_run_time(rng: np.random.Generator) -> None:
    """Check that steps past a sequence's end give 0, and that the last state is that of its last step."""
    x, w, r = (rng.uniform(-1, 1, s).astype(F32) for s in ((4, 3, 2), (2, 5, 2), (2, 5, 5)))
    lengths = np.array([1, 4, 2], np.int32)
    said = ours(OperatorCase("RNN", 14, (x, w, r, None, lengths), {"hidden_size": 5, "direction": "bidirectional"}, 2))
    assert said.values is not None and not said.host
    y = np.zeros((4, 2, 3, 5))
    for b, n in enumerate(lengths):
        for d, order in enumerate((range(n), range(n)[::-1])):
            h = np.zeros(5)
            for t in order:
                h = y[t, d, b] = np.tanh(w[d] @ x[t, b].astype(float) + r[d] @ h)
    np.testing.assert_allclose(said.values[0], y, rtol=1e-5, atol=1e-6)
