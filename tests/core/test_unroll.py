"""Loops with known trip counts: they become one program with equal results."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_models import BOOL, INT64, model, tensor
from test_control import graph, node
from test_later import agree, fed

import rammer
from rammer.errors import BadInput
from rammer.frontend.bind.bind_state import Scope
from rammer.frontend.bind.binder import Binder, bind, bind_until
from rammer.frontend.loops import unrolling
from rammer.frontend.read.reader import read_model


def whole(number: int) -> onnx.NodeProto:
    return node("Constant", [], [f"n{number}"], value=helper.make_tensor("", INT64, [], [number]))


def one_program(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> None:
    """Check that the model is one program without host operators, with ONNX Runtime's results."""
    exe = rammer.compile(proto, "toy")
    agree(proto, exe, inputs)
    (special,) = exe.cache.values()
    assert (len(special.compiled.programs), exe.hosted) == (1, [])
    exe.close()


def loop(trips: int, go: onnx.NodeProto) -> onnx.ModelProto:
    """Return a Loop that adds the iteration number and multiplies by an outer value. The result is the state; a scan output holds
    twice the state of each iteration."""
    body = [
        node("Cast", ["i"], ["f"], to=1),
        node("Add", ["s", "f"], ["t"]),
        node("Mul", ["t", "w"], ["s_next"]),
        node("Add", ["s_next", "s_next"], ["row"]),
        go,
    ]
    ends = [tensor("go", [], BOOL), tensor("s_next", [2, 3]), tensor("row", [2, 3])]
    inner = graph(body, [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [2, 3])], ends)
    nodes = [whole(trips), node("Loop", [f"n{trips}", "", "x"], ["last", "rows"], body=inner)]
    return model(nodes, [tensor("x", [2, 3]), tensor("w", [3])], ["last", "rows"])


