"""Passes: the removed operators, and unchanged values (float64 or ONNX Runtime as the reference)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from pass_graphs import NORM, agree, graph_of, norm, normal, ops, to_model

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.types import TensorType
from rammer.passes.graph.cse import CommonSubexpressions
from rammer.passes.graph.dce import DeadCode
from rammer.passes.graph.fold_constants import FoldConstants
from rammer.passes.graph.remove_identity import RemoveIdentity
from rammer.passes.pass_pipeline import (
    ComputePass,
    ComputeTarget,
    PassError,
    PassReport,
    Pipeline,
    default_passes,
)
from rammer_testing import models as zoo
from rammer_testing.graph_reference import evaluate_graph
from rammer_testing.nonempty import some

# Folding -------------------------------------------------------------------------------------------------------


def foldable(rng: np.random.Generator) -> Graph:
    """Make y = x + (a * b) and z = -(a * b), with constants a and b."""
    types = {n: TensorType("float32", (4,)) for n in "xabcyz"}
    nodes = (
        Node("Mul", ("a", "b"), ("c",), {}, "m", "", 14),
        Node("Add", ("x", "c"), ("y",), {}, "p", "", 14),
        Node("Neg", ("c",), ("z",), {}, "n", "", 13),
    )
    outputs = tuple(Value(n, types[n], n) for n in "yz")
    return Graph("g", (Value("x", types["x"], "x"),), outputs, nodes, types, {"a": normal(rng, 4), "b": normal(rng, 4)}, 21)


def test_fold(rng: np.random.Generator) -> None:
    before = foldable(rng)
    after = FoldConstants()(before)
    # The output z stays a node although all its inputs are constant.
    assert ops(after) == ["Add", "Neg"] and list(after.constants) == ["c"]
    agree(rng, before, after, rtol=0, atol=0)
    assert FoldConstants()(after) is after
    assert FoldConstants(limit=8, times=0)(before) is before
    assert list(FoldConstants(limit=8)(before).constants) == ["c"], "it is no larger than what it is made of"


def test_random_operators_do_not_fold() -> None:
    types = {"r": TensorType("float32", (2,)), "y": TensorType("float32", (2,))}
    nodes = (Node("RandomUniform", (), ("r",), {"shape": (2,)}, "r", "", 1), Node("Neg", ("r",), ("y",), {}, "n", "", 13))
    graph = Graph("g", (), (Value("y", types["y"], "y"),), nodes, types, {}, 21)
    assert FoldConstants()(graph) is graph and CommonSubexpressions()(graph) is graph


# Common sub-expressions and dead code --------------------------------------------------------------------------


def test_cse_merges_nodes_and_constants(rng: np.random.Generator) -> None:
    w = normal(rng, 4)
    nodes = [
        helper.make_node("Add", ["x", "w1"], ["a"]),
        helper.make_node("Add", ["x", "w2"], ["b"]),
        helper.make_node("Exp", ["a"], ["c"]),
        helper.make_node("Exp", ["b"], ["d"]),
        helper.make_node("Mul", ["c", "d"], ["y"]),
    ]
    before = graph_of(nodes, (4,), {"w1": w, "w2": w.copy()})
    after = CommonSubexpressions()(before)
    assert ops(after) == ["Add", "Exp", "Mul"] and list(after.constants) == ["w1"]
    agree(rng, before, after, rtol=0, atol=0)


@pytest.mark.parametrize(
    "left, right",
    [
        ({"axes": np.array([0])}, {"axes": np.array([1])}),
        ({"keepdims": 0}, {"keepdims": 1}),
    ],
)
def test_cse_tells_attributes_and_operands_apart(left: dict[str, Any], right: dict[str, Any]) -> None:
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray] = {}
    for name, given_ in (("a", left), ("b", right)):
        constants |= {f"k{name}": given_["axes"]} if "axes" in given_ else {}
        inputs = ["x", f"k{name}"] if "axes" in given_ else ["x"]
        nodes.append(helper.make_node("ReduceSum", inputs, [name], **{k: v for k, v in given_.items() if k != "axes"}))
    nodes.append(helper.make_node("Add", ["a", "b"], ["y"]))
    graph = graph_of(nodes, (3, 3), constants)
    assert CommonSubexpressions()(graph) is graph


@pytest.mark.parametrize("op", ["Add", "Mul", "Sum", "Sub"])
def test_operands_of_what_commutes_may_come_in_either_order(op: str, rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node(op, ["x", "e"], ["a"]),
        helper.make_node(op, ["e", "x"], ["b"]),
        helper.make_node("Concat", ["a", "b"], ["y"], axis=0),
    ]
    before = graph_of(nodes, (4,))
    after = CommonSubexpressions()(before)
    assert ops(after).count(op) == (2 if op == "Sub" else 1)
    agree(rng, before, after, rtol=0, atol=0)


def test_cse_keeps_every_output(rng: np.random.Generator) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    before = graph_of(nodes, (4,), outputs=("y", "z"))
    agree(rng, before, CommonSubexpressions()(before))


def test_constants_of_different_type_stay_apart() -> None:
    nodes = [
        helper.make_node("Gather", ["x", "i"], ["a"]),
        helper.make_node("Gather", ["x", "j"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    graph = graph_of(nodes, (4,), {"i": np.array([1, 0], np.int64), "j": np.array([1, 0, 0, 0], np.int32)[:2]})
    assert CommonSubexpressions()(graph) is graph


def test_dce(rng: np.random.Generator) -> None:
    nodes = (
        Node("Exp", ("x",), ("dead",), {}, "", "", 13),
        Node("Neg", ("dead",), ("dead2",), {}, "", "", 13),
        Node("MaxPool", ("x",), ("y", "index"), {"kernel_shape": (2,)}, "", "", 12),
    )
    types = {n: TensorType("float32", (1, 1, 4)) for n in ("x", "dead", "dead2")}
    types |= {"y": TensorType("float32", (1, 1, 3)), "index": TensorType("int64", (1, 1, 3))}
    x, y = (Value(n, types[n], n) for n in "xy")
    before = Graph("g", (x,), (y,), nodes, types, {"w": normal(rng, 2)}, 21)
    after = DeadCode()(before)
    assert ops(after) == ["MaxPool"] and after.nodes[0].outputs == ("y",)
    assert not after.constants and set(after.types) == {"x", "y"}
    assert DeadCode()(after) is after


def test_dce_keeps_an_unread_result_that_is_not_optional() -> None:
    nodes = [helper.make_node("TopK", ["x", "k"], ["y", "i"])]
    graph = graph_of(nodes, (4,), {"k": np.array([2])})
    assert DeadCode()(graph) is graph


# Identities ----------------------------------------------------------------------------------------------------

ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


@pytest.mark.parametrize(
    "op, constants, attributes",
    [
        ("Identity", {}, {}),
        ("Dropout", {}, {}),
        ("Cast", {}, {"to": TensorProto.FLOAT}),
        ("Dropout", {"r": np.float32(0.5), "t": np.array(False)}, {}),
        ("Reshape", {"s": np.array([2, 1, -1])}, {}),
        ("Transpose", {}, {"perm": [0, 1, 2]}),
        ("Transpose", {}, {"perm": [1, 0, 2]}),
        ("Expand", {"s": np.array([2, 1, 3])}, {}),
        ("Concat", {}, {"axis": 1}),
        ("Sum", {}, {}),
        ("Max", {}, {}),
        ("Tile", {"n": np.array([1, 1, 1])}, {}),
        ("Slice", {"b": np.array([0]), "end": np.array([99]), "a": np.array([2]), "s": np.array([1])}, {}),
        ("Mul", {"k": ONE}, {}),
        ("Div", {"k": ONE}, {}),
        ("Sub", {"k": ZERO}, {}),
        ("Add", {"k": -ZERO}, {}),
        ("Pow", {"k": ONE}, {}),
        ("Pad", {"p": np.zeros(6, np.int64)}, {}),
    ],
)
def test_identities(op: str, constants: dict[str, np.ndarray], attributes: dict[str, Any], rng: np.random.Generator) -> None:
    shape = (1, 1, 3) if attributes.get("perm") == [1, 0, 2] else (2, 1, 3)
    node = helper.make_node(op, ["e", *constants], ["m"], **attributes)
    before = graph_of([helper.make_node("Exp", ["x"], ["e"]), node, helper.make_node("Neg", ["m"], ["y"])], shape, constants)
    after = RemoveIdentity()(before)
    assert ops(after) == ["Exp", "Neg"]
    agree(rng, before, after, rtol=0, atol=0)


@pytest.mark.parametrize(
    "op, constants, attributes",
    [
        ("Transpose", {}, {"perm": [1, 0]}),
        ("Mul", {"k": np.ones((2, 2, 2), np.float32)}, {}),
        ("Add", {"k": ZERO}, {}),
        ("Slice", {"b": np.array([-1]), "e": np.array([-99]), "a": np.array([0]), "s": np.array([-1])}, {}),
        ("Pad", {"p": np.array([1, 0, -1, 0])}, {}),
        ("Div", {"k": ZERO}, {}),
        ("Cast", {}, {"to": TensorProto.DOUBLE}),
        ("Dropout", {"r": np.float32(0.5), "t": np.array(True)}, {}),
        ("Reshape", {"s": np.array([4])}, {}),
    ],
)
def test_what_looks_like_an_identity_and_is_none(op: str, constants: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
    graph = graph_of([helper.make_node(op, ["x", *constants], ["y"], **attributes)], (2, 2), constants)
    assert RemoveIdentity()(graph) is graph


def test_left_operand_that_is_a_divisor_is_no_identity() -> None:
    graph = graph_of([helper.make_node("Div", ["k", "x"], ["y"])], (2,), {"k": ONE})
    assert RemoveIdentity()(graph) is graph


def test_outputs_keep_their_names(rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node("Identity", ["n"], ["z"]),
        helper.make_node("Dropout", ["n"], ["w"]),
    ]
    before = graph_of(nodes, (4,), outputs=("y", "z", "w"))
    after = RemoveIdentity()(before)
    # y copies an input and w copies the output z: both need a node.
    assert ops(after) == ["Identity", "Neg", "Identity"]
    agree(rng, before, after, rtol=0, atol=0)
    assert RemoveIdentity()(after) is after


# Random graphs -------------------------------------------------------------------------------------------------


BINARY = ("Add", "Mul", "Sub")
OTHERS = ("Conv", "Pad", "BatchNormalization", "Identity", "Sum", "Tanh")


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Draw graphs of channel-wise operators, copies and Convs over one shape, with shared constants and two outputs."""
    rng = draw(st.integers(0, 2**32 - 1).map(np.random.default_rng))
    constants = {
        "k0": normal(rng, 3, 1, 1),
        "k1": normal(rng, 1),
        "w0": normal(rng, 3, 3, 1, 1),
        "w1": normal(rng, 3, 3, 3, 3),
        **norm(rng, 3),
    }
    constants |= {"k2": constants["k0"].copy(), "one": ONE}
    values, nodes = ["x", "x"], []
    for number in range(draw(st.integers(1, 12))):
        op = draw(st.sampled_from([*BINARY, *OTHERS]))
        source = draw(st.sampled_from(values[-4:]))
        other = draw(st.sampled_from([*values[-3:], "k0", "k1", "k2", "one"]))
        inputs = {
            "Conv": [source, "w0"],
            "Pad": [source, "w1"],
            "BatchNormalization": [source, *NORM],
            "Identity": [source],
            "Sum": [source],
            "Tanh": [source],
        }.get(op, [source, other])
        attributes = {"pads": [1, 1, 1, 1]} if op == "Pad" else {}
        if op in BINARY and draw(st.booleans()):
            inputs.reverse()
        nodes.append(helper.make_node("Conv" if op == "Pad" else op, inputs, [f"v{number}"], **attributes))
        values.append(f"v{number}")
    outputs = tuple(dict.fromkeys([values[-1], draw(st.sampled_from(values[2:]))]))
    return graph_of(nodes, (2, 3, 4, 4), constants, outputs)


