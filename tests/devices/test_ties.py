"""Quantised models whose codes differ at rounding ties: `compare` reports the ties and does not mistake faults for ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.cli.main import cli
from rammer.errors import Mismatch
from rammer.frontend.read.reader import read_model
from rammer.reference.outputs import run_onnxruntime
from rammer.reference.rounding_ties import NEAR, Ties, find_coded_tensors, judge_ties
from rammer.report.output_errors import compare_outputs

TOLERANCE = (1e-4, 1e-5)
LAYERS, CHANNELS, SIDE = 4, 16, 12


def network(rng: np.random.Generator, operators: str = "qdq") -> onnx.ModelProto:
    """Return convolutions between codes. With these scales one sum of twenty is a tie in decimals, so the last bit of a float32
    sum decides."""
    nodes, known = [], dict[str, Any]()

    def scaled(name: str, value: float) -> None:
        known[name], known[f"{name}_zero"] = np.float32(value), np.uint8(128)

    scaled("s0", 0.1)
    nodes.append(helper.make_node("QuantizeLinear", ["x", "s0", "s0_zero"], ["q0"]))
    for i in range(LAYERS):
        known[f"w{i}"] = rng.integers(-6, 7, (CHANNELS, CHANNELS, 3, 3)).astype(np.int8)
        known[f"ws{i}"], known[f"wz{i}"] = np.float32(0.05), np.int8(0)
        scaled(f"s{i + 1}", 0.1)
        pads: dict[str, Any] = {"pads": [1, 1, 1, 1]}
        if operators == "qdq":
            nodes += [
                helper.make_node("DequantizeLinear", [f"q{i}", f"s{i}", f"s{i}_zero"], [f"f{i}"]),
                helper.make_node("DequantizeLinear", [f"w{i}", f"ws{i}", f"wz{i}"], [f"v{i}"]),
                helper.make_node("Conv", [f"f{i}", f"v{i}"], [f"c{i}"], **pads),
                helper.make_node("QuantizeLinear", [f"c{i}", f"s{i + 1}", f"s{i + 1}_zero"], [f"q{i + 1}"]),
            ]
        else:
            operands = [f"q{i}", f"s{i}", f"s{i}_zero", f"w{i}", f"ws{i}", f"wz{i}", f"s{i + 1}", f"s{i + 1}_zero"]
            nodes.append(helper.make_node("QLinearConv", operands, [f"q{i + 1}"], **pads))
    nodes.append(helper.make_node("DequantizeLinear", [f"q{LAYERS}", f"s{LAYERS}", f"s{LAYERS}_zero"], ["y"]))
    shape = [1, CHANNELS, SIDE, SIDE]
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, shape)] for n in "xy"]
    constants = [numpy_helper.from_array(np.asarray(v), n) for n, v in known.items()]
    graph = helper.make_graph(nodes, "network", *ports, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def spoiled(proto: onnx.ModelProto, name: str, change: Callable[[Any], Any]) -> onnx.ModelProto:
    """Return the model with one constant changed."""
    result = onnx.ModelProto.FromString(proto.SerializeToString())
    tensor = next(t for t in result.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(numpy_helper.to_array(tensor))), name))
    return result


def found(proto: onnx.ModelProto, feeds: dict[str, Any], device: str, fault: Callable[[Any], Any] = lambda p: p) -> Ties:
    """Return the verdict on a device that computes ``fault`` of the model instead of the model."""

    def run(model: onnx.ModelProto) -> dict[str, Any]:
        exe = rammer.compile(fault(model), device)
        outputs = exe.run(feeds)
        exe.close()
        return outputs

    ties = judge_ties(proto, feeds, run(proto), run, TOLERANCE)
    assert ties is not None
    return ties


def fed(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.standard_normal((1, CHANNELS, SIDE, SIDE)).astype(np.float32) * 3}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_codes_part_at_ties_and_nowhere_else(device: str, rng: np.random.Generator) -> None:
    proto, feeds = network(rng), fed(rng)
    exe = rammer.compile(proto, device)
    outputs = exe.run(feeds)
    exe.close()
    (plain,) = compare_outputs(outputs, run_onnxruntime(read_model(proto), feeds), *TOLERANCE)
    ties = found(proto, feeds, device)
    assert ties.good and ties.tensors == LAYERS + 1 == len(find_coded_tensors(proto)) and ties.farthest <= NEAR, str(ties)
    assert ties.differing and not plain.good, "a network that does not show what it is for"


@pytest.mark.slow
def test_products_of_codes_are_judged_by_what_they_stand_for(rng: np.random.Generator) -> None:
    proto, feeds = network(rng, "qlinear"), fed(rng)
    assert found(proto, feeds, "rocm").good


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a zero point": ("s2_zero", lambda z: z + np.uint8(1)),
    "a scale by a hundredth": ("s2", lambda s: s * np.float32(1.01)),
    "the first scale by a hundredth": ("s0", lambda s: s * np.float32(1.01)),
    "a scale of weights by a hundredth": ("ws1", lambda s: s * np.float32(1.01)),
    "two channels swapped": ("w2", lambda w: w[[1, 0, *range(2, CHANNELS)]]),
    "one weight": ("w3", lambda w: np.where(np.arange(w.size).reshape(w.shape) == 100, w + 1, w).astype(np.int8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("operators", ["qdq", "qlinear"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_no_tie(fault: str, operators: str, rng: np.random.Generator) -> None:
    name, change = FAULTS[fault]
    ties = found(network(rng, operators), fed(rng), "toy", lambda p: spoiled(p, name, change))
    assert not ties.good, str(ties)


def test_a_fault_of_the_whole_program_alone_is_no_tie(rng: np.random.Generator) -> None:
    """Check a fault that disappears if codes are also outputs."""
    proto, feeds = network(rng), fed(rng)
    runs = iter([spoiled(proto, "w3", lambda w: np.roll(w, 1, 0)), None])

    def fault(model: onnx.ModelProto) -> onnx.ModelProto:
        return next(runs) or model

    ties = found(proto, feeds, "toy", fault)
    assert not ties.good and "if codes are also outputs" in str(ties)


def test_the_command(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    file, proto = tmp_path / "network.onnx", network(rng)
    onnx.save(proto, file)
    said = CliRunner().invoke(cli, ["compare", str(file), "--device", "rocm", "--range", "x:-9..9", "--rtol", "0", "--atol", "0"])
    assert said.exit_code == 0, said.output
    assert "MISMATCH" not in said.output and ("ok (but for ties)" not in said.output or "from a tie" in said.output)
    bad = Ties(5, 100, 0, 0.0, ("3 of 'q2' (QuantizeLinear), by 2, 0.3 codes from a tie",))
    monkeypatch.setattr("rammer.cli.compare._explain_ties", lambda *args: bad)
    other = spoiled(proto, "w3", lambda w: np.roll(w, 1, 0))
    monkeypatch.setattr("rammer.reference.outputs.run_onnxruntime", lambda model, feeds: rammer.compile(other, "toy").run(feeds))
    said = CliRunner().invoke(cli, ["compare", str(file), "--device", "toy", "--range", "x:-9..9"])
    assert isinstance(said.exception, Mismatch) and "no tie: 3 of 'q2'" in said.output
