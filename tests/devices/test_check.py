"""Checked runs: an index out of range, NaN and infinities are errors that name the operator, on every device."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import defs, helper
from onnx_models import BOOL, FLOAT, INT64, model, tensor

import rammer
from rammer.errors import BadInput
from rammer.jit.operator_check import RULES
from rammer.runtime.executable import VARIABLE

DEVICES = ("toy", "rocm", "ipu_sim")
#: Inputs of ONNX's operators named indices that are unrestricted or checked elsewhere.
FREE = {
    "OneHot": "an index out of range gives the off value",
    "MaxUnpool": "a flat place in a result",
    "TensorScatter": "refused by the host",
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(VARIABLE, "1")
    return str(request.param)


def problem(proto: onnx.ModelProto, device: str, inputs: dict[str, np.ndarray]) -> str:
    """Return the error message of a run, or "" if it succeeds."""
    exe = rammer.compile(proto, device)
    try:
        exe.run(inputs)
    except BadInput as error:
        return error.what
    finally:
        exe.close()
    return ""


#: Operators with operands d (data), i (indices) and u (updates) -> shapes, and attributes.
USES: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, int]]] = {
    "Gather": ("d i", {"d": (3, 5), "i": (2, 2)}, {"axis": 1}),
    "GatherElements": ("d i", {"d": (3, 5), "i": (3, 2)}, {"axis": -1}),
    "GatherND": ("d i", {"d": (3, 4, 5), "i": (3, 2, 2)}, {"batch_dims": 1}),
    "ScatterElements": ("d i u", {"d": (3, 5), "i": (2, 2), "u": (2, 2)}, {"axis": 0}),
    "ScatterND": ("d i u", {"d": (3, 4, 5), "i": (2, 2), "u": (2, 5)}, {}),
    "NegativeLogLikelihoodLoss": ("d i", {"d": (3, 4), "i": (3,)}, {"ignore_index": -7}),
}


@pytest.mark.slow
@pytest.mark.parametrize("op", USES)
def test_the_operator_and_the_index_are_named(op: str, device: str, rng: np.random.Generator) -> None:
    operands, shapes, attributes = USES[op]
    kinds = {"i": INT64, "d": FLOAT, "u": FLOAT}
    ports = [tensor(n, list(shapes[n]), kinds[n]) for n in operands.split()]
    nodes = [
        helper.make_node("Abs", ["d"], ["a"]),
        helper.make_node(op, operands.replace("d", "a").split(), ["b"], name="the one", **attributes),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    inputs = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    (rule,) = RULES[op]
    node = nodes[1]
    right = np.zeros(shapes["i"], np.int64)
    for part, rest, _, extent in rule.extents(node, right, shapes["d"]):
        low = -extent if rule.negative else 0
        right[(..., *rest) if rest else ...] = rng.permutation(np.arange(low, extent))[: part.size].reshape(part.shape) % extent
    assert problem(model(nodes, ports, ["y"]), device, {**inputs, "i": right}) == ""
    for _ in range(2):
        at = tuple(int(rng.integers(n)) for n in right.shape)
        _, rest, axis, extent = next(p for p in rule.extents(node, right, shapes["d"]) if p[1] in ([], [at[-1]]))
        wrong = int(rng.choice([extent, extent + 1000, -extent - 1, -(2**40), 2**40]))
        indices = right.copy()
        indices[at] = wrong
        said = problem(model(nodes, ports, ["y"]), device, {**inputs, "i": indices})
        low = -extent if rule.negative else 0
        assert (
            said == f"node the one ({op}) has index {wrong} at {list(at)} of i, and axis {axis} of a takes {low} to {extent - 1}"
        )


def test_every_operator_with_indices_has_a_rule() -> None:
    """Check this by ONNX's names of inputs."""
    named = {
        s.name
        for s in defs.get_all_schemas()
        if s.domain in ("", "ai.onnx.ml") and any(re.search("indices|_ids", i.name) for i in s.inputs)
    }
    assert named - set(RULES) == set(FREE) & named and len(named) > 8


