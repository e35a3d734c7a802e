"""The ONNX test suite: loading, scoring, and ONNX's backend interface."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper
from onnx.backend.base import Backend

import rammer.onnx_backend as backend
from rammer.cli.main import cli
from rammer.errors import BadInput, DeviceUnavailable, Mismatch
from rammer_testing.nonempty import some
from rammer_testing.suite.cases import SuiteCase, load, names
from rammer_testing.suite.run import grouped, scores
from rammer_testing.suite.score import (
    DECIDED,
    DECLINED,
    FAILED,
    HOSTED,
    NEARER,
    PASSED,
    RANDOM,
    UNRUN,
    WRONG,
    Score,
    differs,
    score,
    tally,
    without_arithmetic,
)
from rammer_testing.suite.wide import exactly, nearer, trusted_outputs


def test_all_kinds_load() -> None:
    found = names()
    assert len(found) > 2030
    # One of each kind: weights created in the run, in memory or in files, a sequence, and an export from PyTorch.
    for name in (
        "test_squeezenet",
        "test_add",
        "test_sequence_model1",
        "test_identity_sequence",
        "test_AvgPool2d",
        "test_operator_conv",
    ):
        case = load(name)
        assert case.sets and all(outputs for _, outputs in case.sets), name
    assert names("^test_add$") == ["test_add"]


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("test_add", PASSED),
        ("test_nonzero_example", HOSTED),
        ("test_bernoulli", RANDOM),
        ("test_training_dropout", HOSTED),
        ("test_scan_sum", PASSED),
        ("test_affine_grid_2d_expanded", HOSTED),
        ("test_regex_full_match_basic", DECLINED),
    ],
)
def test_verdicts(name: str, verdict: str) -> None:
    found = score(load(name), "toy", {})
    assert found.verdict == verdict
    assert bool(found.why) == (verdict == DECLINED) and bool(found.hosted) == (verdict in (HOSTED, RANDOM))


@pytest.mark.slow
def test_light_networks_have_the_output_beside_them() -> None:
    found = score(load("test_zfnet512"), "rocm", {})
    assert found.verdict == PASSED and not found.hosted


def test_a_wrong_output_is_wrong_and_a_broken_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load("test_add")
    inputs, outputs = case.sets[0]
    spoiled = np.array(outputs[0])
    spoiled.flat[-1] += 1
    wrong = SuiteCase(case.name, case.model, [(inputs, [spoiled])], case.rtol, case.atol)
    assert score(wrong, "toy", {}).verdict == WRONG
    monkeypatch.setattr("rammer.compile", lambda *args, **given: 1 / 0)
    assert score(case, "toy", {}).verdict == FAILED


@pytest.mark.parametrize("name", ["test_attention_4d_causal_fp16", "test_dft_inverse"])
def test_a_test_farther_from_float64_than_the_result_is_no_judge(name: str) -> None:
    """Check inaccurate references: one test is rounded at every step of its sums, the other has a transform's noise where 0 is
    exact."""
    case = load(name)
    found = score(case, "toy", {})
    assert (found.verdict, found.why) == (PASSED, NEARER)
    for inputs, outputs in some(case.sets):
        exact = exactly(case.model, inputs)
        assert exact is not None and exact[0].dtype == np.float64
        moved = np.asarray(outputs[0]) * np.asarray(1.01, outputs[0].dtype)
        assert not nearer(moved, outputs[0], exact[0], case.rtol, case.atol)
        assert not nearer(np.full_like(moved, np.nan), outputs[0], exact[0], case.rtol, case.atol)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_align_corners_of_a_fractional_length_is_judged_by_onnxruntime(mode: str) -> None:
    case = load(f"test_resize_downsample_scales_{mode}_align_corners")
    found = score(case, "toy", {})
    assert (found.verdict, found.why) == (PASSED, DECIDED)
    # ONNX Runtime refutes the test's numbers, which are the reference's. No other output is excused.
    (trusted,) = some(trusted_outputs(case.model, case.sets[0][0]))
    assert differs(trusted, case.sets[0][1][0], case.rtol, case.atol)
    for name in ("test_resize_upsample_sizes_nearest_floor_align_corners", "test_add"):
        assert trusted_outputs(load(name).model, load(name).sets[0][0]) is None


def test_arithmetic_on_the_host_is_counted() -> None:
    assert load("test_add").float32 and not load("test_loop11").float32 and not load("test_nonzero_example").float32
    sure = [Score("a", PASSED, float32=True), Score("b", HOSTED, "", ("Compress",), True), Score("c", RANDOM, float32=True)]
    others = [Score("d", HOSTED, "", ("Compress", "MelWeightMatrix"), True), Score("e", DECLINED, "why", (), True)]
    assert without_arithmetic([*sure, *others, Score("f", PASSED)]) == (3, 5)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (np.zeros(2, np.float32), np.zeros(2, np.float64)),
        (np.zeros((2, 1)), np.zeros(2)),
        (np.array([np.nan]), np.array([0.0])),
        (np.array([1.0]), np.array([1.01])),
        ([np.zeros(1)], [np.zeros(1), np.zeros(1)]),
        (np.zeros(1), None),
        (np.zeros(1), [np.zeros(1)]),
        (np.array(["a"], object), np.array(["b"], object)),
    ],
)
def test_differences(have: Any, want: Any) -> None:
    assert differs(have, want, 1e-3, 1e-7)
    assert not differs(want, want, 1e-3, 1e-7)


@pytest.mark.slow
def test_scores_in_processes() -> None:
    told = list[tuple[int, int]]()
    found = scores("toy", "^test_(add|relu|nonzero_example)$", processes=1, told=lambda done, of: told.append((done, of)))
    assert [(s.name, s.verdict) for s in found] == [("test_add", PASSED), ("test_nonzero_example", HOSTED), ("test_relu", PASSED)]
    assert told[-1] == (3, 3)
    with pytest.raises(BadInput, match="no test of ONNX is called"):
        scores("toy", "there is none")
    with pytest.raises(BadInput, match="nowhere"):
        scores("nowhere", "^test_add$")


def test_groups_leave_out_names_and_numbers() -> None:
    found = [Score("a", DECLINED, "'x' has rank 3"), Score("b", DECLINED, "'y' has rank 4"), Score("c", PASSED)]
    assert [len(g) for g in grouped(found).values()] == [2, 1]
    assert tally(found)[DECLINED] == 2


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    said = CliRunner().invoke(
        cli, ["onnx-tests", "--device", "toy", "-k", "^test_(add|regex_full_match_basic)$", "--json", str(file)]
    )
    assert said.exit_code == 0, said.output
    assert "passed" in said.output and "1 declined: RegexFullMatch" in said.output
    written = json.loads(file.read_text())
    assert {s["name"]: s["verdict"] for s in written["scores"]} == {"test_add": PASSED, "test_regex_full_match_basic": DECLINED}


def test_tests_that_a_signal_cut_off_are_scored_as_not_run() -> None:
    def told(done: int, of: int) -> None:
        if done == 1:
            signal.raise_signal(signal.SIGTERM)

    found = scores("toy", "^test_(add|sub|mul|div)", processes=1, told=told)
    assert found[0].verdict == PASSED and found[-1].verdict == UNRUN and len(found) == len(names("^test_(add|sub|mul|div)"))


@pytest.mark.parametrize("verdict", [WRONG, UNRUN])
def test_the_command_fails_where_a_test_is_wrong_or_not_run(verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rammer_testing.suite.run.scores", lambda *args: [Score("test_add", verdict, "other")])
    said = CliRunner().invoke(cli, ["onnx-tests", "--device", "toy"])
    assert isinstance(said.exception, Mismatch)


def affine() -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2]) for n in "xyz"]
    graph = helper.make_graph([helper.make_node("Sub", ["x", "y"], ["z"])], "g", ports[:2], ports[2:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_the_backend_interface() -> None:
    assert issubclass(backend.RammerBackend, Backend)
    x, y = np.array([5, 7], np.float32), np.array([1, 2], np.float32)
    for inputs in ([x, y], {"y": y, "x": x}):
        (z,) = backend.prepare(affine(), "toy").run(inputs)
        np.testing.assert_array_equal(z, x - y)
    (z,) = backend.run_model(affine(), [x, y], "toy")
    np.testing.assert_array_equal(z, x - y)
    (z,) = backend.run_node(helper.make_node("Div", ["a", "b"], ["c"]), [x, y], "toy")
    np.testing.assert_array_equal(z, x / y)
    assert backend.supports_device("toy") and not backend.supports_device("nowhere")
    assert backend.is_compatible(affine(), "toy")
    broken = affine()
    broken.graph.node[0].op_type = "NoSuchOperator"
    assert not backend.is_compatible(broken, "toy")


def test_names_of_devices() -> None:
    assert backend.spec_of("toy") == "toy"
    with pytest.raises((BadInput, DeviceUnavailable)):
        backend.spec_of("CUDA:7")
