"""Reading and binding of models: exact messages for bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import BOOL, FLOAT, bound, message, model, relu, tensor

import rammer
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.read.reader import TARGET_OPSET, read_model
from rammer_testing import models as zoo

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
    assert message(b"") == ("the model file is empty\n  at: the model in memory\n  hint: download or export the model again")


def test_truncated_inside_the_graph() -> None:
    data = relu().SerializeToString()
    graph = relu().graph.ByteSize()
    start = data.index(relu().graph.SerializeToString())
    assert message(data[: start + 7]) == (
        f"the model file is truncated: graph has {graph} bytes, of which 7 exist\n"
        "  at: the model in memory\n  hint: download or copy the file again"
    )


def test_versions_that_the_package_onnx_does_not_know_are_refused() -> None:
    newest = onnx.defs.onnx_opset_version()
    for ir, opset, what in (
        (onnx.IR_VERSION + 1, 21, f"IR version {onnx.IR_VERSION + 1}, but the newest supported version is {onnx.IR_VERSION}"),
        (9, newest + 1, f"opset {newest + 1} of ai.onnx, but the newest supported version is {newest}"),
    ):
        proto = relu()
        proto.ir_version, proto.opset_import[0].version = ir, opset
        assert what in message(proto) and "install a newer version of the package onnx" in message(proto)
    proto.opset_import[0].version = newest
    assert read_model(proto).opset
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 99))
    assert "opset 99 of ai.onnx.ml, but the newest supported version is " in message(proto)


def test_a_declared_extent_of_0_is_one(rng: np.random.Generator) -> None:
    exe = rammer.compile(model([helper.make_node("Relu", ["x"], ["y"])], [tensor("x", [0, 4])], ["y"]), device="toy")
    with pytest.raises(BadInput, match=r"input 'x' has 3 elements along axis 0, the model declares float32\[0,4\]"):
        exe.run({"x": rng.standard_normal((3, 4)).astype(np.float32)})
    assert exe.run({"x": np.zeros((0, 4), np.float32)})["y"].shape == (0, 4)


def test_every_truncation_is_bad_input() -> None:
    data = relu().SerializeToString()
    for length in range(1, len(data)):
        with pytest.raises(BadInput, match=r"truncated|not an ONNX model"):
            read_model(data[:length])


# Operators and structure ---------------------------------------------------------------------------------------


def test_unknown_operator_names_the_nearest() -> None:
    proto = model([helper.make_node("Reluu", ["x"], ["y"], name="act1")], [tensor("x", [2])], ["y"])
    assert message(proto) == (
        "unknown operator Reluu in domain ai.onnx, opset 21\n  at: node act1 (Reluu)\n  hint: the nearest known operator is Relu"
    )


def test_unknown_domain() -> None:
    node = helper.make_node("FusedConv", ["x"], ["y"], domain="com.example")
    proto = model([node], [tensor("x", [2])], ["y"], imports=[helper.make_opsetid("com.example", 1)])
    assert message(proto) == (
        "unknown operator FusedConv in domain com.example, opset 1\n  at: node computing y (FusedConv)\n"
        "  hint: domain com.example is not part of ONNX, and no plugin here declares operators of it (`rammer plugins list`): "
        "install or write one that does (hook rammer_operators), or export the model with standard operators only"
    )


def test_operator_newer_than_the_opset() -> None:
    proto = model([helper.make_node("Gelu", ["x"], ["y"], name="a")], [tensor("x", [2])], ["y"], opset=19)
    assert message(proto) == (
        "unknown operator Gelu in domain ai.onnx, opset 19\n  at: node a (Gelu)\n  hint: it exists since opset 20"
    )


def test_unknown_operator_inside_a_branch() -> None:
    branch = helper.make_graph([helper.make_node("Addd", ["x", "x"], ["b"], name="n")], "b", [], [tensor("b", [2])])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    proto = model([node], [tensor("x", [2]), tensor("c", [], BOOL)], ["y"])
    assert message(proto).startswith("unknown operator Addd in domain ai.onnx, opset 21\n  at: node n (Addd)\n")


def test_cycle() -> None:
    nodes = [
        helper.make_node("Add", ["x", "c"], ["a"], name="A"),
        helper.make_node("Relu", ["a"], ["b"], name="B"),
        helper.make_node("Neg", ["b"], ["c"], name="C"),
    ]
    assert message(model(nodes, [tensor("x", [2])], ["c"])) == (
        "the graph has a cycle: A -> B -> C -> A\n  at: graph g\n  hint: export the model again"
    )


@pytest.mark.slow
def test_long_chain_in_any_order_is_sorted() -> None:
    chain = [helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], name=f"n{i}") for i in range(3000)]
    graph = bound(model(chain[::-1], [tensor("v0", [2])], ["v3000"]))
    assert [n.name for n in graph.nodes] == [f"n{i}" for i in range(3000)]


def test_undefined_and_twice_defined_values() -> None:
    node = helper.make_node("Add", ["x", "w"], ["y"], name="a")
    assert message(model([node], [tensor("x", [2])], ["y"])) == (
        "value 'w' is read but never computed\n  at: node a (Add)\n  hint: export the model again"
    )
    nodes = [helper.make_node("Relu", ["x"], ["y"], name=n) for n in "ab"]
    assert message(model(nodes, [tensor("x", [2])], ["y"])) == (
        "value 'y' is computed twice\n  at: node b (Relu)\n  hint: export the model again"
    )
    assert message(model([], [tensor("x", [2])], ["z"])) == (
        "output 'z' is never computed\n  at: graph g\n  hint: export the model again"
    )


# Types ---------------------------------------------------------------------------------------------------------

SUPPORTED = (
    "float16, float32, float64, bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, bfloat16, float8_e4m3fn, "
    "float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu, float6_e2m3fn, float6_e3m2fn, float4_e2m1fn, int4, uint4, "
    "int2, uint2"
)


@pytest.mark.parametrize("code, shown", [(TensorProto.COMPLEX64, "complex64"), (TensorProto.COMPLEX128, "complex128")])
def test_unsupported_input_type(code: int, shown: str) -> None:
    proto = model([helper.make_node("Identity", ["x"], ["y"])], [tensor("x", [2], code)], ["y"])
    assert message(proto) == (
        f"input 'x' has element type {shown}, which is not supported\n  at: input x\n  hint: supported are tensors of {SUPPORTED}"
    )


def test_sequence_inside() -> None:
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["s"], name="seq"),
        helper.make_node("SequenceAt", ["s", "i"], ["y"]),
    ]
    proto = model(nodes, [tensor("x", [2])], ["y"], constants={"i": np.array(0)})
    assert message(proto) == (
        "SequenceConstruct reads or computes values that are not numeric tensors\n  at: node seq (SequenceConstruct)\n"
        "  hint: run the model as a whole"
    )


_F, _I, _B = FLOAT, TensorProto.INT32, BOOL


@pytest.mark.parametrize(
    ("op", "kinds", "opset", "says"),
    [
        ("Elu", (_I,), 17, "Elu does not take int32 as its input 'X'"),
        ("HardSigmoid", (_I,), 17, "HardSigmoid does not take int32 as its input 'X'"),
        ("IsNaN", (_I,), 17, "IsNaN does not take int32 as its input 'X'"),
        ("Round", (_I,), 17, "Round does not take int32 as its input 'X'"),
        ("ArgMax", (_B,), 17, "ArgMax does not take bool as its input 'data'"),
        ("Relu", (_I,), 13, "Relu does not take int32 as its input 'X'"),
        ("Clip", (_F, _I), 17, "Clip has inputs of float32 and, as its 'min', int32, which must be of one element type"),
        ("Where", (_B, _F, _I), 17, "Where has inputs of float32 and, as its 'Y', int32, which must be of one element type"),
        (
            "Concat",
            (_F, _F, _I),
            17,
            "Concat has inputs of float32 and, as its 'inputs', int32, which must be of one element type",
        ),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_element_types_that_the_schema_excludes(op: str, kinds: tuple[int, ...], opset: int, says: str, known: bool) -> None:
    # The same with constant operands, which would otherwise be folded first.
    names = [f"x{i}" for i in range(len(kinds))]
    attributes = {"axis": 0} if op == "Concat" else {}
    made = [helper.make_tensor(n, k, [2], [0, 1]) for n, k in zip(names, kinds, strict=True)]
    inputs = [] if known else [helper.make_tensor_value_info(n, k, [2]) for n, k in zip(names, kinds, strict=True)]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], "n", **attributes)],
        "g",
        inputs,
        [helper.make_empty_tensor_value_info("y")],
        made if known else [],
    )
    text = message(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]).SerializeToString())
    assert text.startswith(f"{says}\n  at: node n ({op})\n  hint: "), text


@pytest.mark.parametrize("count", [1, 3])
def test_a_split_into_another_number_of_parts(count: int) -> None:
    """Check that the error is raised here: ONNX's inference ends the process at one part with two outputs."""
    node = helper.make_node("Split", ["x"], ["a", "b"], "s", num_outputs=count)
    text = message(model([node], [tensor("x", [4])], ["a", "b"], opset=18))
    assert text.startswith(f"attribute num_outputs of Split is {count}, where it has 2 outputs\n  at: node s (Split)")


