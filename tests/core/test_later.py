"""Models whose shapes depend on run-time values: compiled in parts, for the values of a run."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx_models import BOOL, FLOAT, INT64, model, tensor

import rammer
from rammer.errors import BadInput, DeviceFailure
from rammer.frontend.bind.binder import bind
from rammer.frontend.bind.deferred import Unknown
from rammer.frontend.read.reader import read_model
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

node = helper.make_node
Feeds = dict[str, np.ndarray]


def agree(proto: onnx.ModelProto, exe: Any, feeds: Feeds) -> None:
    """Check against ONNX Runtime: equal names, types and shapes, and values within float32 tolerance."""
    session = PeerSession(proto)
    names = [o.name for o in session.get_outputs()]
    wanted, found = dict(zip(names, session.run(names, feeds), strict=True)), exe.run(feeds)
    assert list(found) == names
    for name, want in some(wanted.items()):
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-6, err_msg=name)


def fed(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def chosen() -> onnx.ModelProto:
    """Make a selection of rows by a mask, multiplied by a matrix, and the number of rows."""
    nodes = [
        node("Greater", ["m", "zero"], ["on"], name="greater"),
        node("NonZero", ["on"], ["at"], name="nonzero"),
        node("Squeeze", ["at", "first"], ["rows"], name="squeeze"),
        node("Gather", ["x", "rows"], ["part"], name="gather"),
        node("MatMul", ["part", "w"], ["product"], name="matmul"),
        node("Softmax", ["product"], ["y"], name="softmax", axis=-1),
        node("Shape", ["part"], ["count"], name="shape"),
        node("Relu", ["m"], ["positive"], name="relu"),
    ]
    weight = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    constants = {"zero": np.zeros(1, np.float32), "first": np.zeros(1, np.int64), "w": weight}
    return model(nodes, [tensor("x", ["n", 3]), tensor("m", ["n"])], ["y", "count", "positive"], constants=constants)


def test_rows_that_a_mask_chooses(rng: np.random.Generator) -> None:
    proto = chosen()
    exe = rammer.compile(proto, "toy")
    for count in (7, 1, 7, 0):
        mask = fed(rng, 7)
        mask[np.argsort(mask)[: 7 - count]] = -1
        mask[np.argsort(mask)[7 - count :]] = 2
        agree(proto, exe, {"x": fed(rng, 7, 3), "m": mask})
    (special,) = exe.cache.values()
    assert "NonZero" in str(special.host_nodes[0])
    # Three distinct counts give three programs; each serves its count again.
    assert len(special.following.residents.held) == 3


def reshaped(*, by: str = "shape") -> onnx.ModelProto:
    nodes = [node("Exp", ["x"], ["e"], name="exp"), node("Reshape", ["e", by], ["r"], name="reshape")]
    nodes += [node("ReduceSum", ["r", "last"], ["y"], name="sum", keepdims=0)]
    inputs = [tensor("x", [4, 6]), tensor("shape", ["rank"], INT64)]
    return model(nodes, inputs, ["y"], constants={"last": np.array([-1])})


def test_a_target_that_is_an_input(rng: np.random.Generator) -> None:
    proto = reshaped()
    exe = rammer.compile(proto, "toy")
    for shape in ([24], [2, 12], [2, 3, 4], [-1, 8], [3, 8], [2, 12], [0, 6]):
        agree(proto, exe, {"x": fed(rng, 4, 6), "shape": np.array(shape)})
    assert sum(len(s.following.residents.held) for s in exe.cache.values()) == 6


def test_what_decides_is_computed(rng: np.random.Generator) -> None:
    """Check bounds of a Slice that depend on inputs, and a third part that depends on the second."""
    nodes = [
        node("Mul", ["k", "two"], ["end"], name="mul"),
        node("Slice", ["x", "start", "end"], ["s"], name="slice"),
        node("ReduceMax", ["s"], ["top"], name="max", keepdims=0),
        node("Cast", ["top"], ["i"], name="cast", to=INT64),
        node("Abs", ["i"], ["n"], name="abs"),
        node("Range", ["nought", "n", "one"], ["r"], name="range"),
        node("Unsqueeze", ["r", "first"], ["u"], name="unsqueeze"),
        node("Tile", ["u", "end2"], ["y"], name="tile"),
        node("Concat", ["end", "one1"], ["end2"], name="concat", axis=0),
    ]
    constants: dict[str, np.ndarray] = {"two": np.array([2]), "start": np.array([0]), "one1": np.array([1])}
    constants |= {"nought": np.array(0), "one": np.array(1), "first": np.array([0])}
    proto = model(nodes, [tensor("x", [9]), tensor("k", [1], INT64)], ["y", "s", "k"], constants=constants)
    exe = rammer.compile(proto, "toy")
    for k in (1, 3, 4):
        agree(proto, exe, {"x": 5 * fed(rng, 9), "k": np.array([k])})


def test_outputs_that_nothing_computes(rng: np.random.Generator) -> None:
    """Check outputs that are an input, a constant, an earlier result or a host result, together with later parts."""
    nodes = [
        node("Neg", ["x"], ["n"], name="neg"),
        node("NonZero", ["x"], ["z"], name="nonzero"),
        node("Cast", ["z"], ["f"], name="cast", to=FLOAT),
    ]
    proto = model(nodes, [tensor("x", [2, 3])], ["x", "c", "n", "z", "f"], constants={"c": np.arange(3.0)})
    for output, kind in zip(proto.graph.output, (FLOAT, TensorProto.DOUBLE, FLOAT, INT64, FLOAT), strict=True):
        output.type.tensor_type.elem_type = kind
    exe = rammer.compile(proto, "toy")
    x = fed(rng, 2, 3)
    agree(proto, exe, {"x": x})
    found = exe.run({"x": x})
    for name in ("x", "c", "z"):
        found[name][...] = 0  # the caller owns these arrays
    agree(proto, exe, {"x": x})


@settings(max_examples=12)
@given(st.lists(st.sampled_from(["slice", "nonzero", "tile", "reshape", "relu", "sum"]), min_size=1, max_size=6), st.data())
def test_chains(kinds: list[str], data: st.DataObject) -> None:
    """Check any chain of operators with and without run-time shapes."""
    nodes, at = list[onnx.NodeProto](), "x"
    feeds: Feeds = {"x": np.arange(-4, 8, dtype=np.float32) / 2}  # all sums are exact, so rounding does not matter
    constants: dict[str, np.ndarray] = {"zero": np.zeros(1, np.int64), "all": np.array([-1])}
    for number, kind in enumerate(kinds):
        to, k = f"v{number}", f"k{number}"
        if kind in ("slice", "tile", "reshape"):
            feeds[k] = np.array([{"reshape": -1, "tile": 2}.get(kind, data.draw(st.integers(1, 5)))])
        nodes += {
            "slice": [node("Slice", [at, "zero", k], [to])],
            "tile": [node("Tile", [at, k], [to])],
            "reshape": [node("Reshape", [at, k], [to])],
            "relu": [node("Relu", [at], [to])],
            "sum": [node("CumSum", [at, "axis"], [to])],
            "nonzero": [
                node("NonZero", [at], [f"{to}i"]),
                node("Reshape", [f"{to}i", "all"], [f"{to}j"]),
                node("Gather", [at, f"{to}j"], [to]),
            ],
        }[kind]
        at = to
    constants["axis"] = np.array(0)
    inputs = [tensor("x", [12]), *(tensor(n, [1], INT64) for n in feeds if n != "x")]
    proto = model(nodes, inputs, [at], constants=constants)
    agree(proto, rammer.compile(proto, "toy"), feeds)


def test_programs_for_values_are_bounded(rng: np.random.Generator) -> None:
    exe = rammer.compile(reshaped(), "toy", resident=2)
    for rows in (1, 2, 3, 4, 6, 8):
        exe.run({"x": fed(rng, 4, 6), "shape": np.array([rows, 24 // rows])})
    (special,) = exe.cache.values()
    held = special.following.residents.held
    assert len(held) == 2 and not any(s.closed for s in held.values())
    exe.close()
    assert not held
    with pytest.raises(DeviceFailure, match="was closed"):
        exe.run({"x": fed(rng, 4, 6), "shape": np.array([24])})


def test_threads_with_other_values(rng: np.random.Generator) -> None:
    exe, x, wrong = rammer.compile(reshaped(), "toy", resident=2), fed(rng, 4, 6), list[str]()

    def runs(rows: int) -> None:
        for _ in range(10):
            found = exe.run({"x": x, "shape": np.array([rows, 24 // rows])})["y"]
            if not np.allclose(found, np.exp(x).reshape(rows, -1).sum(-1), rtol=1e-5):
                wrong.append(str(rows))

    threads = [threading.Thread(target=runs, args=(rows,)) for rows in (1, 2, 3, 4, 6, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_too_many_values_decide() -> None:
    nodes = [node("Tile", ["x", "k"], ["y"], name="tile")]
    proto = model(nodes, [tensor("x", [1]), tensor("k", ["n"], INT64)], ["y"])
    with pytest.raises(BadInput, match="'k' determines shapes by 2000 values, more than 1024"):
        rammer.compile(proto, "toy").run({"x": np.ones(1, np.float32), "k": np.ones(2000, np.int64)})


def test_what_needs_fixed_shapes_says_so(tmp_path: Any) -> None:
    exe = rammer.compile(reshaped(), "toy")
    feeds: Feeds = {"x": np.ones((4, 6), np.float32), "shape": np.array([24])}
    with pytest.raises(BadInput, match="fixed arrays need fixed shapes, but the shape of 'r' depends on run-time data"):
        exe.bind(feeds)
    with pytest.raises(BadInput, match="a compiled file needs fixed shapes, but the shape of 'r' depends on run-time data"):
        exe.artifact(exe.compile_only({"shape": (1,)}))


def test_a_wrong_value_is_bad_input() -> None:
    exe = rammer.compile(reshaped(), "toy")
    with pytest.raises(BadInput, match="Reshape"):
        exe.run({"x": np.ones((4, 6), np.float32), "shape": np.array([5, 5])})


def test_a_mask_of_booleans(rng: np.random.Generator) -> None:
    nodes = [node("Compress", ["x", "c"], ["p"], name="compress", axis=0), node("Sigmoid", ["p"], ["y"], name="sigmoid")]
    proto = model(nodes, [tensor("x", [5, 2]), tensor("c", [5], BOOL)], ["y"])
    exe = rammer.compile(proto, "toy")
    for _ in range(3):
        agree(proto, exe, {"x": fed(rng, 5, 2), "c": rng.random(5) < 0.5})


@pytest.mark.parametrize(("limit", "delta"), [(2.0**63, 1), (1e30, 1), (np.inf, 1), (np.nan, 1), (1, 0), (-1e30, -1)])
def test_ranges_without_a_number_of_elements(limit: float, delta: float) -> None:
    constants = {"limit": np.array(limit, np.float32), "delta": np.array(delta, np.float32)}
    proto = model([node("Range", ["x", "limit", "delta"], ["y"], name="r")], [tensor("x", [])], ["y"], constants=constants)
    with pytest.raises(BadInput, match="has an undefined number of elements, or more than"):
        rammer.compile(proto, "toy").run({"x": np.array(0.5, np.float32)})


def test_what_is_compiled_for_a_value_has_no_host_operator(rng: np.random.Generator) -> None:
    """Check the diagonal of Trilu and the axis of CumSum, which decide the computation but not its shape."""
    nodes = [node("CumSum", ["x", "axis"], ["s"], name="cumsum"), node("Trilu", ["s", "k"], ["y"], name="trilu")]
    proto = model(nodes, [tensor("x", [4, 5]), tensor("axis", [], INT64), tensor("k", [], INT64)], ["y"])
    exe = rammer.compile(proto, "toy")
    for axis, k in ((0, 0), (1, -2), (0, 3)):
        agree(proto, exe, {"x": fed(rng, 4, 5), "axis": np.array(axis), "k": np.array(k)})
    assert not exe.hosted


@pytest.mark.parametrize("grows", [False, True])
def test_a_loop_whose_state_keeps_its_shape_has_it_in_the_end(grows: bool) -> None:
    """Check a state of unknown shape in ONNX's inference; a growing state has a run-time shape."""
    scalar = [helper.make_tensor_value_info(n, kind, []) for n, kind in (("turn", TensorProto.INT64), ("go", TensorProto.BOOL))]
    step = helper.make_node("Concat", ["s", "s"], ["t"], axis=0) if grows else helper.make_node("Add", ["s", "w"], ["t"])
    nodes = [
        step,
        helper.make_node("ReduceMax", ["t"], ["most"], keepdims=0),
        helper.make_node("Less", ["most", "limit"], ["on"]),
    ]
    state = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("s", "t")]
    ends = [helper.make_tensor_value_info("on", TensorProto.BOOL, []), state[1]]
    limit = helper.make_tensor("limit", TensorProto.FLOAT, [], [9.0])
    body = helper.make_graph(nodes, "body", [*scalar, state[0]], ends, [limit])
    most = [helper.make_tensor("most", TensorProto.INT64, [], [50]), helper.make_tensor("start", TensorProto.BOOL, [], [True])]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in ("x", "w")]
    loop = helper.make_node("Loop", ["most", "start", "x"], ["y"], body=body)
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    proto = helper.make_model(helper.make_graph([loop], "g", ports, result, most), opset_imports=[helper.make_opsetid("", 21)])
    if grows:
        with pytest.raises(Unknown):
            bind(read_model(proto), {"x": (3,), "w": (3,)})
    else:
        assert bind(read_model(proto), {"x": (3,), "w": (3,)}).outputs[0].type.shape == (3,)
