"""Control flow: driven from the host, bodies of fixed shape on the device, results equal to ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import BOOL, FLOAT, INT64, model, tensor
from test_later import agree, fed

import rammer
from rammer.jit.control_flow import MOST_FORMS

node = helper.make_node


def graph(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any]) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", inputs, outputs)


def loop_of(body: list[onnx.NodeProto], outputs: list[str], scanned: list[tuple[str, list[int]]]) -> onnx.ModelProto:
    """Make a Loop over ``s`` (3 elements) with ``trips`` and a captured ``w``."""
    inputs = [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [3])]
    ends = [tensor("go", [], BOOL), tensor("s_next", [3]), *(tensor(n, shape) for n, shape in scanned)]
    made = node("Loop", ["trips", "", "x"], outputs, body=graph(body, inputs, ends))
    relu = [node("Exp", [outputs[0]], ["y"])]
    ports = [tensor("trips", [], INT64), tensor("x", [3]), tensor("w", [3])]
    return model([made, *relu], ports, ["y", *outputs[1:]])


GOING = node("Less", ["i", "most"], ["go"])
STEP = [
    node("Constant", [], ["most"], value_int=7),
    node("Mul", ["s", "w"], ["sw"]),
    node("Tanh", ["sw"], ["t"]),
    node("Add", ["t", "s"], ["s_next"]),
    node("ReduceSum", ["s_next"], ["total"], keepdims=0),
    GOING,
]


def test_a_loop_whose_body_is_compiled_once(rng: np.random.Generator) -> None:
    proto = loop_of(STEP, ["last", "all"], [("total", [])])
    exe = rammer.compile(proto, "toy")
    for trips in (1, 5, 20, 5):  # the condition ends the loop after nine iterations
        agree(proto, exe, {"trips": np.array(trips), "x": fed(rng, 3), "w": fed(rng, 3)})
    assert len(exe.bodies.residents.held) == 1 and not exe.bodies.on_host and not exe.hosted
    exe.close()
    assert not exe.bodies.residents.held


def test_no_steps(rng: np.random.Generator) -> None:
    proto = loop_of(STEP, ["last", "all"], [("total", [])])
    found = rammer.compile(proto, "toy").run({"trips": np.array(0), "x": (x := fed(rng, 3)), "w": fed(rng, 3)})
    np.testing.assert_allclose(found["y"], np.exp(x), rtol=1e-5)
    assert found["all"].shape == (0,)


def test_what_grows_is_interpreted(rng: np.random.Generator) -> None:
    """Check a state that grows in every iteration: the host computes it after a few compiled shapes."""
    body = [node("Concat", ["s", "x"], ["s_next"], axis=0), node("Identity", ["c"], ["go"])]
    inputs = [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [None])]
    ends = [tensor("go", [], BOOL), tensor("s_next", [None])]
    nodes = [node("Loop", ["trips", "", "x"], ["last"], body=graph(body, inputs, ends)), node("Neg", ["last"], ["y"])]
    proto = model(nodes, [tensor("trips", [], INT64), tensor("x", [2])], ["y"])
    exe = rammer.compile(proto, "toy")
    for trips in (2, 12):
        agree(proto, exe, {"trips": np.array(trips), "x": fed(rng, 2)})
    assert exe.bodies.on_host and len(exe.bodies.residents.held) <= MOST_FORMS and exe.hosted == ["Loop"]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("back", [0, 1])
def test_scans(axis: int, back: int, rng: np.random.Generator) -> None:
    body = [node("Add", ["s", "e"], ["n"]), node("Mul", ["n", "n"], ["o"]), node("Identity", ["n"], ["m"])]
    ends = [tensor("m", [4]), tensor("o", [4])]
    attributes = {"scan_input_axes": [axis], "scan_input_directions": [back], "scan_output_axes": [-axis if axis > 0 else axis]}
    scan = node(
        "Scan",
        ["x", "xs"],
        ["last", "all"],
        body=graph(body, [tensor("s", [4]), tensor("e", [4])], ends),
        num_scan_inputs=1,
        scan_output_directions=[1 - back],
        **attributes,
    )
    shape = [5, 4] if axis == 0 else [4, 5]
    proto = model([scan], [tensor("x", [4]), tensor("xs", shape)], ["last", "all"])
    exe = rammer.compile(proto, "toy")
    agree(proto, exe, {"x": fed(rng, 4), "xs": fed(rng, *shape)})
    assert not exe.hosted


def test_branches_that_capture(rng: np.random.Generator) -> None:
    """Check two branches of different shapes, one with a Loop inside; later operators are compiled for the executed branch."""
    step = [node("Add", ["s", "x"], ["s2"]), node("Identity", ["c"], ["c2"])]
    inner = graph(
        step,
        [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [3])],
        [tensor("c2", [], BOOL), tensor("s2", [3])],
    )
    then = graph([node("Loop", ["three", "", "x"], ["a"], body=inner)], [], [tensor("a", [3])])
    other = graph([node("Concat", ["x", "x"], ["b"], axis=0)], [], [tensor("b", [6])])
    nodes = [
        node("ReduceSum", ["x"], ["total"], keepdims=0),
        node("Greater", ["total", "zero"], ["up"]),
        node("If", ["up"], ["z"], then_branch=then, else_branch=other),
        node("Softmax", ["z"], ["y"], axis=0),
    ]
    constants = {"zero": np.array(0, np.float32), "three": np.array(3)}
    proto = model(nodes, [tensor("x", [3])], ["y"], constants=constants)
    exe = rammer.compile(proto, "toy")
    for sign in (1, -1, 1):
        agree(proto, exe, {"x": sign * (1 + np.abs(fed(rng, 3)))})


def test_a_condition_that_never_holds(rng: np.random.Generator) -> None:
    proto = loop_of([*STEP[:-1], node("Greater", ["i", "most"], ["go"])], ["last", "all"], [("total", [])])
    agree(proto, rammer.compile(proto, "toy"), {"trips": np.array(9), "x": fed(rng, 3), "w": fed(rng, 3)})


def test_half_precision_states(rng: np.random.Generator) -> None:
    body = [node("Cast", ["s"], ["f"], to=FLOAT), node("Sin", ["f"], ["g"]), node("Cast", ["g"], ["n"], to=TensorProto.FLOAT16)]
    body += [node("Identity", ["c"], ["go"])]
    half = TensorProto.FLOAT16
    inputs = [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [2], half)]
    loop = node("Loop", ["trips", "", "x"], ["y"], body=graph(body, inputs, [tensor("go", [], BOOL), tensor("n", [2], half)]))
    proto = model([loop], [tensor("trips", [], INT64), tensor("x", [2], half)], ["y"])
    x = fed(rng, 2).astype(np.float16)
    found = rammer.compile(proto, "toy").run({"trips": np.array(4), "x": x})["y"]
    for _ in range(4):
        x = np.sin(x.astype(np.float32)).astype(np.float16)
    np.testing.assert_allclose(found.astype(np.float64), x.astype(np.float64), rtol=2e-3)