@settings(max_examples=60)
@given(before=random_graphs(), rng=st.integers(0, 2**32 - 1).map(np.random.default_rng))
def test_pipeline_keeps_the_values_of_random_graphs(before: Graph, rng: np.random.Generator) -> None:
    after, reports = Pipeline(default_passes()).run(before)
    assert len(after.nodes) <= len(before.nodes)
    assert Pipeline(default_passes())(after) is after
    if not reports:
        assert after is before
    feeds = {"x": normal(rng, 2, 3, 4, 4)}
    # float64 on both sides leaves only the rounding of folded weights.
    want, have = (evaluate_graph(wide(g), {"x": feeds["x"].astype(np.float64)}) for g in (before, after))
    for name, value in some(want.items()):
        scale = max(float(np.abs(value).max()), 1e-6)
        assert float(np.abs(have[name] - value).max()) <= 1e-5 * scale + 1e-5


def wide(graph: Graph) -> Graph:
    """Return ``graph`` with all floats in float64."""

    def kind(t: TensorType) -> TensorType:
        return TensorType("float64", t.shape) if t.dtype == "float32" else t

    constants = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in graph.constants.items()}
    return replace(graph, constants=constants, types={n: kind(t) for n, t in graph.types.items()})


# Pipeline ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A pass that drops the first node or never settles."""

    endless: bool = False
    name: ClassVar[str] = "broken"

    def __str__(self) -> str:
        return self.name

    def __call__(self, graph: Graph) -> Graph:
        return replace(graph) if self.endless else replace(graph, nodes=graph.nodes[1:])


