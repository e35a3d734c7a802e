"""Long Scans and Loops of a model as loop programs: chunks of many steps, on devices that support them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import rammer
from rammer.compiled.segments import Compiled
from rammer.frontend.loops.loop_chunk import MOST_STEPS
from rammer.ir.program import RProgram
from rammer.passes.loops.chunk_loop import LEAST_STEPS
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

DEVICES = ["ipu_sim", "rocm", "toy", pytest.param("cuda", marks=pytest.mark.cuda)]
OPTIONS = {"ipu_sim": {"tiles": "16"}}
FLOAT, INT, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL


def port(name: str, *shape: int | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def model(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[str], **known: np.ndarray
) -> onnx.ModelProto:
    results = [helper.make_tensor_value_info(n, FLOAT, None) for n in outputs]
    graph = helper.make_graph(nodes, "net", inputs, results, [numpy_helper.from_array(a, n) for n, a in known.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def scan(steps: int, rng: np.random.Generator, ways: tuple[int, int, int]) -> onnx.ModelProto:
    """Return a Scan with two states, slices from either side, and an outer value that is an input."""
    lines = [("Mul", "s", "k", "a"), ("Add", "a", "x_t", "b"), ("Tanh", "b", "s_next"), ("Sub", "c", "z_t", "d")]
    lines += [("Mul", "d", "half", "c_next"), ("Add", "s_next", "c_next", "o")]
    made = [helper.make_node(op, names[:-1], [names[-1]]) for op, *names in lines]
    body = helper.make_graph(
        made, "body", [port(n, 3) for n in ("s", "c", "x_t", "z_t")], [port(n, 3) for n in ("s_next", "c_next", "o")]
    )
    more = {"scan_input_directions": list(ways[:2]), "scan_output_directions": [ways[2]]}
    node = helper.make_node("Scan", ["h", "g", "x", "z"], ["last", "end", "all"], body=body, num_scan_inputs=2, **more)
    shown = helper.make_node("Mul", ["all", "k"], ["y"])
    inputs = [port("h", 3), port("g", 3), port("x", steps, 3), port("z", steps, 3), port("k", 3)]
    return model([node, shown], inputs, ["last", "end", "y"], half=rng.standard_normal(3).astype(np.float32) / 2)


def loop(trips: int, condition: str, shown: bool) -> onnx.ModelProto:
    """Return a Loop whose state depends on the index; ``condition`` is that of the next iteration."""
    made = [helper.make_node("Cast", ["i"], ["f"], to=FLOAT), helper.make_node("Mul", ["s", "w"], ["a"])]
    made += [helper.make_node("Sin", ["f"], ["t"]), helper.make_node("Add", ["a", "t"], ["s_next"])]
    made += [helper.make_node("Identity", [condition], ["go"]), helper.make_node("Neg", ["s_next"], ["o"])]
    known = [numpy_helper.from_array(np.array(True), "yes"), numpy_helper.from_array(np.array(False), "no")]
    outputs = [port("go", kind=BOOL), port("s_next", 2), *([port("o", 2)] if shown else [])]
    body = helper.make_graph(made, "body", [port("i", kind=INT), port("c", kind=BOOL), port("s", 2)], outputs, known)
    results = ["last", *(["all"] if shown else [])]
    node = helper.make_node("Loop", ["trips", "", "x"], results, body=body)
    return model([node], [port("x", 2), port("w", 2)], results, trips=np.array(trips))


def agree(proto: onnx.ModelProto, device: str, rng: np.random.Generator) -> Compiled:
    """Compare two runs with ONNX Runtime, and return the compiled model."""
    exe = rammer.compile(proto, device, options=OPTIONS.get(device))
    session = PeerSession(proto)
    for _ in range(2):
        inputs = {i.name: rng.uniform(-0.9, 0.9, i.shape).astype(np.float32) for i in session.get_inputs()}
        found = exe.run(inputs)
        for output, want in zip(session.get_outputs(), session.run(None, inputs), strict=True):
            np.testing.assert_allclose(found[output.name], want, atol=1e-5, err_msg=output.name)
    (special,) = exe.cache.values()
    exe.close()
    return special.compiled


def turns(compiled: Compiled) -> list[RProgram]:
    return [p for p in compiled.programs if p.repeat is not None]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_scans_take_many_steps_in_a_turn(device: str, rng: np.random.Generator) -> None:
    ways = tuple(int(n) for n in rng.integers(0, 2, 3))
    steps = int(rng.choice([400, 480, 1024]))
    found = agree(scan(steps, rng, ways), device, rng)
    if device == "toy":
        assert found.host_nodes
        return
    (program,) = turns(found)
    assert LEAST_STEPS <= steps // program.repeat.count <= MOST_STEPS and not found.host_nodes


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("condition", "shown"), [("c", True), ("yes", False)])
def test_loops_whose_trips_are_known_are_scans_of_indices(
    device: str, condition: str, shown: bool, rng: np.random.Generator
) -> None:
    found = agree(loop(300, condition, shown), device, rng)
    assert bool(turns(found)) == (device != "toy") == (not found.host_nodes)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm"])
def test_what_is_no_turns_runs_as_before(device: str, rng: np.random.Generator) -> None:
    """Check a condition that fails at once, and a number of steps without a suitable divisor."""
    assert not turns(agree(loop(300, "no", False), device, rng))
    assert not turns(agree(scan(509, rng, (0, 0, 0)), device, rng))


def test_a_loop_that_hardly_ends_is_watched_by_the_host() -> None:
    """Check this because a repeating program cannot be interrupted on the device."""
    exe = rammer.compile(loop(1 << 40, "c", False), "rocm")
    assert not turns(exe.compile_only({}))
    exe.close()


@pytest.mark.slow
def test_turns_of_loops_are_kept_with_the_model(rng: np.random.Generator) -> None:
    """Check that they are part of its program, so another process compiles nothing."""
    compiled = agree(loop(300, "c", True), "rocm", rng)
    assert [type(s).__name__ for s in some(compiled.segments)] == ["ProgramSegment"] * len(compiled.segments)