def test_element_types_follow_attributes_and_bodies() -> None:
    """Check that Cast determines its result type, and If that of its branches: Relu after it takes float32, not int32."""
    for code, good in ((TensorProto.FLOAT, True), (TensorProto.INT32, False)):
        branch = helper.make_graph(
            [helper.make_node("Cast", ["x"], ["b"], to=code)], "b", [], [helper.make_tensor_value_info("b", code, [2])]
        )
        nodes = [
            helper.make_node("If", ["c"], ["z"], "if", then_branch=branch, else_branch=branch),
            helper.make_node("Relu", ["z"], ["y"], "last"),
        ]
        graph = helper.make_graph(nodes, "g", [tensor("x", [2]), tensor("c", [], BOOL)], [tensor("y", [2])])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
        if good:
            read_model(made)
        else:
            assert "Relu does not take int32" in message(made.SerializeToString())


def test_data_dependent_shape() -> None:
    proto = model([helper.make_node("NonZero", ["x"], ["y"], name="nz")], [tensor("x", [2])], ["y"])
    assert message(proto) == (
        "the shape of 'y' depends on run-time data\n  at: node nz (NonZero)\n"
        "  hint: run the model as a whole, cut it before NonZero, or make its shape operands constants"
    )


def test_operands_that_do_not_fit() -> None:
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"], name="a")],
        [tensor("x", ["n"])],
        ["y"],
        constants={"w": np.zeros(3, np.float32)},
    )
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


