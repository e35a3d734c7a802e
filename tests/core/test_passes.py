"""Passes: what each removes, and that the values stay (float64 or ONNX Runtime as the reference)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.bind import bind
from rammer.frontend.nodes import node_proto, type_proto
from rammer.frontend.reader import read_model
from rammer.ir.graph import Graph, Node, Value, verify_graph
from rammer.ir.types import TensorType
from rammer.passes.batchnorm import FoldAffine
from rammer.passes.cse import CommonSubexpressions
from rammer.passes.dce import DeadCode
from rammer.passes.fold import Fold
from rammer.passes.identity import RemoveIdentities
from rammer.passes.pipeline import PassError, PassReport, Pipeline, default_passes, parse_passes
from rammer.runtime.reference import evaluate_graph
from rammer.testing import models as zoo

rng = np.random.default_rng()


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def graph_of(nodes: list[onnx.NodeProto], shape: tuple[int, ...], constants: dict[str, np.ndarray] | None = None,
             outputs: tuple[str, ...] = ("y",)) -> Graph:  # fmt: skip
    """A graph with the input x; every operator is kept as it is."""
    weights = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name=o) for o in outputs], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return bind(read_model(proto), {}, {("", n.op_type) for n in nodes})


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


def to_model(graph: Graph) -> onnx.ModelProto:
    """``graph`` as an ONNX model under the Graph's names."""
    def port(value: Value) -> onnx.ValueInfoProto:
        return onnx.ValueInfoProto(name=value.name, type=type_proto(np.dtype(value.type.dtype), value.type.shape))

    weights = [numpy_helper.from_array(a, n) for n, a in graph.constants.items()]
    proto = helper.make_graph([node_proto(n) for n in graph.nodes], graph.name, [port(v) for v in graph.inputs],
                              [port(v) for v in graph.outputs], weights)  # fmt: skip
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", graph.opset)], ir_version=10)


