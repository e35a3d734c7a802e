"""Reports and references: host operators by type, and a reference that computes them unchanged."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx_models import model, tensor

import rammer
from rammer.cli.run import build_report, print_report
from rammer.frontend.read.reader import read_model
from rammer.reference.outputs import run_onnxruntime
from rammer.report.operator_times import grouped
from rammer.runtime.loaded_model import Timing


def test_operators_on_the_host_are_counted_by_type(capsys: pytest.CaptureFixture[str], rng: np.random.Generator) -> None:
    nodes = [helper.make_node("Sin", ["x"], ["s"])]
    nodes += [helper.make_node("Det", ["s"], [f"d{i}"]) for i in range(3)]
    exe = rammer.compile(model(nodes, [tensor("x", [65, 65])], ["d0", "d1", "d2"]), "toy")
    given = {"x": rng.standard_normal((65, 65)).astype(np.float32)}
    outputs, special = exe.run(given), exe.prepare(given)
    lines = grouped(special.host_nodes)
    assert len(lines) == 1 and lines[0].startswith("Det x 3: ")
    print_report(build_report(exe, special, outputs, [Timing((0.003,), 0.001, 0.004)]))
    shown = capsys.readouterr().out
    assert "on host   3 operators, 25% of the time\n          Det x 3: " in shown
    assert len(build_report(exe, special, outputs, [Timing((1.0,), 1.0, 2.0)])["host_nodes"]) == 3


def test_the_reference_optimises_nothing(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    seen, opened = list[object](), onnxruntime.InferenceSession

    def session(source: object, options: onnxruntime.SessionOptions, **others: object) -> object:
        seen.append(options.graph_optimization_level)
        return opened(source, options, **others)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    x = rng.standard_normal((2, 3)).astype(np.float32)
    found = run_onnxruntime(read_model(model([helper.make_node("Neg", ["x"], ["y"])], [tensor("x", [2, 3])], ["y"])), {"x": x})
    np.testing.assert_array_equal(found["y"], -x)
    assert seen == [onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL]