def test_external_data_is_read(tmp_path: Path, rng: np.random.Generator) -> None:
    data = rng.standard_normal(4).astype(np.float32)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"\0" * 16 + data.tobytes())
    path = tmp_path / "m.onnx"
    path.write_bytes(external("sub/w.bin", offset="16", length="16").SerializeToString())
    loaded = read_model(path)
    assert loaded.external and not read_model(relu()).external
    np.testing.assert_array_equal(bind(loaded, {}).constants["w"], data)


def hidden(place: str) -> onnx.ModelProto:
    """Return a model with external data in an unusual place. The place is a branch or a constant of a local function, or a sparse
    tensor."""
    weight = external("w.bin").graph.initializer[0]
    imports, results = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)], [tensor("o", [4])]
    if place == "sparse":
        proto = model([helper.make_node("Add", ["x", "w"], ["y"])], [tensor("x", [4])], ["y"])
        at = helper.make_tensor("at", TensorProto.INT64, [4], range(4))
        proto.graph.sparse_initializer.append(helper.make_sparse_tensor(weight, at, [4]))
        return proto
    if place == "constant":
        body = [helper.make_node("Constant", [], ["w"], value=weight), helper.make_node("Add", ["a", "w"], ["b"])]
    else:
        yes = helper.make_graph([helper.make_node("Add", ["a", "w"], ["o"])], "yes", [], results, [weight])
        no = helper.make_graph([helper.make_node("Neg", ["a"], ["o"])], "no", [], results)
        true = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("", TensorProto.BOOL, [], [True]))
        body = [true, helper.make_node("If", ["c"], ["b"], then_branch=yes, else_branch=no)]
    function = helper.make_function("local", "F", ["a"], ["b"], body, imports[:1])
    call = helper.make_node("F", ["x"], ["y"], domain="local")
    return model([call], [tensor("x", [4])], ["y"], functions=[function], imports=imports[1:])


