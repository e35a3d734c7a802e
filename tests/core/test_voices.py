"""The decisions on voices: each names operators that exist, and an example of each kind is found."""

from __future__ import annotations

from onnx import defs

from rammer.frontend.voices import DECISIONS, Use, distrusted
from rammer.ir.types import TensorType

X = TensorType("float32", (1, 2, 5, 5))


def test_decisions_name_operators_and_quote() -> None:
    for decision in DECISIONS:
        assert all(defs.has(op) for op in decision.ops), decision.ops
        assert decision.wrong and len(decision.words) > 20 and decision.when


def test_the_reference_is_not_believed_about_reversed_cells() -> None:
    plain = Use("LSTM", 14, {}, (X, X, X))
    assert distrusted("reference", plain) is None
    assert distrusted("reference", Use("LSTM", 14, {"direction": "reverse"}, (X, X, X))) is not None
    lengths = Use("LSTM", 14, {}, (X, X, X, None, TensorType("int32", (2,))))
    assert distrusted("reference", lengths) is not None
    assert distrusted("onnxruntime", lengths) is None


def test_an_output_that_is_not_wanted_decides_nothing() -> None:
    attributes = {"kernel_shape": (2, 2)}
    assert distrusted("reference", Use("MaxPool", 12, attributes, (X,), (True, False))) is None
    assert distrusted("reference", Use("MaxPool", 12, attributes, (X,), (True, True))) is not None


def test_what_is_clipped_to_a_threshold_is_judged_by_the_words_of_the_layer() -> None:
    given = {"activations": ("Sigmoid", "ThresholdedRelu"), "activation_alpha": (0.5,), "linear_before_reset": 1}
    assert distrusted("onnxruntime", Use("GRU", 14, given, (X, X, X))) is None
    assert distrusted("onnxruntime", Use("GRU", 14, {**given, "clip": 0.5}, (X, X, X))) is not None


def test_products_over_nothing_are_not_asked_of_a_voice_that_reads_its_memory() -> None:
    kinds = [TensorType("uint8", shape) for shape in ((2, 0), (0, 3), (2, 4), (4, 3))]
    assert distrusted("onnxruntime", Use("MatMulInteger", 10, {}, kinds[:2])) is not None
    assert distrusted("onnxruntime", Use("MatMulInteger", 10, {}, kinds[2:])) is None


def test_zeros_alone_are_quantised_by_the_words_of_the_formula() -> None:
    for zeros, wrong in (((True,), True), ((False,), False), ((), False)):
        use = Use("DynamicQuantizeLinear", 11, {}, (X,), (True,) * 3, zeros)
        assert all((distrusted(v, use) is not None) == wrong for v in ("onnxruntime", "reference"))
