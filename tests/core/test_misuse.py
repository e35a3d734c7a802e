"""Operators used wrongly, a sample over all of them: ``python -m rammer.testing.operators --misused`` makes more."""

from __future__ import annotations

from random import Random

import pytest
from onnx import helper

from rammer.testing.operators import search  # noqa: F401  (importing it registers all families)
from rammer.testing.operators.case import FAMILIES, OperatorCase, drawn
from rammer.testing.operators.misuse import Misuse, misuses
from rammer.testing.operators.survey import outcome, survey
from rammer.testing.some import some


def test_a_sample_is_refused_or_means_something() -> None:
    found = survey(sorted(FAMILIES), seed=3, seconds=60, share=0.02)
    assert not found.faults, str(found)
    assert found.ends["refused"] > 100 and found.ends["accepted"] > 100


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
)


@pytest.mark.parametrize(("op", "what"), FOUND)
def test_what_surveys_found(op: str, what: str) -> None:
    """Uses that ended in an exception of Python's, or took all memory."""
    cases = (drawn(op, 17, n) for n in range(3))
    found = [m for case in cases for m in misuses(case, Random(0)) if m.what.startswith(what)]
    assert {outcome(m)[0] for m in some(found)} <= {"refused", "accepted"}


@pytest.mark.parametrize("axis", [7, -8])
@pytest.mark.parametrize(
    "op",
    [
        "GatherElements",
        "LayerNormalization",
        "LpNormalization",
        "MeanVarianceNormalization",
        "RMSNormalization",
        "ScatterElements",
    ],
)
def test_an_axis_that_there_is_not_is_refused(op: str, axis: int) -> None:
    """ONNX's inference lets it pass; counted round, it is another axis."""
    case = drawn(op, 0, 0)
    made = case.model()
    (node,) = made.graph.node
    (name,) = {"axis", "axes"} & {*case.schema.attributes}
    others = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*others, helper.make_attribute(name, [axis] if name == "axes" else axis)])
    assert outcome(Misuse(op, f"{name}={axis}", made, case.feeds)) == ("refused", "")


def test_the_survey_sees_what_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that trips over an attribute, and a process that ends."""
    case: OperatorCase = drawn("Elu", 0, 0)
    made = Misuse("Elu", "as it is", case.model(), case.feeds)
    assert outcome(made) == ("accepted", "")

    def trips(*_: object) -> None:
        raise IndexError("tuple index 7 out of range")

    monkeypatch.setattr("rammer.testing.operators.survey.lower_node", trips)
    assert outcome(made) == ("faults", "IndexError in survey.outcome: tuple index # out of range")
    monkeypatch.setattr("rammer.testing.operators.survey.read_model", lambda _: __import__("os")._exit(9))
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