@pytest.mark.parametrize("place", ["branch", "constant", "sparse"])
def test_external_data_of_any_tensor_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, rng: np.random.Generator
) -> None:
    """Check that a branch of a local function reads the model's file, not a file in the current folder."""
    data = rng.standard_normal(4).astype(np.float32)
    (tmp_path / "w.bin").write_bytes(data.tobytes())
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    for source in (hidden(place).SerializeToString(), tmp_path / "sub" / "m.onnx"):
        if isinstance(source, Path):
            source.write_bytes(hidden(place).SerializeToString())
        assert "external data 'w.bin'" in message(source)
    (tmp_path / "m.onnx").write_bytes(hidden(place).SerializeToString())
    loaded = read_model(tmp_path / "m.onnx")
    assert loaded.external
    np.testing.assert_array_equal(next(iter(bind(loaded, {}).constants.values())), data)


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
        f"external data {location!r} is outside the model's folder\n  at: tensor w of {path}\n"
        "  hint: move the file next to the model and store its relative path"
    )


def test_external_data_missing_or_short(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(external("w.bin", length="16").SerializeToString())
    assert message(path) == (
        f"external data 'w.bin' is missing\n  at: tensor w of {path}\n  hint: put the file at {tmp_path / 'w.bin'}"
    )
    (tmp_path / "w.bin").write_bytes(b"\0" * 8)
    assert message(path) == (
        f"external data 'w.bin' is truncated: 16 bytes are needed, 8 exist\n  at: tensor w of {path}\n"
        "  hint: download or copy the file again"
    )
    assert message(path.read_bytes()) == (
        "external data 'w.bin' of a model that is loaded from memory\n  at: tensor w of the model in memory\n"
        "  hint: give the path of the model file, or load the model with its external data"
    )


# Shapes --------------------------------------------------------------------------------------------------------


def test_dynamic_dimension_spells_the_option() -> None:
    assert message(relu(["n", 3, "h", None])) == (
        "input 'x' has a dynamic shape\n  at: x: float32[n,3,h,?]\n  hint: give it, for example --shape x:1x3x224x224"
    )


def test_wrong_shapes() -> None:
    proto = relu(["n", 3])
    assert message(proto, {"y": (1,)}) == ("the model has no input 'y'\n  at: shape of y\n  hint: the inputs are x")
    assert message(proto, {"x": (1, 2, 3)}) == (
        "shape 1x2x3 of input 'x' has rank 3, the model declares rank 2\n  at: x: float32[n,3]\n  hint: --shape x:1x3"
    )
    assert message(proto, {"x": (5, 4)}) == (
        "axis 1 of input 'x' is 4, the model declares 3\n  at: x: float32[n,3]\n  hint: --shape x:5x3"
    )


def test_a_symbol_has_one_extent() -> None:
    proto = model([helper.make_node("Add", ["a", "b"], ["y"])], [tensor("a", ["n"]), tensor("b", ["n"])], ["y"])
    assert str(bound(proto, a=(7,)).outputs[0]) == "y: f32[7]"
    assert message(proto, {"a": (7,), "b": (8,)}) == (
        "axis 0 of input 'b' is 8, the model declares 7 (n)\n  at: b: float32[n]\n  hint: --shape b:7"
    )


def test_initialisers_listed_as_inputs_are_no_inputs() -> None:
    loaded = read_model(zoo.light_model("squeezenet"))
    assert [str(p) for p in loaded.inputs] == ["data_0: float32[1,3,224,224]"]
    assert loaded.opset == TARGET_OPSET and loaded.notes == ()


def test_a_shape_that_is_not_declared_is_given() -> None:
    proto = relu()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert str(read_model(proto).inputs[0]) == "x: float32[...]"
    for shape in ((), (3,), (2, 3, 4)):
        assert bound(proto, x=shape).inputs[0].type.shape == shape
    assert message(proto) == ("input 'x' declares no shape\n  at: x: float32[...]\n  hint: give it, for example --shape x:1x16")
    assert message(proto, {"x": (2, -1)}).startswith("shape 2x-1 of input 'x' has a negative extent")
