"""Reading and binding models: exact messages for bad input, and what the graph looks like afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.bind import bind
from rammer.frontend.reader import TARGET_OPSET, read_model
from rammer.ir.graph import Graph
from rammer.runtime.reference import evaluate_graph
from rammer.testing import models as zoo

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def tensor(name: str, shape: Any, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[str], opset: int = 21,
          constants: dict[str, np.ndarray] | None = None, **more: Any) -> onnx.ModelProto:  # fmt: skip
    weights = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, [onnx.ValueInfoProto(name=o) for o in outputs], weights)
    imports = [helper.make_opsetid("", opset), *more.pop("imports", [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, **more)


def relu(shape: Any = (2, 3)) -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"], name="r")], [tensor("x", shape)], ["y"])


def message(source: Any, shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        bind(read_model(source), shapes or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


def bound(proto: onnx.ModelProto, **shapes: tuple[int, ...]) -> Graph:
    return bind(read_model(proto), shapes)


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


# Files ---------------------------------------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "no.onnx"
    assert message(path) == f"model file not found\n  at: {path}\n  hint: check the path"
    assert message(tmp_path) == f"the model is a folder\n  at: {tmp_path}\n  hint: give the .onnx file in it"


@pytest.mark.parametrize("data", [b"PK\x03\x04 a zip file", b"hello, this is text\n" * 20, b"\x00" * 64])
def test_not_onnx(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    assert message(path) == (
        f"not an ONNX model\n  at: {path}\n  hint: give a .onnx file (an ONNX ModelProto in protobuf's binary format)"
    )


def test_empty() -> None:
    assert message(b"") == (
        "the model file is empty\n  at: the model in memory\n  hint: download or export the model again"
    )


def test_truncated_inside_the_graph() -> None:
    data = relu().SerializeToString()
    graph = relu().graph.ByteSize()
    start = data.index(relu().graph.SerializeToString())
    assert message(data[: start + 7]) == (
        f"the model file is truncated: graph has {graph} bytes, of which 7 are there\n"
        "  at: the model in memory\n  hint: download or copy the file again"
    )


def test_every_truncation_is_bad_input() -> None:
    data = relu().SerializeToString()
    for length in range(1, len(data)):
        with pytest.raises(BadInput, match=r"truncated|not an ONNX model"):
            read_model(data[:length])


# Operators and structure ---------------------------------------------------------------------------------------


def test_unknown_operator_names_the_nearest() -> None:
    proto = model([helper.make_node("Reluu", ["x"], ["y"], name="act1")], [tensor("x", [2])], ["y"])
    assert message(proto) == (
        "unknown operator Reluu in domain ai.onnx, opset 21\n  at: node act1 (Reluu)\n"
        "  hint: the nearest known operator is Relu"
    )


def test_unknown_domain() -> None:
    node = helper.make_node("FusedConv", ["x"], ["y"], domain="com.example")
    proto = model([node], [tensor("x", [2])], ["y"], imports=[helper.make_opsetid("com.example", 1)])
    assert message(proto) == (
        "unknown operator FusedConv in domain com.example, opset 1\n  at: node computing y (FusedConv)\n"
        "  hint: domain com.example is not part of ONNX: export the model with standard operators only"
    )


def test_operator_newer_than_the_opset() -> None:
    proto = model([helper.make_node("Gelu", ["x"], ["y"], name="a")], [tensor("x", [2])], ["y"], opset=19)
    assert message(proto) == (
        "unknown operator Gelu in domain ai.onnx, opset 19\n  at: node a (Gelu)\n  hint: it exists since opset 20"
    )


def test_unknown_operator_inside_a_branch() -> None:
    branch = helper.make_graph([helper.make_node("Addd", ["x", "x"], ["b"], name="n")], "b", [],
                               [tensor("b", [2])])  # fmt: skip
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    proto = model([node], [tensor("x", [2]), tensor("c", [], BOOL)], ["y"])
    assert message(proto).startswith("unknown operator Addd in domain ai.onnx, opset 21\n  at: node n (Addd)\n")


def test_cycle() -> None:
    nodes = [helper.make_node("Add", ["x", "c"], ["a"], name="A"), helper.make_node("Relu", ["a"], ["b"], name="B"),
             helper.make_node("Neg", ["b"], ["c"], name="C")]  # fmt: skip
    assert message(model(nodes, [tensor("x", [2])], ["c"])) == (
        "the graph has a cycle: A -> B -> C -> A\n  at: graph g\n  hint: export the model again"
    )


def test_long_chain_in_any_order_is_sorted() -> None:
    chain = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], name=f"n{i}") for i in range(3000)]
    graph = bound(model(chain[::-1], [tensor("v0", [2])], ["v3000"]))
    assert [n.name for n in graph.nodes] == [f"n{i}" for i in range(3000)]


def test_undefined_and_twice_defined_values() -> None:
    node = helper.make_node("Add", ["x", "w"], ["y"], name="a")
    assert message(model([node], [tensor("x", [2])], ["y"])) == (
        "value 'w' is read but nothing computes it\n  at: node a (Add)\n  hint: export the model again"
    )
    nodes = [helper.make_node("Relu", ["x"], ["y"], name=n) for n in "ab"]
    assert message(model(nodes, [tensor("x", [2])], ["y"])) == (
        "value 'y' is computed twice\n  at: node b (Relu)\n  hint: export the model again"
    )
    assert message(model([], [tensor("x", [2])], ["z"])) == (
        "output 'z' is never computed\n  at: graph g\n  hint: export the model again"
    )


# Types ---------------------------------------------------------------------------------------------------------

SUPPORTED = "float16, float32, float64, bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64"


@pytest.mark.parametrize("code, shown", [(TensorProto.STRING, "string"), (TensorProto.BFLOAT16, "bfloat16")])
def test_unsupported_input_type(code: int, shown: str) -> None:
    proto = model([helper.make_node("Identity", ["x"], ["y"])], [tensor("x", [2], code)], ["y"])
    assert message(proto) == (
        f"input 'x' has element type {shown}, which is not supported\n  at: input x\n"
        f"  hint: supported are tensors of {SUPPORTED}"
    )


def test_sequence_inside() -> None:
    nodes = [helper.make_node("SequenceConstruct", ["x", "x"], ["s"], name="seq"),
             helper.make_node("SequenceAt", ["s", "i"], ["y"])]  # fmt: skip
    proto = model(nodes, [tensor("x", [2])], ["y"], constants={"i": np.array(0)})
    assert message(proto) == (
        "SequenceConstruct gives 's' the type sequence, which is not supported\n  at: node seq (SequenceConstruct)\n"
        "  hint: export the model without sequences and optionals"
    )


def test_data_dependent_shape() -> None:
    proto = model([helper.make_node("NonZero", ["x"], ["y"], name="nz")], [tensor("x", [2])], ["y"])
    assert message(proto) == (
        "the shape of 'y' depends on run-time data, which is not supported yet\n  at: node nz (NonZero)\n"
        "  hint: cut the model before NonZero, or make its shape operands constants"
    )


def test_operands_that_do_not_fit() -> None:
    proto = model([helper.make_node("Add", ["x", "w"], ["y"], name="a")], [tensor("x", ["n"])], ["y"],
                  constants={"w": np.zeros(3, np.float32)})  # fmt: skip
    text = message(proto, {"x": (2,)})
    assert text.startswith("Add does not accept its operands (x: f32[2], w: f32[3]): ")
    assert text.endswith("\n  at: node a (Add)\n  hint: check the input shapes given with --shape")


# External data -------------------------------------------------------------------------------------------------


def external(location: str, **info: str) -> onnx.ModelProto:
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], [tensor("x", [4])], ["y"])
    weight = proto.graph.initializer.add(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **info}.items():
        weight.external_data.add(key=key, value=value)
    return proto


def test_external_data_is_read(tmp_path: Path) -> None:
    data = np.random.default_rng().standard_normal(4).astype(np.float32)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"\0" * 16 + data.tobytes())
    path = tmp_path / "m.onnx"
    path.write_bytes(external("sub/w.bin", offset="16", length="16").SerializeToString())
    loaded = read_model(path)
    assert loaded.external and not read_model(relu()).external
    np.testing.assert_array_equal(bind(loaded, {}).constants["w"], data)


@pytest.mark.parametrize("kind", ["parent", "absolute", "symlink"])
def test_external_data_outside_the_folder(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"\0" * 16)
    (folder / "link.bin").symlink_to(secret)
    location = {"parent": "../secret.bin", "absolute": str(secret), "symlink": "link.bin"}[kind]
    path = folder / "m.onnx"
    path.write_bytes(external(location).SerializeToString())
    assert message(path) == (
        f"external data {location!r} lies outside the model's folder\n  at: tensor w of {path}\n"
        "  hint: move the file beside the model and store its relative path"
    )


def test_external_data_missing_or_short(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(external("w.bin", length="16").SerializeToString())
    assert message(path) == (
        f"external data 'w.bin' is missing\n  at: tensor w of {path}\n  hint: put the file at {tmp_path / 'w.bin'}"
    )
    (tmp_path / "w.bin").write_bytes(b"\0" * 8)
    assert message(path) == (
        f"external data 'w.bin' is truncated: 16 bytes are needed, 8 are there\n  at: tensor w of {path}\n"
        "  hint: download or copy the file again"
    )
    assert message(path.read_bytes()) == (
        "external data 'w.bin' of a model that comes from memory\n  at: tensor w of the model in memory\n"
        "  hint: give the path of the model file, or load the model with its external data"
    )


# Shapes --------------------------------------------------------------------------------------------------------


def test_dynamic_dimension_spells_the_option() -> None:
    assert message(relu(["n", 3, "h", None])) == (
        "input 'x' has a dynamic shape\n  at: x: float32[n,3,h,?]\n  hint: give it, for example --shape x:1x3x224x224"
    )


def test_wrong_shapes() -> None:
    proto = relu(["n", 3])
    assert message(proto, {"y": (1,)}) == (
        "the model has no input 'y'\n  at: shape of y\n  hint: the inputs are x"
    )
    assert message(proto, {"x": (1, 2, 3)}) == (
        "shape 1x2x3 of input 'x' has rank 3, the model wants rank 2\n  at: x: float32[n,3]\n  hint: --shape x:1x3"
    )
    assert message(proto, {"x": (5, 4)}) == (
        "axis 1 of input 'x' is 4, the model wants 3\n  at: x: float32[n,3]\n  hint: --shape x:5x3"
    )


def test_a_symbol_has_one_extent() -> None:
    proto = model([helper.make_node("Add", ["a", "b"], ["y"])], [tensor("a", ["n"]), tensor("b", ["n"])], ["y"])
    assert str(bound(proto, a=(7,)).outputs[0]) == "y: f32[7]"
    assert message(proto, {"a": (7,), "b": (8,)}) == (
        "axis 0 of input 'b' is 8, the model wants 7 (n)\n  at: b: float32[n]\n  hint: --shape b:7"
    )


def test_initialisers_listed_as_inputs_are_no_inputs() -> None:
    loaded = read_model(zoo.light_model("squeezenet"))
    assert [str(p) for p in loaded.inputs] == ["data_0: float32[1,3,224,224]"]
    assert loaded.opset == TARGET_OPSET and loaded.notes == ()


def test_rank_must_be_declared() -> None:
    proto = relu()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert message(proto).startswith("input 'x' declares no rank\n  at: input x\n")


# Upgrades ------------------------------------------------------------------------------------------------------


def test_upgrade_keeps_the_meaning() -> None:
    """Softmax of opset 11 works on the flattened tail; Squeeze has its axes as an attribute."""
    nodes = [helper.make_node("Softmax", ["x"], ["s"], axis=1), helper.make_node("Unsqueeze", ["s"], ["y"], axes=[0])]
    proto = model(nodes, [tensor("x", [2, 3, 4])], ["y"], opset=11)
    x = np.random.default_rng().standard_normal((2, 3, 4)).astype(np.float32)
    result = evaluate_graph(bound(proto), {"x": x})["y"]
    wide = np.exp(x.astype(np.float64)).reshape(2, 12)
    np.testing.assert_allclose(result, (wide / wide.sum(1, keepdims=True)).reshape(1, 2, 3, 4), rtol=1e-5)


X = np.random.default_rng().standard_normal((1, 4, 4, 4)).astype(np.float32)
SCALES = {"s": np.array([1, 1, 1.5, 2.5], np.float32)}


@pytest.mark.parametrize("op, inputs, constants, opset, attributes", [
    ("Resize", ["x", "s"], SCALES, 10, {"mode": "linear"}),
    ("Resize", ["x", "s"], SCALES, 10, {"mode": "nearest"}),
    ("Resize", ["x", "s"], {"s": np.array([1, 1, 0.5, 0.7], np.float32)}, 10, {"mode": "nearest"}),
    ("Upsample", ["x", "s"], SCALES, 9, {"mode": "linear"}),
    ("Upsample", ["x"], {}, 7, {"mode": "linear", "scales": [1.0, 1.0, 2.0, 2.0]}),
    ("Hardmax", ["x"], {}, 7, {}),
    ("Hardmax", ["x"], {}, 12, {"axis": 2}),
    ("LogSoftmax", ["x"], {}, 12, {}),
    ("GroupNormalization", ["x", "s", "b"], {"s": X[0, 0, 0, :2], "b": X[0, 1, 0, :2]}, 18, {"num_groups": 2}),
    ("RoiAlign", ["x", "r", "i"], {"r": np.array([[0, 0, 3, 3]], np.float32), "i": np.array([0])}, 10,
     {"output_height": 2, "output_width": 2}),
    ("Slice", ["x"], {}, 9, {"starts": [1, -2], "ends": [3, 99], "axes": [2, 3]}),
    ("ReduceLogSumExp", ["x"], {}, 11, {"axes": [1, 2], "keepdims": 0}),
    ("BatchNormalization", ["x", *"sbmv"], {n: np.abs(X[0, i, 0]) for i, n in enumerate("sbmv")}, 7, {}),
])  # fmt: skip
def test_upgrade_agrees_with_onnx_runtime(op: str, inputs: list[str], constants: dict[str, np.ndarray], opset: int,
                                          attributes: dict[str, Any]) -> None:  # fmt: skip
    """Each of these changed its form or meaning on the way to opset 21."""
    proto = model([helper.make_node(op, inputs, ["y"], name="n", **attributes)], [tensor("x", [1, 4, 4, 4])], ["y"],
                  opset, constants)  # fmt: skip
    proto.ir_version = 8
    loaded = read_model(proto)
    assert loaded.opset == TARGET_OPSET
    have = evaluate_graph(bind(loaded, {}), {"x": X})["y"]
    np.testing.assert_allclose(have, zoo.forward(proto, {"x": X})["y"], rtol=1e-4, atol=1e-5)


def test_resize_10_that_shrinks_and_enlarges() -> None:
    node = helper.make_node("Resize", ["x", "s"], ["y"], name="r")
    proto = model([node], [tensor("x", [1, 1, 4, 4])], ["y"], 10, {"s": np.array([1, 1, 2, 0.5], np.float32)})
    assert message(proto) == (
        "Resize of opset 10 to the nearest pixel needs constant scales, all at least 1 or all at most 1\n"
        "  at: node r (Resize)\n  hint: export the model with opset 11 or newer"
    )


def test_upgrade_that_fails_is_noted() -> None:
    """Statistics per element (spatial=0) do not exist after opset 8: the model stays as it is."""
    node = helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], spatial=0)
    constants = {name: np.ones((2, 4), np.float32) for name in "sbmv"}
    loaded = read_model(model([node], [tensor("x", [1, 2, 4])], ["y"], opset=7, constants=constants))
    assert loaded.opset == 7
    assert loaded.notes == ("opset 7 could not be upgraded to 21, only to 7: Attribute spatial must have value 1",)


def test_operator_without_shape_inference() -> None:
    node = helper.make_node("Normalizer", ["x"], ["y"], name="n", domain="ai.onnx.ml", norm="L2")
    proto = model([node], [tensor("x", [3, 4])], ["y"], imports=[helper.make_opsetid("ai.onnx.ml", 2)])
    assert message(proto) == (
        "ONNX cannot infer the shape of 'y', the result of Normalizer\n  at: node n (Normalizer)\n"
        "  hint: export the model without Normalizer"
    )


# Folding -------------------------------------------------------------------------------------------------------


def test_shape_arithmetic_folds() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "i"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "zero"], ["n1"]), helper.make_node("Concat", ["n1", "rest"], ["t"], axis=0),
        helper.make_node("Reshape", ["x", "t"], ["y"]), helper.make_node("ConstantOfShape", ["t"], ["unused"]),
    ]  # fmt: skip
    constants = {"i": np.array(0), "zero": np.array([0]), "rest": np.array([-1])}
    graph = bound(model(nodes, [tensor("x", ["n", 3, 4])], ["y"], constants=constants), x=(5, 3, 4))
    assert ops(graph) == ["Reshape"] and str(graph.outputs[0]) == "y: f32[5,12]"
    np.testing.assert_array_equal(graph.constants[graph.nodes[0].inputs[1]], [5, -1])


def test_random_and_large_values_do_not_fold() -> None:
    nodes = [helper.make_node("RandomNormal", [], ["r"], shape=[3]),
             helper.make_node("ConstantOfShape", ["big"], ["z"]), helper.make_node("ReduceSum", ["z"], ["s"]),
             helper.make_node("Add", ["r", "s"], ["a"]), helper.make_node("Add", ["a", "x"], ["y"])]  # fmt: skip
    graph = bound(model(nodes, [tensor("x", [3])], ["y"], constants={"big": np.array([1 << 25])}))
    assert ops(graph) == ["RandomNormal", "ConstantOfShape", "ReduceSum", "Add", "Add"]


def branches() -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """Both read the outer ``x``; both use the inner name ``t``."""
    yes = helper.make_graph([helper.make_node("Mul", ["x", "two"], ["t"])], "yes", [], [tensor("t", None)],
                            [numpy_helper.from_array(np.float32(2), "two")])  # fmt: skip
    no = helper.make_graph([helper.make_node("Neg", ["x"], ["t"])], "no", [], [tensor("t", None)])
    return yes, no


@pytest.mark.parametrize("size, expected", [(4, "Mul"), (2, "Neg")])
def test_if_with_a_known_condition_is_inlined(size: int, expected: str) -> None:
    yes, no = branches()
    nodes = [helper.make_node("Size", ["x"], ["n"]), helper.make_node("Greater", ["n", "three"], ["c"]),
             helper.make_node("If", ["c"], ["y"], then_branch=yes, else_branch=no)]  # fmt: skip
    graph = bound(model(nodes, [tensor("x", ["n"])], ["y"], constants={"three": np.array(3)}), x=(size,))
    assert ops(graph) == [expected, "Identity"]
    x = np.random.default_rng().standard_normal(size).astype(np.float32)
    np.testing.assert_array_equal(evaluate_graph(graph, {"x": x})["y"], 2 * x if size == 4 else -x)


def test_local_functions_are_inlined() -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["m"]), helper.make_node("Add", ["m", "a"], ["o"])]
    function = helper.make_function("local", "F", ["a"], ["o"], body, [helper.make_opsetid("", 21)])
    nodes = [helper.make_node("F", ["x"], ["t"], domain="local"), helper.make_node("F", ["t"], ["y"], domain="local")]
    proto = model(nodes, [tensor("x", [3])], ["y"], functions=[function], imports=[helper.make_opsetid("local", 1)])
    graph = bound(proto)
    assert ops(graph) == ["Mul", "Add", "Mul", "Add"]
    x = np.random.default_rng().standard_normal(3).astype(np.float32)
    t = x * x + x
    np.testing.assert_allclose(evaluate_graph(graph, {"x": x})["y"], t * t + t, rtol=1e-6)


@pytest.mark.parametrize("op, attributes", [
    ("Gelu", {"approximate": "tanh"}), ("Gelu", {}), ("HardSwish", {}), ("Mish", {}), ("Softmax", {"axis": 1}),
    ("Celu", {"alpha": 0.7}), ("MeanVarianceNormalization", {"axes": [0, 2]}), ("LogSoftmax", {}),
])  # fmt: skip
def test_schema_functions_expand_to_the_same_values(op: str, attributes: dict[str, Any]) -> None:
    proto = model([helper.make_node(op, ["x"], ["y"], name="f", **attributes)], [tensor("x", [2, 3, 4])], ["y"])
    kept, expanded = bind(read_model(proto), {}, {("", op)}), bind(read_model(proto), {}, ())
    assert ops(kept) == [op] and op not in ops(expanded) and str(kept.outputs[0]) == "y: f32[2,3,4]"
    x = np.random.default_rng().standard_normal((2, 3, 4)).astype(np.float32)
    want, have = (evaluate_graph(g, {"x": x})["y"] for g in (kept, expanded))
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_names_are_identifiers_and_externals_stay() -> None:
    nodes = [helper.make_node("Neg", ["in/0"], ["a.b"], name="n/1"), helper.make_node("Neg", ["a.b"], ["a_b"])]
    graph = bound(model(nodes, [tensor("in/0", [2])], ["a_b"]))
    assert str(graph) == (
        "graph g(in_0: f32[2]) -> (a_b: f32[2])\n"
        "  f32[2]               a_b_2 = Neg(in_0)  # n/1\n"
        "  f32[2]               a_b = Neg(a_b_2)  # Neg_1"
    )
    assert graph.inputs[0].external == "in/0"


def test_outputs_that_no_node_computes() -> None:
    """An input, a constant and the same value twice: each output gets a node of its own."""
    proto = model([], [tensor("x", [2])], ["x", "c"], constants={"c": np.arange(3.0)})
    graph = bound(proto)
    assert ops(graph) == ["Identity", "Identity"]
    result = evaluate_graph(graph, {"x": np.array([1, 2], np.float32)})
    assert list(result) == ["x", "c"] and list(result["c"]) == [0, 1, 2]


# Real models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, nodes", [("densenet121", 668), ("shufflenet", 203), ("squeezenet", 68)])
def test_light_models_bind(name: str, nodes: int) -> None:
    everything = {("", op) for op in ("Relu", "Softmax", "Dropout", "BatchNormalization")}
    graph = bind(read_model(zoo.light_model(name)), {}, everything)
    assert len(graph.nodes) == nodes
    assert not {"Shape", "Constant", "Unsqueeze", "ConstantOfShape"} & set(ops(graph))