def agree(before: Graph, after: Graph, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """ONNX Runtime computes the same from both (the reference evaluator's ConvTranspose has no groups)."""
    verify_graph(after)
    assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
    feeds = {v.name: normal(*v.type.shape) for v in before.inputs}
    want, have = (zoo.forward(to_model(g), feeds) for g in (before, after))
    for name, value in want.items():
        assert np.isfinite(value).all()
        np.testing.assert_allclose(have[name], value, rtol=rtol, atol=atol)


# Folding -------------------------------------------------------------------------------------------------------


def foldable() -> Graph:
    """y = x + (a * b), z = -(a * b), with both constants."""
    types = {n: TensorType("float32", (4,)) for n in "xabcyz"}
    nodes = (Node("Mul", ("a", "b"), ("c",), {}, "m", "", 14), Node("Add", ("x", "c"), ("y",), {}, "p", "", 14),
             Node("Neg", ("c",), ("z",), {}, "n", "", 13))  # fmt: skip
    outputs = tuple(Value(n, types[n], n) for n in "yz")
    return Graph("g", (Value("x", types["x"], "x"),), outputs, nodes, types, {"a": normal(4), "b": normal(4)}, 21)


def test_fold() -> None:
    before = foldable()
    after = Fold()(before)
    # The output z stays a node although all it reads is known.
    assert ops(after) == ["Add", "Neg"] and list(after.constants) == ["c"]
    agree(before, after, rtol=0, atol=0)
    assert Fold()(after) is after
    assert Fold(limit=8)(before) is before


def test_random_operators_do_not_fold() -> None:
    types = {"r": TensorType("float32", (2,)), "y": TensorType("float32", (2,))}
    nodes = (Node("RandomUniform", (), ("r",), {"shape": (2,)}, "r", "", 1),
             Node("Neg", ("r",), ("y",), {}, "n", "", 13))  # fmt: skip
    graph = Graph("g", (), (Value("y", types["y"], "y"),), nodes, types, {}, 21)
    assert Fold()(graph) is graph and CommonSubexpressions()(graph) is graph


# Common sub-expressions and dead code --------------------------------------------------------------------------


def test_cse_merges_nodes_and_constants() -> None:
    w = normal(4)
    nodes = [
        helper.make_node("Add", ["x", "w1"], ["a"]), helper.make_node("Add", ["x", "w2"], ["b"]),
        helper.make_node("Exp", ["a"], ["c"]), helper.make_node("Exp", ["b"], ["d"]),
        helper.make_node("Mul", ["c", "d"], ["y"]),
    ]  # fmt: skip
    before = graph_of(nodes, (4,), {"w1": w, "w2": w.copy()})
    after = CommonSubexpressions()(before)
    assert ops(after) == ["Add", "Exp", "Mul"] and list(after.constants) == ["w1"]
    agree(before, after, rtol=0, atol=0)


@pytest.mark.parametrize("left, right", [
    ({"axes": np.array([0])}, {"axes": np.array([1])}), ({"keepdims": 0}, {"keepdims": 1}),
])  # fmt: skip
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


def test_cse_keeps_every_output() -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    before = graph_of(nodes, (4,), outputs=("y", "z"))
    agree(before, CommonSubexpressions()(before))


def test_constants_of_different_type_stay_apart() -> None:
    nodes = [helper.make_node("Gather", ["x", "i"], ["a"]), helper.make_node("Gather", ["x", "j"], ["b"]),
             helper.make_node("Add", ["a", "b"], ["y"])]  # fmt: skip
    graph = graph_of(nodes, (4,), {"i": np.array([1, 0], np.int64), "j": np.array([1, 0, 0, 0], np.int32)[:2]})
    assert CommonSubexpressions()(graph) is graph


def test_dce() -> None:
    nodes = (Node("Exp", ("x",), ("dead",), {}, "", "", 13), Node("Neg", ("dead",), ("dead2",), {}, "", "", 13),
             Node("MaxPool", ("x",), ("y", "index"), {"kernel_shape": (2,)}, "", "", 12))  # fmt: skip
    types = {n: TensorType("float32", (1, 1, 4)) for n in ("x", "dead", "dead2")}
    types |= {"y": TensorType("float32", (1, 1, 3)), "index": TensorType("int64", (1, 1, 3))}
    x, y = (Value(n, types[n], n) for n in "xy")
    before = Graph("g", (x,), (y,), nodes, types, {"w": normal(2)}, 21)
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


@pytest.mark.parametrize("op, constants, attributes", [
    ("Identity", {}, {}), ("Dropout", {}, {}), ("Cast", {}, {"to": TensorProto.FLOAT}),
    ("Dropout", {"r": np.float32(0.5), "t": np.array(False)}, {}),
    ("Reshape", {"s": np.array([2, 1, -1])}, {}), ("Transpose", {}, {"perm": [0, 1, 2]}),
    ("Transpose", {}, {"perm": [1, 0, 2]}), ("Expand", {"s": np.array([2, 1, 3])}, {}), ("Concat", {}, {"axis": 1}),
    ("Sum", {}, {}), ("Max", {}, {}), ("Tile", {"n": np.array([1, 1, 1])}, {}),
    ("Slice", {"b": np.array([0]), "end": np.array([99]), "a": np.array([2]), "s": np.array([1])}, {}),
    ("Mul", {"k": ONE}, {}), ("Div", {"k": ONE}, {}), ("Sub", {"k": ZERO}, {}), ("Add", {"k": -ZERO}, {}),
    ("Pow", {"k": ONE}, {}), ("Pad", {"p": np.zeros(6, np.int64)}, {}),
])  # fmt: skip
def test_identities(op: str, constants: dict[str, np.ndarray], attributes: dict[str, Any]) -> None:
    shape = (1, 1, 3) if attributes.get("perm") == [1, 0, 2] else (2, 1, 3)
    node = helper.make_node(op, ["e", *constants], ["m"], **attributes)
    before = graph_of([helper.make_node("Exp", ["x"], ["e"]), node, helper.make_node("Neg", ["m"], ["y"])], shape,
                      constants)  # fmt: skip
    after = RemoveIdentities()(before)
    assert ops(after) == ["Exp", "Neg"]
    agree(before, after, rtol=0, atol=0)


@pytest.mark.parametrize("op, constants, attributes", [
    ("Transpose", {}, {"perm": [1, 0]}), ("Mul", {"k": np.ones((2, 2, 2), np.float32)}, {}), ("Add", {"k": ZERO}, {}),
    ("Slice", {"b": np.array([-1]), "e": np.array([-99]), "a": np.array([0]), "s": np.array([-1])}, {}),
    ("Pad", {"p": np.array([1, 0, -1, 0])}, {}), ("Div", {"k": ZERO}, {}), ("Cast", {}, {"to": TensorProto.DOUBLE}),
    ("Dropout", {"r": np.float32(0.5), "t": np.array(True)}, {}), ("Reshape", {"s": np.array([4])}, {}),
])  # fmt: skip
def test_what_looks_like_an_identity_and_is_none(op: str, constants: dict[str, np.ndarray],
                                                 attributes: dict[str, Any]) -> None:  # fmt: skip
    graph = graph_of([helper.make_node(op, ["x", *constants], ["y"], **attributes)], (2, 2), constants)
    assert RemoveIdentities()(graph) is graph


def test_left_operand_that_is_a_divisor_is_no_identity() -> None:
    graph = graph_of([helper.make_node("Div", ["k", "x"], ["y"])], (2,), {"k": ONE})
    assert RemoveIdentities()(graph) is graph


def test_outputs_keep_their_names() -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["n"]),
             helper.make_node("Identity", ["n"], ["z"]), helper.make_node("Dropout", ["n"], ["w"])]  # fmt: skip
    before = graph_of(nodes, (4,), outputs=("y", "z", "w"))
    after = RemoveIdentities()(before)
    # y copies an input and w a value that is output z already: both need a node.
    assert ops(after) == ["Identity", "Neg", "Identity"]
    agree(before, after, rtol=0, atol=0)
    assert RemoveIdentities()(after) is after