@pytest.mark.slow
def test_the_operator_that_makes_nan_is_named(device: str) -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node("Log", ["n"], ["l"], name="culprit"),
        helper.make_node("Exp", ["l"], ["e"], name="victim"),
        helper.make_node("Relu", ["e"], ["y"]),
    ]
    proto = model(nodes, [tensor("x", [2, 3])], ["y"])
    x = np.full((2, 3), -1, np.float32)
    assert problem(proto, device, {"x": x}) == ""
    x[1, 2] = 1
    assert problem(proto, device, {"x": x}) == (
        "node culprit (Log) makes NaN at [1, 2] (1 of 6 elements) in l, of operands that have none"
    )
    x[1, 2] = np.nan
    assert problem(proto, device, {"x": x}) == "input x has NaN at [1, 2] (1 of 6 elements)"
    x[1, 2] = 0
    assert "node culprit (Log) makes an infinity at [1, 2]" in problem(proto, device, {"x": x})


def test_infinities_of_the_model_are_its_own(device: str, rng: np.random.Generator) -> None:
    """Check that a mask of minus infinity passes; a row of nothing else makes NaN, which is an error."""
    nodes = [
        helper.make_node("Constant", [], ["inf"], value_float=float("inf")),
        helper.make_node("Neg", ["inf"], ["low"]),
        helper.make_node("Where", ["m", "x", "low"], ["w"]),
        helper.make_node("Softmax", ["w"], ["y"], name="soft"),
    ]
    proto = model(nodes, [tensor("x", [2, 3]), tensor("m", [2, 3], BOOL)], ["y"])
    x, mask = rng.standard_normal((2, 3)).astype(np.float32), np.array([[True, False, True], [False, False, True]])
    assert problem(proto, device, {"x": x, "m": mask}) == ""
    mask[1] = False
    assert "node soft (Softmax) makes NaN at [1, 0] (3 of 6 elements) in y" in problem(proto, device, {"x": x, "m": mask})


@pytest.mark.slow
def test_what_waits_for_values_is_checked(device: str) -> None:
    """Check rows whose number depends on data, and a loop that is not unrolled."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["g"]), helper.make_node("Add", ["s", "s"], ["t"])],
        "b",
        [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", ["k"])],
        [tensor("g", [], BOOL), tensor("t", ["k"])],
    )
    nodes = [
        helper.make_node("Compress", ["x", "m"], ["c"], axis=0),
        helper.make_node("Loop", ["n", "", "c"], ["l"], body=body, name="looping"),
        helper.make_node("Sqrt", ["l"], ["y"], name="root"),
    ]
    proto = model(nodes, [tensor("x", [4]), tensor("m", [4], BOOL), tensor("n", [], INT64)], ["y"])
    inputs = {"x": np.array([1, -1, 1, 1], np.float32), "m": np.array([True, False, True, True]), "n": np.array(3)}
    assert problem(proto, device, inputs) == ""
    assert "node root (Sqrt) makes NaN at [1]" in problem(proto, device, inputs | {"m": np.array([True] * 4)})
    assert "node looping (Loop) makes an infinity at [0]" in problem(proto, device, inputs | {"n": np.array(200)})


def test_runs_are_not_checked_unasked(rng: np.random.Generator) -> None:
    proto = model([helper.make_node("Log", ["x"], ["y"])], [tensor("x", [3])], ["y"])
    assert np.isnan(rammer.compile(proto, "toy").run({"x": -np.ones(3, np.float32)})["y"]).all()


def test_a_compiled_file_has_no_operators_to_check(tmp_path: Path) -> None:
    from rammer.compiled.artifact import save_artifact

    proto = model([helper.make_node("Log", ["x"], ["y"])], [tensor("x", [3])], ["y"])
    exe = rammer.compile(proto, "toy")
    save_artifact(tmp_path / "m.rammer", exe.artifact(exe.compile_only({})))
    with pytest.raises(BadInput, match="a compiled file does not have the operators to check"):
        rammer.compile(tmp_path / "m.rammer").check_run({"x": np.ones(3, np.float32)})
