"""Decisions on voices: each names existing operators, and an example of each kind is found."""

from __future__ import annotations

import numpy as np
from onnx import defs

from rammer.frontend.spec_rulings.operator_questions import Use
from rammer.frontend.spec_rulings.rulings import DECISIONS, find_decision
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some

X = TensorType("float32", (1, 2, 5, 5))


def test_decisions_name_operators_and_quote() -> None:
    for decision in some(DECISIONS):
        assert all(defs.has(op) for op in decision.ops), decision.ops
        assert decision.wrong and len(decision.words) > 20 and decision.when


def test_the_reference_is_not_believed_about_reversed_cells() -> None:
    plain = Use("LSTM", 14, {}, (X, X, X))
    assert find_decision("reference", plain) is None
    assert find_decision("reference", Use("LSTM", 14, {"direction": "reverse"}, (X, X, X))) is not None
    lengths = Use("LSTM", 14, {}, (X, X, X, None, TensorType("int32", (2,))))
    assert find_decision("reference", lengths) is not None
    assert find_decision("onnxruntime", lengths) is None


def test_an_output_that_is_not_wanted_decides_nothing() -> None:
    attributes = {"kernel_shape": (2, 2)}
    assert find_decision("reference", Use("MaxPool", 12, attributes, (X,), (True, False))) is None
    assert find_decision("reference", Use("MaxPool", 12, attributes, (X,), (True, True))) is not None


def test_what_is_clipped_to_a_threshold_is_judged_by_the_words_of_the_layer() -> None:
    given = {"activations": ("Sigmoid", "ThresholdedRelu"), "activation_alpha": (0.5,), "linear_before_reset": 1}
    assert find_decision("onnxruntime", Use("GRU", 14, given, (X, X, X))) is None
    assert find_decision("onnxruntime", Use("GRU", 14, {**given, "clip": 0.5}, (X, X, X))) is not None


def test_products_over_nothing_are_not_asked_of_a_voice_that_reads_its_memory() -> None:
    kinds = [TensorType("uint8", shape) for shape in ((2, 0), (0, 3), (2, 4), (4, 3))]
    assert all(find_decision("onnxruntime", Use(t, 10, {}, kinds[:2])) is not None for t in ("MatMul", "MatMulInteger"))
    assert find_decision("onnxruntime", Use("MatMulInteger", 10, {}, kinds[2:])) is None
    image, kernel = TensorType("float32", (3, 0, 2, 5)), TensorType("float32", (0, 4, 2, 2))
    steps = TensorType("float32", (3, 2, 0))
    for op, empty in (("ConvTranspose", (image, kernel, X)), ("Conv", (image, image, X)), ("LSTM", (steps, X, X))):
        assert find_decision("onnxruntime", Use(op, 11, {}, empty)) is not None
        assert find_decision("onnxruntime", Use(op, 11, {}, (X, X, X))) is None


def test_zeros_alone_are_quantised_by_the_words_of_the_formula() -> None:
    for values, wrong in (([np.zeros(3)], True), ([np.ones(3)], False), ([], False)):
        use = Use("DynamicQuantizeLinear", 11, {}, (X,), (True,) * 3, values)
        assert all((find_decision(v, use) is not None) == wrong for v in ("onnxruntime", "reference"))


def test_the_reference_slices_backwards_from_within_only() -> None:
    index = TensorType("int64", (1,))

    def use(start: int, step: int, *, known: bool = True) -> Use:
        values = [np.array([v], np.int64) if known else None for v in (start, -9, 0, step)]
        return Use("Slice", 13, {}, (X, index, index, index, index), (True,), [None, *values])

    assert find_decision("reference", use(-2, -1)) is not None  # an axis has one element
    assert find_decision("reference", use(-1, -1)) is None and find_decision("reference", use(-99, 2)) is None
    assert find_decision("reference", use(-1, -1, known=False)) is not None
    assert find_decision("onnxruntime", use(-2, -1)) is None


def test_sequences_without_steps_keep_their_initial_state() -> None:
    def use(*lengths: int) -> Use:
        inputs = (X, X, X, None, TensorType("int32", (2,)), X)
        return Use("GRU", 14, {}, inputs, (True, True), [None, None, None, None, np.array(lengths, np.int32)])

    assert find_decision("onnxruntime", use(0, 2)) is not None and find_decision("onnxruntime", use(1, 2)) is None


def test_products_over_nothing_and_large_exponents() -> None:
    scale, nothing = TensorType("float32", ()), TensorType("uint8", (3, 0))
    inputs = (nothing, scale, scale, TensorType("uint8", (0, 4)), scale, scale, scale, scale)
    assert find_decision("onnxruntime", Use("QLinearMatMul", 10, {}, inputs)) is not None
    assert find_decision("onnxruntime", Use("GRU", 14, {"activations": ("Sigmoid", "Softplus")}, (X, X, X))) is not None


def test_align_corners_uses_the_integer_length() -> None:
    sizes = (X, None, None, TensorType("int64", (4,)))
    corners = {"coordinate_transformation_mode": "align_corners"}
    policy = {**corners, "keep_aspect_ratio_policy": "not_larger"}
    assert find_decision("reference", Use("Resize", 19, corners, sizes)) is None
    assert find_decision("reference", Use("Resize", 19, policy, sizes)) is not None
    assert find_decision("onnxruntime", Use("Resize", 19, policy, sizes)) is None
    assert find_decision("onnxruntime", Use("Resize", 19, {**policy, "axes": (0, 1)}, sizes)) is None
    assert find_decision("onnxruntime", Use("Resize", 19, {**policy, "axes": (0, -1)}, sizes)) is not None