# Affine maps ---------------------------------------------------------------------------------------------------


def norm(channels: int, prefix: str = "") -> dict[str, np.ndarray]:
    return {f"{prefix}{n}": normal(channels) for n in "sbm"} | {f"{prefix}v": np.abs(normal(channels)) + 0.1}


NORM = ["s", "b", "m", "v"]


@pytest.mark.parametrize("op, weight, channels, attributes", [
    ("Conv", (6, 4, 3, 3), 6, {"pads": [1, 1, 1, 1]}), ("Conv", (6, 2, 3, 3), 6, {"group": 2}),
    ("ConvTranspose", (4, 6, 2, 2), 6, {"strides": [2, 2]}), ("ConvTranspose", (4, 3, 2, 2), 6, {"group": 2}),
    ("Gemm", (4, 6), 6, {}), ("Gemm", (6, 4), 6, {"transB": 1, "alpha": 0.5, "beta": 2.0}),
])  # fmt: skip
@pytest.mark.parametrize("biased", [False, True])
def test_batch_norm_folds_into(op: str, weight: tuple[int, ...], channels: int, attributes: dict[str, Any],
                               biased: bool) -> None:  # fmt: skip
    constants = norm(channels) | {"w": normal(*weight)} | ({"c": normal(channels)} if biased else {})
    nodes = [helper.make_node(op, ["x", "w", *(["c"] if biased else [])], ["t"], **attributes),
             helper.make_node("BatchNormalization", ["t", *NORM], ["y"], epsilon=1e-3)]  # fmt: skip
    before = graph_of(nodes, (2, 4) if op == "Gemm" else (2, 4, 5, 5), constants)
    after = FoldAffine()(before)
    assert ops(after) == [op] and len(after.constants) == 2
    agree(before, after)


@pytest.mark.parametrize("op, swapped", [(op, side) for op in ("Add", "Sub", "Mul") for side in (0, 1)] + [("Div", 0)])
@pytest.mark.parametrize("shape", [(), (6, 1, 1), (1, 6, 1, 1), (1,)])
def test_constants_per_channel_fold_into_conv(op: str, swapped: int, shape: tuple[int, ...]) -> None:
    operands = ["k", "t"] if swapped else ["t", "k"]
    nodes = [helper.make_node("Conv", ["x", "w"], ["t"]), helper.make_node(op, operands, ["y"])]
    before = graph_of(nodes, (1, 4, 4, 4), {"w": normal(6, 4, 3, 3), "k": np.abs(normal(*shape)) + np.float32(0.5)})
    after = FoldAffine()(before)
    assert ops(after) == ["Conv"]
    agree(before, after)


def test_a_chain_folds_at_once() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["t"]), helper.make_node("BatchNormalization", ["t", *NORM], ["u"]),
             helper.make_node("Mul", ["u", "k"], ["p"]), helper.make_node("Add", ["p", "c"], ["y"])]  # fmt: skip
    constants = norm(6) | {"w": normal(6, 4, 1, 1), "k": normal(6, 1, 1), "c": normal(6, 1, 1)}
    before = graph_of(nodes, (1, 4, 3, 3), constants)
    after, reports = Pipeline(default_passes()).run(before)
    assert ops(after) == ["Conv"]
    assert [str(r) for r in reports] == ["affine     nodes 4 -> 1         constants 7 -> 2"]
    agree(before, after)


