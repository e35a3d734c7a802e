"""`bench --per-operator`: every operator of a model with its fraction of the time on every device, and host operators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.cli.main import cli
from rammer.device.manifest import Recorded, Span
from rammer.errors import DeviceUnavailable
from rammer.frontend.host.host_node import collect_host_times, time_operator
from rammer.report import operator_times
from rammer.report.operator_times import HOST, MEASURED, PREDICTED, SIMULATED, TRACED, OperatorShare, operator_shares, table_rows
from rammer.report.text_table import plain_table
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel

#: Sizes: NumPy, tile by tile, is slow at the size that shows a difference elsewhere.
SMALL, LARGE = 16, 192


def network(rng: np.random.Generator, hosted: bool = False, size: int = SMALL) -> onnx.ModelProto:
    """Return a product that takes most of the time, and two maps after reductions. With ``hosted``, two operators of one type are
    on the host."""
    weights = [numpy_helper.from_array(rng.standard_normal((size, size)).astype(np.float32), "w")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], "large"),
        helper.make_node("Softmax", ["p"], ["s"], "soft"),
    ]
    last = "s"
    if hosted:
        for i in range(2):
            step = [f"u{i}", "", f"v{i}", ""]
            nodes.append(helper.make_node("Unique", [last], step[:3], f"unique{i}", axis=0))
            nodes.append(helper.make_node("Relu", [f"u{i}"], [f"r{i}"], f"relu{i}"))
            last = f"r{i}"
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, shape)] for n, shape in (("x", [size, size]), (last, None))]
    graph = helper.make_graph(nodes, "network", *ports, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def listed(proto: onnx.ModelProto, device: str, rng: np.random.Generator) -> list[OperatorShare]:
    exe = rammer.compile(proto, device)
    size = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    feeds = {"x": rng.standard_normal((size, size)).astype(np.float32)}
    try:
        return operator_shares(exe.backend, exe.prepare(feeds), feeds)
    finally:
        exe.close()


@pytest.mark.parametrize(("device", "how"), [("toy", MEASURED), ("rocm", TRACED), ("ipu_sim", SIMULATED)])
def test_every_operator_has_a_share(device: str, how: str, rng: np.random.Generator) -> None:
    found = listed(network(rng, size=SMALL if device == "toy" else LARGE), device, rng)
    nodes = {n: t for s in found for n, t in zip(s.nodes, s.types, strict=True)}
    assert nodes == {"large": "MatMul", "soft": "Softmax"}
    assert all(s.how == how and s.seconds > 0 and s.tasks > 0 for s in some(found))
    assert [s.seconds for s in found] == sorted((s.seconds for s in found), reverse=True)
    assert device == "toy" or "large" in found[0].nodes, found  # NumPy's softmax is no faster than its product


def test_host_operators_by_type(rng: np.random.Generator) -> None:
    """Check this also after an operator that waits for values."""
    found = listed(network(rng, hosted=True), "toy", rng)
    (unique,) = [s for s in found if s.how == HOST]
    assert (unique.types, unique.tasks) == (("Unique",), 2) and unique.seconds > 0
    assert {"large", "soft"} <= {n for s in found for n in s.nodes}
    assert any("Unique on the host" in " ".join(row) for row in table_rows(found))


def test_what_an_operator_runs_inside_is_not_its_own() -> None:
    with collect_host_times() as spent:
        with time_operator("Loop"), time_operator("Unique"):
            sum(range(200_000))
        with time_operator("Unique"):
            pass
    assert spent.calls == {"Loop": 1, "Unique": 2} and spent.seconds["Loop"] < spent.seconds["Unique"]
    with time_operator("Loop"):
        pass
    assert spent.calls["Loop"] == 1  # times are not collected here


def test_a_record_of_the_run_comes_before_the_profiler(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    exe = rammer.compile(network(rng), "toy")
    feeds = {"x": rng.standard_normal((SMALL, SMALL)).astype(np.float32)}
    special = exe.prepare(feeds)
    (program,) = special.compiled.programs

    class Recording(SimpleNamespace):
        vdevice, records_tasks = exe.backend.vdevice, True

        def trace(self, program: Any, constants: Any, given: Mapping[str, Any]) -> Recorded:
            assert given["x"] is not None
            spans = [Span(v, o.name, v, k, k + 2.0 + v) for k, o in enumerate(program.operators) for v in range(2)]
            return Recorded(program, spans)

    found = operator_shares(Recording(), special, feeds)  # type: ignore[arg-type]
    assert {(s.operator, s.seconds, s.how) for s in found} == {(o.name, 3.0, TRACED) for o in program.operators}

    class Absent(SimpleNamespace):
        def task_time(self, kernel: Any, binding: Any) -> tuple[float, float]:
            raise DeviceUnavailable("no card")

    offline = SimpleNamespace(kernel=exe.backend.kernel, vdevice=exe.backend.vdevice, profiler=Absent())
    binding = operator_times.Binding.of(program, ())
    seconds, how = operator_times.isolated_seconds(offline, program.operators[0], binding)  # type: ignore[arg-type]
    assert how == PREDICTED and seconds > 0
    exe.close()


def test_a_long_table_ends_with_what_it_leaves_out() -> None:
    many = [
        OperatorShare(f"o{i}", ("a", "b", "c", "d"), ("Add", "", "Mul", "Sub"), "generic", 1, 1.0, MEASURED, i) for i in range(25)
    ]
    rows = table_rows(many)
    assert rows[0] == ["1 s", "4.0%", "1", "o0", "a (Add), b, c (Mul) and 1 more", "generic", "1", MEASURED]
    assert rows[-1][1:4] == ["20.0%", "5", "more"] and len(rows) == operator_times.MOST_ROWS + 1


def test_equal_operators_are_one_row_of_a_narrow_table() -> None:
    cells = [OperatorShare(f"step_{i}" * 20, (f"n{i}" * 40,), ("LSTM",), "cell" * 9, 64, 1e-3, SIMULATED, 0) for i in range(99)]
    hosted = [OperatorShare("", (), (op,), "", 1, 5e-3, HOST) for op in ("Unique", "NonZero")]
    rows = table_rows([*cells, OperatorShare("last", ("y",), ("Add",), "generic", 1, 1e-6, SIMULATED, 1), *hosted])
    assert [row[:3] for row in rows[:2]] == [["99 ms", "90.8%", "99"], ["5 ms", "4.6%", "1"]] and len(rows) == 4
    lines = plain_table(rows, operator_times.HEADERS).splitlines()
    assert all(len(line) <= 120 for line in some(lines)) and lines[0].startswith("time")


def test_equal_operators_of_a_model_have_one_form(rng: np.random.Generator) -> None:
    twin = SmallModel(
        "twin",
        "(float[192,192] x, float[192,192] w_a, float[192,192] w_b) => (float[192,192] y) {"
        " a = MatMul(x, w_a) s = Softmax(a) b = MatMul(s, w_b) y = Softmax(b) }",
    )
    found = listed(twin.build(rng), "rocm", rng)
    products = [s for s in found if "MatMul" in s.types]
    assert len(products) == 2 and len({s.form for s in products}) == 1 < len({s.form for s in found})


@pytest.mark.parametrize("cached", [False, True])
def test_the_command(tmp_path: Path, rng: np.random.Generator, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    model, file = tmp_path / "network.onnx", tmp_path / "bench.json"
    onnx.save(network(rng), model)
    words = ["bench", str(model), "--device", "toy", "--iterations", "1", "--duration", "0", "--json", str(file)]
    if cached:
        assert CliRunner().invoke(cli, words).exit_code == 0
    said = CliRunner().invoke(cli, [*words, "--per-operator"])
    assert said.exit_code == 0, said.output
    assert "network on toy" in said.output and "large (MatMul)" in said.output
    (parts,) = json.loads(file.read_text())["operators"]
    assert (parts["model"], parts["runner"]) == ("network", "toy") and parts["operators"][0]["seconds"] > 0
    assert "operators" not in json.loads(file.read_text())["rows"][0]
    assert CliRunner().invoke(cli, words).exit_code == 0 and "operators" not in json.loads(file.read_text())
