"""Invalid uses of operators, a sample over all of them: ``python -m rammer_testing.operators --misused`` makes more."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from onnx import defs, helper

from rammer.frontend.bind.type_inference import RULES
from rammer_testing.nonempty import some
from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.case import Array, OperatorCase
from rammer_testing.operators.misuse import Misuse, misuses
from rammer_testing.operators.survey import outcome, survey


@pytest.mark.slow
def test_a_sample_is_refused_or_means_something(seed: int) -> None:
    found = survey(sorted(DESCRIBED), seed, seconds=120, share=0.01)
    assert not found.faults, str(found)
    assert found.ends["refused"] > 50 and found.ends["accepted"] > 50


FOUND = (
    ("ai.onnx.ml.TreeEnsembleClassifier", "input 0 as a scalar"),
    ("ai.onnx.ml.TreeEnsembleClassifier", "nodes_values_as_tensor="),
    ("ai.onnx.ml.TreeEnsembleRegressor", "n_targets=1099511627776"),
    ("ai.onnx.ml.TreeEnsemble", "n_targets=1099511627776"),
    ("ai.onnx.ml.TreeEnsemble", "nodes_splits="),
    ("ai.onnx.ml.TreeEnsemble", "nodes_modes="),
    ("LayerNormalization", "axis=5"),
    ("RMSNormalization", "axis=5"),
    ("com.microsoft.GroupQueryAttention", "input 6 that ends with 2147483647"),
    ("com.microsoft.GroupQueryAttention", "input 6 that ends with -3"),
    ("GroupNormalization", "input 0 empty along 2"),
    ("com.microsoft.MultiHeadAttention", "num_heads=9223372036854775807"),
    ("com.microsoft.CausalConvWithState", "input 0 as a scalar"),
    ("com.microsoft.MaxpoolWithMask", "pads=[1]"),
    ("com.microsoft.MaxpoolWithMask", "kernel_shape=[2147483647"),
    ("com.microsoft.DecoderMaskedMultiHeadAttention", "input 5 empty along 2"),
    ("com.microsoft.ConvTransposeWithDynamicPads", "input 2 empty along 0"),
    ("com.microsoft.BifurcationDetector", "min_ngram_size=-9223372036854775808"),
)


@pytest.mark.parametrize(("op", "what"), FOUND)
def test_what_surveys_found(op: str, what: str) -> None:
    """Check uses that once raised Python exceptions or exhausted memory."""
    cases = (drawn(op, 17, n) for n in range(6))
    found = [m for case in cases for m in misuses(case, Random(0)) if m.what.startswith(what)]
    assert {outcome(m)[0] for m in some(found)} <= {"refused", "accepted"}


#: Operators whose axis is a split position (the rank itself is valid), and operators whose result has one more axis.
CUT, LONGER = {"Flatten"}, {"OneHot", "Unsqueeze"}
#: Operators whose axis was a split position before opset 13.
CUT_ONCE = {"Softmax", "LogSoftmax", "Hardmax"}
NAMES = {"axis", "axes", "gather_axis", "quantize_axis"}


def with_axis(case: OperatorCase, name: str, axis: int) -> Misuse:
    """Return the case with another axis."""
    made = case.model()
    (node,) = made.graph.node
    others = [a for a in node.attribute if a.name != name]
    single = case.schema.attributes[name].type.name == "INT"
    del node.attribute[:]
    node.attribute.extend([*others, helper.make_attribute(name, axis if single else [axis])])
    return Misuse(case.op, f"{name}={axis}", made, case.feeds)


def named(case: OperatorCase) -> Array | None:
    """Return the operand whose axes an attribute names, or None."""
    operand = case.operands[2 if case.op.endswith("QLinearConcat") else 0]
    scale = case.operands[1] if case.op.endswith("uantizeLinear") else None
    return None if operand is None or (scale is not None and scale.size == 1) else operand


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_axis_that_there_is_not_is_refused(name: str, seed: int) -> None:
    """Check that out-of-range axes do not wrap around; ONNX's inference accepts many of them."""
    asked = 0
    for case in some([drawn(op, seed, n) for op in DESCRIBED for n in range(2)]):
        if name not in case.schema.attributes or (operand := named(case)) is None:
            continue
        bare = case.op.rpartition(".")[2]
        longer, cut = bare in LONGER, bare in CUT or (bare in CUT_ONCE and case.opset < 13)
        for axis in (operand.ndim + (longer or cut), -operand.ndim - 1 - longer, 9, -9):
            assert outcome(with_axis(case, name, axis)) == ("refused", ""), f"{name}={axis} of {case}"
            asked += 1
    assert asked


def test_what_inference_knows_by_a_body_alone_has_a_rule() -> None:
    """Check operators whose inference uses a function body: bodies assume extents other than 0. GroupNormalization once gave an
    empty axis the extent of a group."""
    every = {s.name: s for s in defs.get_all_schemas() if not s.domain and not s.has_type_and_shape_inference_function}
    written = {n for n, s in every.items() if s.has_function or s.has_context_dependent_function}
    assert written and written <= set(RULES)


def test_a_billion_windows_are_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 0, 0, 2147483647]}
    case = OperatorCase("AveragePool", 17, (np.zeros((2, 3, 4, 4), np.float32),), attributes)
    made = Misuse("AveragePool", "pads", case.model(), case.feeds)
    monkeypatch.setattr("rammer_testing.operators.survey.misuses", lambda *_: [made])
    assert survey(["AveragePool"], 0, 60).ends == {"refused": 1}


def test_the_survey_sees_what_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a lowering that raises IndexError, and a process that dies."""
    case: OperatorCase = drawn("Elu", 0, 0)
    made = Misuse("Elu", "as it is", case.model(), case.feeds)
    assert outcome(made) == ("accepted", "")

    def trips(*_: object) -> None:
        raise IndexError("tuple index 7 out of range")

    monkeypatch.setattr("rammer_testing.operators.survey.lower_node", trips)
    assert outcome(made) == ("faults", "IndexError in survey.outcome: tuple index # out of range")
    monkeypatch.setattr("rammer_testing.operators.survey.read_model", lambda _: __import__("os")._exit(9))
    found = survey(["Elu"], 0, 60, share=0.02)
    assert found.ends["faults"] and "exit code 9" in next(iter(found.faults))


@pytest.mark.parametrize(
    "kind",
    [
        "without strides",
        "strides twice",
        "strides=[]",
        "strides=[9223372036854775807]",
        "group=-1",
        "auto_pad=b'nonsense'",
        "labelled",
        "refers to a function's",
        "an unknown attribute",
        "input 1 left out",
        "inputs from 1 on",
        "an input more",
        "an output more",
        "input 0 of one rank more",
        "input 0 as a scalar",
        "input 1 empty along 0",
        "input 0 of nan everywhere",
    ],
)
def test_kinds_of_misuse(kind: str) -> None:
    case = next(c for n in range(50) if "strides" in (c := drawn("Conv", 0, n)).attributes and c.attributes["strides"])
    assert any(kind in misuse.what for misuse in misuses(case, Random(0)))