@pytest.mark.parametrize("nodes, constants", [
    ([("Conv", ["x", "w"], "t"), ("Mul", ["t", "k"], "y")], {"k": normal(1, 1, 1, 4)}),  # per column
    ([("Conv", ["x", "w"], "t"), ("Mul", ["t", "k"], "y")], {"k": normal(2, 6, 1, 1)}),  # broadcasts the batch
    ([("Conv", ["x", "w"], "t"), ("Div", ["k", "t"], "y")], {"k": normal(6, 1, 1)}),  # a reciprocal
    ([("Conv", ["x", "w"], "t"), ("Div", ["t", "k"], "y")], {"k": np.zeros((6, 1, 1), np.float32)}),
    ([("Conv", ["x", "w"], "t"), ("Mul", ["t", "k"], "u"), ("Add", ["u", "t"], "y")], {"k": normal(6, 1, 1)}),
    ([("Conv", ["x", "w"], "t"), ("Mul", ["t", "t"], "y")], {}),
])  # fmt: skip
def test_what_must_not_fold(nodes: list[Any], constants: dict[str, np.ndarray]) -> None:
    protos = [helper.make_node(op, inputs, [output]) for op, inputs, output in nodes]
    graph = graph_of(protos, (1, 4, 4, 4), {"w": normal(6, 4, 1, 1), **constants})
    assert FoldAffine()(graph) is graph


def test_an_output_in_between_stays() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["t"]), helper.make_node("BatchNormalization", ["t", *NORM], ["y"])]
    graph = graph_of(nodes, (1, 4, 4, 4), {"w": normal(6, 4, 1, 1), **norm(6)}, outputs=("t", "y"))
    assert FoldAffine()(graph) is graph


@pytest.mark.parametrize("pads, folds", [([0, 0, 0, 0], True), ([1, 1, 1, 1], False)])
def test_a_shift_before_a_conv_needs_no_padding(pads: list[int], folds: bool) -> None:
    nodes = [helper.make_node("BatchNormalization", ["x", *NORM], ["t"]),
             helper.make_node("Conv", ["t", "w", "c"], ["y"], pads=pads, group=2)]  # fmt: skip
    before = graph_of(nodes, (1, 4, 5, 5), norm(4) | {"w": normal(6, 2, 3, 3), "c": normal(6)})
    after = FoldAffine()(before)
    assert ops(after) == (["Conv"] if folds else ["BatchNormalization", "Conv"])
    agree(before, after)


def test_a_scale_before_a_padded_conv_folds() -> None:
    nodes = [helper.make_node("Mul", ["x", "k"], ["t"]), helper.make_node("Conv", ["t", "w"], ["y"], pads=[1, 1, 1, 1])]
    before = graph_of(nodes, (1, 4, 5, 5), {"k": normal(4, 1, 1), "w": normal(6, 4, 3, 3)})
    after = FoldAffine()(before)
    assert ops(after) == ["Conv"]
    agree(before, after)


def test_shared_weights_stay_for_the_other_reader() -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["t"]), helper.make_node("Mul", ["t", "k"], ["y"]),
             helper.make_node("Conv", ["x", "w"], ["z"], strides=[2, 2])]  # fmt: skip
    before = graph_of(nodes, (1, 4, 4, 4), {"k": normal(6, 1, 1), "w": normal(6, 4, 1, 1)}, outputs=("y", "z"))
    after = FoldAffine()(before)
    assert ops(after) == ["Conv", "Conv"]
    agree(before, after)


def test_weights_are_rounded_once() -> None:
    """In float64 the folded weight is the product rounded to float32, to the last bit."""
    w, k = normal(6, 4, 1, 1), normal(6, 1, 1)
    nodes = [helper.make_node("Conv", ["x", "w"], ["t"]), helper.make_node("Mul", ["t", "k"], ["y"])]
    after = FoldAffine()(graph_of(nodes, (1, 4, 2, 2), {"w": w, "k": k}))
    want = (w.astype(np.float64) * k.astype(np.float64)[..., None]).astype(np.float32)
    np.testing.assert_array_equal(after.constants[after.nodes[0].inputs[1]], want)


# Random graphs -------------------------------------------------------------------------------------------------