def test_the_pass_that_breaks_a_graph_is_named() -> None:
    nodes = [helper.make_node("Exp", ["x"], ["t"], name="e"), helper.make_node("Neg", ["t"], ["y"], name="n")]
    graph = graph_of(nodes, (4,))
    with pytest.raises(PassError) as caught:
        Pipeline((FoldConstants(), Broken())).run(graph)
    assert str(caught.value) == (
        "value t is used before it is defined\n  y = Neg(t)  # n\nis the graph in topological order?  (pass: broken)\n"
        "  at: graph g\n  hint: the pass must keep the graph legal"
    )
    with pytest.raises(PassError, match="pass broken still changes the graph after 16 rounds"):
        Pipeline((Broken(endless=True),)).run(graph)


def test_passes_of_computes_run_once_in_order_and_report() -> None:
    graph = graph_of([helper.make_node("Abs", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])], (4,), outputs=("y", "z"))
    before, calls = replace(lower(graph), outputs=("y",)), list[str]()
    layers = MemoryLayer("dram", "device", 1 << 30, 1e10, 64), MemoryLayer("local", "veu", 1 << 16, 1e11, 64)
    device = VDevice("test", "for tests", 4, layers, 1e10, 1e-6)

    def called(name: str) -> ComputePass:
        return ComputePass(name, lambda graph, target: calls.append(f"{name} {target.device.name}") or graph)

    steps = (called("first"), *(p for p in default_passes() if p.name in ("simplify", "dce")), called("last"))
    after, (report,) = Pipeline(steps).run_computes(before, ComputeTarget(device))
    assert calls == [f"first {device.name}", f"last {device.name}"]
    assert [c.name for c in after.computes] == ["y"]
    assert " ".join(str(report).split()) == "simplify computes 2 -> 1 constants 0 -> 0"
    assert Pipeline(steps).without(["simplify"]).run_computes(before, ComputeTarget(device)) == (before, [])