@pytest.mark.parametrize("trips", [1, 4])
def test_a_loop_of_known_steps(trips: int, rng: np.random.Generator) -> None:
    one_program(loop(trips, node("Identity", ["c"], ["go"])), {"x": fed(rng, 2, 3), "w": fed(rng, 3)})


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("known", [True, False])
def test_numbers_of_any_rank(known: bool, rank: int, rng: np.random.Generator) -> None:
    """Check trip counts and conditions that are tensors of one element, as PaddlePaddle's exporter writes them."""
    shape = [1] * rank
    ends = [tensor("go", shape, BOOL), tensor("t", [2, 3])]
    body = graph(
        [node("Identity", ["c"], ["go"]), node("Add", ["s", "s"], ["t"])],
        [tensor("i", [], INT64), tensor("c", shape, BOOL), tensor("s", [2, 3])],
        ends,
    )
    branches = [graph([node(op, ["last"], [f"{op}_last"])], [], [tensor(f"{op}_last", [2, 3])]) for op in ("Neg", "Abs")]
    nodes = [
        node("Loop", ["trips", "going", "x"], ["last"], body=body),
        node("If", ["asked"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    numbers = {"trips": np.full(shape, 3), "going": np.full(shape, True), "asked": np.full(shape, bool(rng.integers(2)))}
    x = {"x": fed(rng, 2, 3)}
    ports = [tensor("x", [2, 3]), tensor("trips", shape, INT64), tensor("going", shape, BOOL), tensor("asked", shape, BOOL)]
    if known:
        nodes[:0] = [node("Constant", [], [n], value=numpy_helper.from_array(v)) for n, v in numbers.items()]
        one_program(model(nodes, ports[:1], ["y"]), x)
        return
    proto = model(nodes, ports, ["y"])
    exe = rammer.compile(proto, "toy")
    agree(proto, exe, x | numbers)
    exe.close()


def test_a_condition_that_the_step_decides(rng: np.random.Generator) -> None:
    proto = loop(9, node("Less", ["i", "n2"], ["go"]))
    proto.graph.node.insert(0, whole(2))
    bound = bind(read_model(proto), {})
    assert [n.op for n in bound.nodes].count("Mul") == 3
    one_program(proto, {"x": fed(rng, 2, 3), "w": fed(rng, 3)})


@pytest.mark.parametrize("why", ["condition", "length", "host"])
def test_what_stays_a_loop(why: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a condition on data, more operators than the limit, and a body with an operator without an expression."""
    proto = loop(4, node("Identity", ["c"], ["go"]))
    if why == "condition":
        body = next(a.g for a in proto.graph.node[1].attribute if a.name == "body")
        body.node[-1].CopyFrom(node("Less", ["total", "big"], ["go"]))
        body.node.insert(4, node("ReduceSum", ["s_next"], ["total"], keepdims=0))
        body.node.insert(4, node("Constant", [], ["big"], value_float=1e9))
    elif why == "length":
        monkeypatch.setattr(unrolling, "MOST_UNROLLED", 19)
    else:
        body = next(a.g for a in proto.graph.node[1].attribute if a.name == "body")
        body.node[0].CopyFrom(node("Unique", ["s"], ["z"]))
        body.node.insert(1, node("ReduceMax", ["z"], ["f"], keepdims=0))
    bound, rest = bind_until(read_model(proto), {})
    first = rest.first if rest is not None else ()
    assert (rest is None) == (why != "condition") and [n.op for n in (*bound.nodes, *first)] == ["Loop"]
    inputs = {"x": fed(rng, 2, 3), "w": fed(rng, 3)}
    agree(proto, rammer.compile(proto, "toy"), inputs)


@pytest.mark.parametrize(("axis", "back", "out", "turned"), [(0, 0, 0, 0), (1, 1, 1, 1), (-1, 0, -1, 1), (0, 1, 1, 0)])
def test_a_scan(axis: int, back: int, out: int, turned: int, rng: np.random.Generator) -> None:
    shape = [2, 3]
    shape.insert(axis if axis >= 0 else 3 + axis, 4)
    body = graph(
        [node("Add", ["s", "a"], ["t"]), node("Tanh", ["t"], ["s_next"]), node("Sub", ["s", "a"], ["row"])],
        [tensor("s", [2, 3]), tensor("a", [2, 3])],
        [tensor("s_next", [2, 3]), tensor("row", [2, 3])],
    )
    ways = {"scan_input_axes": [axis], "scan_input_directions": [back]}
    ways |= {"scan_output_axes": [out], "scan_output_directions": [turned]}
    nodes = [node("Scan", ["x", "xs"], ["last", "rows"], num_scan_inputs=1, body=body, **ways)]
    one_program(
        model(nodes, [tensor("x", [2, 3]), tensor("xs", shape)], ["last", "rows"]), {"x": fed(rng, 2, 3), "xs": fed(rng, *shape)}
    )


@pytest.mark.parametrize(("batch", "back"), [(1, 0), (3, 0), (2, 1)])
def test_a_scan_with_a_batch(batch: int, back: int, rng: np.random.Generator) -> None:
    """Check opset 8: every operand has a batch axis before the scan axis, and rows come in scan order."""
    ends = [tensor("s_next", [3]), tensor("row", [3])]
    steps = [node("Mul", ["s", "a"], ["t"]), node("Tanh", ["t"], ["s_next"]), node("Sub", ["s", "a"], ["row"])]
    body = graph(steps, [tensor("s", [3]), tensor("a", [3])], ends)
    nodes = [node("Scan", ["", "x", "xs"], ["last", "rows"], num_scan_inputs=1, body=body, directions=[back])]
    proto = model(nodes, [tensor("x", [batch, 3]), tensor("xs", [batch, 4, 3])], ["last", "rows"])
    del proto.opset_import[:]
    proto.opset_import.append(helper.make_opsetid("", 8))
    one_program(proto, {"x": fed(rng, batch, 3), "xs": fed(rng, batch, 4, 3)})
    proto.graph.node[0].input[0] = "lengths"
    proto.graph.input.append(tensor("lengths", [batch], INT64))
    with pytest.raises(BadInput, match="sequence_lens"):
        rammer.compile(proto, "toy")


def test_loops_in_loops(rng: np.random.Generator) -> None:
    deep = graph(
        [node("Mul", ["u", "w"], ["u_next"]), node("Identity", ["d"], ["on"])],
        [tensor("j", [], INT64), tensor("d", [], BOOL), tensor("u", [3])],
        [tensor("on", [], BOOL), tensor("u_next", [3])],
    )
    body = graph(
        [node("Loop", ["n2", "", "s"], ["t"], body=deep), node("Add", ["t", "w"], ["s_next"]), node("Identity", ["c"], ["go"])],
        [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [3])],
        [tensor("go", [], BOOL), tensor("s_next", [3])],
    )
    nodes = [whole(2), whole(3), node("Loop", ["n3", "", "x"], ["last"], body=body)]
    one_program(model(nodes, [tensor("x", [3]), tensor("w", [3])], ["last"]), {"x": fed(rng, 3), "w": fed(rng, 3)})


def test_a_body_that_does_not_fit_is_bad_input(rng: np.random.Generator) -> None:
    proto = loop(3, node("Identity", ["c"], ["go"]))
    body = next(a.g for a in proto.graph.node[1].attribute if a.name == "body")
    del body.input[2]
    with pytest.raises(BadInput):
        rammer.compile(proto, "toy").run({"x": fed(rng, 2, 3), "w": fed(rng, 3)})


def nest(kind: str, depth: int) -> onnx.ModelProto:
    """Return nested loops of ten iterations each. Their trip counts are constants, sums of constants, or lengths of scans."""
    inner, result = [node("Add", ["s0", "s0"], ["r0"])], "r0"
    for level in range(depth):
        s, r = f"s{level}", f"r{level + 1}"
        outside = f"s{level + 1}" if level + 1 < depth else "x"
        if kind == "scan":
            body = graph(inner, [tensor(s, [2, 3]), tensor(f"e{level}", [])], [tensor(result, [2, 3])])
            inner = [node("Scan", [outside, "row"], [r], body=body, num_scan_inputs=1)]
        else:
            ports = [tensor(f"i{level}", [], INT64), tensor(f"c{level}", [], BOOL), tensor(s, [2, 3])]
            go = node("Identity", [f"c{level}"], [f"g{level}"])
            body = graph([go, *inner], ports, [tensor(f"g{level}", [], BOOL), tensor(result, [2, 3])])
            count = f"n{level}" if kind == "computed" else "ten"
            inner = [node("Add", ["five", "five"], [count])] if kind == "computed" else []
            inner.append(node("Loop", [count, "", outside], [r], body=body))
        result = r
    known = {"ten": np.array(10), "five": np.array(5), "row": np.ones(10, np.float32)}
    return model(inner, [tensor("x", [2, 3])], [result], constants=known)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["constant", "computed", "scan"])
@pytest.mark.parametrize("depth", [2, 8])
def test_work_on_loops_in_loops_is_bounded(kind: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the whole nest is one program or stays a loop; a factor of ten for each level would not end."""
    steps, real = 0, Binder.step

    def step(walk: Binder, proto: onnx.NodeProto, scope: Scope) -> None:
        nonlocal steps
        steps += 1
        assert steps < 3 * unrolling.MOST_UNROLLED
        real(walk, proto, scope)

    monkeypatch.setattr(Binder, "step", step)
    made, rest = bind_until(read_model(nest(kind, depth)), {})
    assert (rest is None and {n.op for n in made.nodes} == {"Add", "Identity"}) == (depth == 2)
    assert kind != "constant" or depth == 2 or steps < 10  # computed from the trip counts before any body is walked


@pytest.mark.slow
def test_a_loop_of_loops_runs_in_parts(rng: np.random.Generator) -> None:
    proto, x = nest("constant", 4), np.ones((2, 3), np.float32)
    exe = rammer.compile(proto, "toy")
    assert np.isinf(exe.run({"x": x})[proto.graph.output[0].name]).all() and exe.hosted
    assert np.array_equal(exe.run({"x": 0 * x})[proto.graph.output[0].name], 0 * x)