def test_nearest_elements_at_ties_of_a_rounded_scale() -> None:
    def use(scale: float, nearest: str, **given: str) -> Use:
        kinds = (TensorType("float32", (1, 5)), None, TensorType("float32", (2,)))
        attributes = {"nearest_mode": nearest, **given}
        return Use("Resize", 19, attributes, kinds, (True,), (None, None, np.asarray([1, scale], np.float32)))

    assert find_decision("reference", use(0.6, "floor")) is not None
    assert find_decision("onnxruntime", use(0.6, "floor")) is None
    assert find_decision("reference", use(0.6, "floor", mode="linear")) is None
    assert find_decision("reference", use(1.5, "floor")) is None
    assert find_decision("reference", use(0.6, "round_prefer_ceil", coordinate_transformation_mode="align_corners")) is not None


def test_what_is_no_number_is_decided_once_it_is_known() -> None:
    for op in ("Sign", "ArgMax", "Hardmax", "Max"):
        for values, wrong in (([np.array([1, np.nan])], True), ([np.ones(2)], False), ([], False)):
            assert (find_decision("onnxruntime", Use(op, 13, {}, (X,), (True,), values)) is not None) == wrong


def test_windows_over_padding_alone() -> None:
    def use(extent: int, kernel: int, pads: tuple[int, int], **given: tuple[int]) -> Use:
        return Use("MaxPool", 12, {"kernel_shape": (kernel,), "pads": pads, **given}, (TensorType("float32", (1, 1, extent)),))

    alone = [use(0, 1, (1, 1)), use(5, 2, (2, 2)), use(1, 2, (1, 1), dilations=(2,))]
    for voice in ("reference", "onnxruntime"):
        assert all(find_decision(voice, u) is not None for u in alone)
        assert not any(find_decision(voice, u) for u in (use(5, 2, (0, 0)), use(5, 3, (2, 2))))


def test_symmetric_coordinates_whose_terms_cancel() -> None:
    def use(scale: float, nearest: str, source: int = 7, **given: str) -> Use:
        mode = {"coordinate_transformation_mode": "half_pixel_symmetric", "nearest_mode": nearest, **given}
        kinds = (TensorType("float32", (1, 1, source)), None, TensorType("float32", (3,)))
        return Use("Resize", 19, mode, kinds, (True,), (None, None, np.asarray([1, 1, scale], np.float32)))

    assert find_decision("reference", use(1.5, "ceil")) is not None
    assert find_decision("onnxruntime", use(1.5, "ceil")) is None
    assert find_decision("reference", use(1.5, "ceil", mode="linear")) is None
    assert find_decision("reference", use(2.0, "ceil")) is None
    assert find_decision("reference", use(2.0, "round_prefer_floor")) is None
    assert find_decision("reference", use(1.5, "ceil", coordinate_transformation_mode="half_pixel")) is None


def test_integers_shrink_as_integers() -> None:
    for dtype, wrong in (("int64", True), ("uint32", True), ("int8", False), ("float32", False)):
        assert (find_decision("onnxruntime", Use("Shrink", 9, {}, (TensorType(dtype, (2,)),))) is not None) == wrong


def test_places_upon_pixels_by_a_scale_that_is_rounded() -> None:
    def use(out: int, mode: str = "cubic", source: int = 15, **given: str) -> Use:
        kinds = (TensorType("float32", (1, source)), None, None, TensorType("int64", (2,)))
        return Use("Resize", 19, {"mode": mode, **given}, kinds, (True,), [None, None, None, np.array([1, out])])

    # (5 + 0.5) / (11 / 15) - 0.5 is 7.
    assert all(find_decision("reference", use(11, mode)) is not None for mode in ("cubic", "linear"))
    assert find_decision("reference", use(11, "nearest")) is None
    assert find_decision("reference", use(30)) is None and find_decision("reference", use(45)) is None
    assert find_decision("reference", use(11, coordinate_transformation_mode="align_corners")) is None
    assert find_decision("onnxruntime", use(11)) is None


def test_what_wraps_round_a_torus_more_than_once() -> None:
    pads = TensorType("int64", (8,))

    def use(mode: str, *sides: int, known: bool = True) -> Use:
        values = [None, np.array(sides, np.int64) if known else None]
        return Use("Pad", 19, {"mode": mode}, (X, pads), (True,), values)

    once, again = (0, 0, 5, 0, 0, 2, 0, 5), (0, 3, 0, 0, 0, 0, 0, 0)  # X has 1, 2, 5 and 5 elements
    assert (
        find_decision("onnxruntime", use("wrap", *again)) is not None and find_decision("onnxruntime", use("wrap", *once)) is None
    )
    assert find_decision("onnxruntime", use("reflect", *again)) is None
    assert find_decision("onnxruntime", use("wrap", *once, known=False)) is not None


def test_means_of_no_integers() -> None:
    nothing = TensorType("int64", (1, 0))
    assert find_decision("reference", Use("ReduceMean", 18, {}, (nothing,))) is not None
    assert find_decision("reference", Use("ReduceMean", 18, {}, (TensorType("int64", (1, 2)),))) is None