def test_a_pipeline_is_spelled_by_its_passes() -> None:
    passes = (*default_passes(), FoldConstants(limit=1024))
    text = str(Pipeline(passes))
    assert text == (
        "propagate_quantization,fuse_qdq_products,weight_only_quant,fold_constants,remove_identity,cancel_transposes,"
        "fuse_group_norm,fold_affine,fold_scales,sink_reshapes,cse,dce,chunk_recurrent,inline_conditions,inline_decodings,"
        "group_norm_epilogue,pad_channels,batch_products,slice_time_steps,blocked_scan,rfactor,simplify,copy_rows,"
        "fold_constants{limit=1024}"
    )


# Real models ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name, nodes, reports",
    [
        ("shufflenet", 154, "fold_affine"),
        ("inception_v2", 164, "fold_affine"),
        ("squeezenet", 65, "remove_identity"),
    ],
)
def test_light_models_compute_the_same(name: str, nodes: int, reports: str, rng: np.random.Generator) -> None:
    model = zoo.strip_final_softmax(zoo.reseed(zoo.light_model(name), int(rng.integers(1 << 30))))
    kept = {("", n.op_type) for n in model.graph.node}
    graph, done = Pipeline(default_passes()).run(bind(read_model(model), {}, kept))
    assert len(graph.nodes) < nodes and any(r.spelling == reports for r in done)
    assert "BatchNormalization" not in ops(graph) and isinstance(done[0], PassReport)
    feeds = zoo.random_inputs(zoo.graph_inputs(model), int(rng.integers(1 << 30)))
    want = zoo.forward(model, feeds)
    names = {v.external: v.name for v in graph.inputs}
    have = zoo.forward(to_model(graph), {names[k]: v for k, v in feeds.items()})
    for value in some(graph.outputs):
        difference = np.linalg.norm(have[value.name] - want[value.external])
        assert difference <= 5e-5 * np.linalg.norm(want[value.external])
