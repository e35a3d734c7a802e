"""Infinite loops: stopped on the host by a time limit that the message names, and never run at compile time."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import typed
from onnx import TensorProto, helper, numpy_helper

from rammer.frontend.bind import if_conversion

FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


def body(prefix: str, inner: onnx.NodeProto | None = None) -> onnx.GraphProto:
    """Make a body whose condition stays true; ``inner`` computes its value instead of a negation."""
    info = helper.make_tensor_value_info
    i, going, old, on, new = (prefix + name for name in ("i", "going", "old", "on", "new"))
    nodes = [helper.make_node("Identity", [going], [on]), inner or helper.make_node("Neg", [old], [new])]
    return helper.make_graph(
        nodes,
        f"{prefix}body",
        [info(i, INT64, ()), info(going, BOOL, ()), info(old, FLOAT, (4,))],
        [info(on, BOOL, ()), info(new, FLOAT, (4,))],
    )


def endless(path: Path, trips: int | None, nested: bool = False) -> list[str | Path]:
    """Return ``rammer``'s arguments for an If with a run-time condition and a Loop in one branch. The Loop has ``trips``
    iterations (None: infinite); with ``nested``, its body contains an infinite loop."""
    info = helper.make_tensor_value_info
    within = helper.make_node("Loop", ["", "true", "a_old"], ["a_new"], body=body("b_")) if nested else None
    loop = helper.make_node("Loop", ["" if trips is None else "trips", "true", "x"], ["z"], body=body("a_", within))
    then = helper.make_graph(
        [loop, helper.make_node("Reshape", ["z", "shape"], ["then"])], "then", [], [info("then", FLOAT, (4,))]
    )
    other = helper.make_graph([helper.make_node("Abs", ["x"], ["otherwise"])], "else", [], [info("otherwise", FLOAT, (4,))])
    known = {"true": np.array(True), "shape": np.array([4], np.int64), "trips": np.array(trips or 0, np.int64)}
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], name="choice", then_branch=then, else_branch=other)],
        "endless",
        [info("c", BOOL, ()), info("x", FLOAT, (4,))],
        [info("y", FLOAT, (4,))],
        [numpy_helper.from_array(a, n) for n, a in known.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    np.savez(path.with_suffix(".npz"), c=np.array(True), x=np.arange(4, dtype=np.float32))
    return [path, "--device", "toy", "--inputs", path.with_suffix(".npz")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("trips", "nested"), [(None, False), (10**12, False), (3, True)])
@pytest.mark.parametrize("how", ["run", "compare"])
def test_an_endless_loop_ends_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, trips: int | None, capsys: pytest.CaptureFixture[str], nested: bool
) -> None:
    monkeypatch.setenv("RAMMER_HOST_SECONDS", "0.1")
    arguments = endless(tmp_path / "m.onnx", trips, nested)
    start = time.thread_time()
    done = typed(monkeypatch, capsys, how, *arguments)
    assert time.thread_time() - start < 10  # 0.1 s of iterations, plus compiling
    assert done.code == 2 and "Loop has not ended after" in done.err and "0.1 s on the host" in done.err
    assert "choice" in done.err and "set RAMMER_HOST_SECONDS" in done.err and "Traceback" not in done.err


def test_compiling_an_endless_loop_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = endless(tmp_path / "m.onnx", None)
    done = typed(monkeypatch, capsys, "compile", arguments[0], *arguments[1:3])
    assert done.code == 0 and "1 operators on the host" in done.out


@pytest.mark.parametrize("limit", ["", "60", "0"])
def test_a_loop_that_ends_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    monkeypatch.setenv("RAMMER_HOST_SECONDS", limit)
    monkeypatch.setattr(if_conversion, "MOST_OPERATORS", 0)  # the host continues to drive the branches
    done = typed(monkeypatch, capsys, "compare", *endless(tmp_path / "m.onnx", 7))
    assert done.code == 0, done.err


@pytest.mark.parametrize("limit", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    monkeypatch.setenv("RAMMER_HOST_SECONDS", limit)
    done = typed(monkeypatch, capsys, "run", *endless(tmp_path / "m.onnx", 10**12))
    assert done.code == 2 and f"RAMMER_HOST_SECONDS is '{limit}', which is not a number of seconds" in done.err