BINARY = ("Add", "Mul", "Sub")
OTHERS = ("Conv", "Pad", "BatchNormalization", "Identity", "Sum", "Tanh")


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Graphs of channel-wise operators, copies and Convs over one shape, with shared constants and two outputs."""
    constants = {"k0": normal(3, 1, 1), "k1": normal(1), "w0": normal(3, 3, 1, 1), "w1": normal(3, 3, 3, 3), **norm(3)}
    constants |= {"k2": constants["k0"].copy(), "one": ONE}
    values, nodes = ["x", "x"], []
    for number in range(draw(st.integers(1, 12))):
        op = draw(st.sampled_from([*BINARY, *OTHERS]))
        source = draw(st.sampled_from(values[-4:]))
        other = draw(st.sampled_from([*values[-3:], "k0", "k1", "k2", "one"]))
        inputs = {"Conv": [source, "w0"], "Pad": [source, "w1"], "BatchNormalization": [source, *NORM],
                  "Identity": [source], "Sum": [source], "Tanh": [source]}.get(op, [source, other])  # fmt: skip
        attributes = {"pads": [1, 1, 1, 1]} if op == "Pad" else {}
        if op in BINARY and draw(st.booleans()):
            inputs.reverse()
        nodes.append(helper.make_node("Conv" if op == "Pad" else op, inputs, [f"v{number}"], **attributes))
        values.append(f"v{number}")
    outputs = tuple(dict.fromkeys([values[-1], draw(st.sampled_from(values[2:]))]))
    return graph_of(nodes, (2, 3, 4, 4), constants, outputs)


@settings(max_examples=60, deadline=None)
@given(random_graphs())
def test_pipeline_keeps_the_values_of_random_graphs(before: Graph) -> None:
    after, reports = Pipeline(default_passes()).run(before)
    assert len(after.nodes) <= len(before.nodes)
    assert Pipeline(default_passes())(after) is after
    if not reports:
        assert after is before
    feeds = {"x": normal(2, 3, 4, 4)}
    # float64 on both sides leaves only the rounding of folded weights.
    want, have = (evaluate_graph(wide(g), {"x": feeds["x"].astype(np.float64)}) for g in (before, after))
    for name, value in want.items():
        scale = max(float(np.abs(value).max()), 1e-6)
        assert float(np.abs(have[name] - value).max()) <= 1e-5 * scale + 1e-5


def wide(graph: Graph) -> Graph:
    """``graph`` with all floats in float64."""
    def kind(t: TensorType) -> TensorType:
        return TensorType("float64", t.shape) if t.dtype == "float32" else t

    constants = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in graph.constants.items()}
    return replace(graph, constants=constants, types={n: kind(t) for n, t in graph.types.items()})


# Pipeline ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """Drops the first node; or never settles."""

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
        Pipeline((Fold(), Broken())).run(graph)
    assert str(caught.value) == (
        "value t is used before it is defined\n  y = Neg(t)  # n\nis the graph in topological order?  (pass: broken)\n"
        "  at: graph g\n  hint: the pass must keep the graph legal"
    )
    with pytest.raises(PassError, match="pass broken still changes the graph after 16 rounds"):
        Pipeline((Broken(endless=True),)).run(graph)


def test_spelling_reads_back() -> None:
    passes = (*default_passes(), Fold(limit=1024))
    text = str(Pipeline(passes))
    assert text == "fold,identity,affine,cse,dce,fold{limit=1024}"
    assert parse_passes(text) == passes
    with pytest.raises(BadInput, match=r"unknown pass 'fuse'\n  at: pass fuse\n  hint: the passes are fold, identity"):
        parse_passes("fold,fuse")
    with pytest.raises(BadInput, match=r"pass cse does not take \{limit=3\}"):
        parse_passes("cse{limit=3}")
    with pytest.raises(BadInput, match="not a list of passes: 'fold;cse'"):
        parse_passes("fold;cse")


# Real models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, nodes, reports", [
    ("shufflenet", 154, "affine"), ("inception_v2", 164, "affine"), ("squeezenet", 65, "identity"),
])  # fmt: skip
def test_light_models_compute_the_same(name: str, nodes: int, reports: str) -> None:
    model = zoo.strip_final_softmax(zoo.reseed(zoo.light_model(name), int(rng.integers(1 << 30))))
    kept = {("", n.op_type) for n in model.graph.node}
    graph, done = Pipeline(default_passes()).run(bind(read_model(model), {}, kept))
    assert len(graph.nodes) < nodes and any(r.spelling == reports for r in done)
    assert "BatchNormalization" not in ops(graph) and isinstance(done[0], PassReport)
    feeds = zoo.random_inputs(zoo.graph_inputs(model), int(rng.integers(1 << 30)))
    want = zoo.forward(model, feeds)
    names = {v.external: v.name for v in graph.inputs}
    have = zoo.forward(to_model(graph), {names[k]: v for k, v in feeds.items()})
    for value in graph.outputs:
        difference = np.linalg.norm(have[value.name] - want[value.external])
        assert difference <= 5e-5 * np.linalg.norm(want[value.external])
