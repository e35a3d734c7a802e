"""Extents below 0, declared or inferred, before a Slice: ONNX's own inference ends the process on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, defs, helper, numpy_helper, shape_inference

from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.read.onnx_inference_guards import declare_types
from rammer.frontend.read.reader import read_model
from rammer.ir.graph import Graph
from rammer_testing.graph_reference import evaluate_graph
from rammer_testing.sandbox import forked

BOUNDS = {"s": np.array([0, -1]), "e": np.array([1, -9]), "a": np.array([0, -1]), "t": np.array([1, -1])}
SLICED = helper.make_node("Slice", ["m", "s", "e", "a", "t"], ["y"])


def model(before: Sequence[NodeProto], shape: Sequence[int], constants: Mapping[str, Any], opset: int = 13) -> ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(v), n) for n, v in {**BOUNDS, **constants}.items()]
    graph = helper.make_graph(
        [*before, SLICED],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def node(op: str, *constants: str, **attributes: Any) -> list[NodeProto]:
    return [helper.make_node(op, ["x", *constants], ["m"], **attributes)]


KERNEL = {"c": np.ones((1, 1, 5, 5), np.float32)}
#: Operators whose inferred result has a negative extent along an axis.
BELOW = {
    "pad": (node("Pad", "c"), {"c": np.array([0, 0, 0, -3, 0, 0, 0, -3])}),
    "conv": (node("Conv", "c"), KERNEL),
    "transposed": (node("ConvTranspose", "c", pads=[9] * 4), KERNEL),
    "pool": (node("MaxPool", kernel_shape=[5, 5]), {}),
    "lp pool": (node("LpPool", kernel_shape=[5, 5]), {}),
    "expand": (node("Expand", "c"), {"c": np.array([1, 1, 2, -4])}),
    "resize": (node("Resize", "", "", "c"), {"c": np.array([1, 1, 2, -4])}),
    "unpool": (
        [helper.make_node("MaxUnpool", ["x", "c"], ["m"], kernel_shape=[2, 2], pads=[9] * 4)],
        {"c": np.zeros((1, 1, 2, 2), np.int64)},
    ),
}


def bound(made: ModelProto, **shapes: tuple[int, ...]) -> Graph:
    return bind(read_model(made), shapes)


@pytest.mark.parametrize("name", BELOW)
def test_extents_inferred_below_0_are_bad_input(name: str, tmp_path: Path) -> None:
    before, constants = BELOW[name]

    def work() -> int:
        with pytest.raises(BadInput):
            bound(model(before, (1, 1, 2, 2), constants))
        return 0

    code, signal, *_ = forked(work, tmp_path / "out", tmp_path / "err", 60)
    assert (code, signal) == (0, 0), (tmp_path / "err").read_text()


@pytest.mark.parametrize("extent", [-1, -2])
@pytest.mark.parametrize("opset", [11, 21])
def test_extents_declared_below_0_are_open(extent: int, opset: int, tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)

    def work() -> int:
        made = model(node("Identity"), (extent, extent), {}, opset)
        given = made.SerializeToString()
        np.testing.assert_array_equal(evaluate_graph(bound(made, x=(2, 3)), {"x": x})["y"], x[:1, ::-1])
        assert made.SerializeToString() == given, "the caller's model was changed"
        return 0

    code, signal, *_ = forked(work, tmp_path / "out", tmp_path / "err", 60)
    assert (code, signal) == (0, 0), (tmp_path / "err").read_text()


def test_extents_declared_in_a_body_are_open(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("Slice", ["h", "s", "e", "a", "t"], ["o"]), helper.make_node("Identity", ["k"], ["k2"])],
        "b",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("k", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, [-1, -1]),
        ],
        [helper.make_tensor_value_info("k2", TensorProto.BOOL, []), helper.make_tensor_value_info("o", TensorProto.FLOAT, None)],
    )
    loop = helper.make_node("Loop", ["n", "", "x"], ["m"], body=inner)

    def work() -> int:
        try:
            bound(model([loop], (2, 3), {"n": np.array(1)}, 21))
        except BadInput:  # the shape of the result may be unknown
            return 0
        return 0

    code, signal, *_ = forked(work, tmp_path / "out", tmp_path / "err", 60)
    assert (code, signal) == (0, 0), (tmp_path / "err").read_text()


#: Results with negative extents that ONNX infers inside a body, for x with two elements.
INSIDE = {
    "conv": ([helper.make_node("Conv", ["x", "w"], ["m"], strides=[1])], {"w": np.ones((1, 1, 5), np.float32)}),
    "pad": ([helper.make_node("Pad", ["x", "p"], ["m"])], {"p": np.array([0, 0, 0, 0, 0, -3])}),
    "top": ([helper.make_node("TopK", ["x", "k"], ["m", "places"])], {"k": np.array([-3])}),
}
#: Operators that end the process on these results.
READERS = {
    "slice": [helper.make_node("Slice", ["m", "s", "e", "a"], ["y"])],
    "gather": [helper.make_node("Cast", ["m"], ["i"], to=7), helper.make_node("GatherND", ["x", "i"], ["y"])],
}


def _inside(kind: str, nodes: Sequence[NodeProto], constants: Mapping[str, Any], opset: int) -> ModelProto:
    bounds = {"s": np.array([0]), "e": np.array([9]), "a": np.array([-1])}
    held = [
        helper.make_node("Constant", [], [n], value=numpy_helper.from_array(np.asarray(v)))
        for n, v in {**bounds, **constants}.items()
    ]
    result, cond = helper.make_empty_tensor_value_info("y"), helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    body = helper.make_graph([*held, *nodes], "body", [], [result])
    if kind == "Loop":
        body.input.extend([helper.make_tensor_value_info("n", TensorProto.INT64, []), cond])
        body.output.insert(0, helper.make_empty_tensor_value_info("c"))
    given = {"body": body} if kind == "Loop" else {"then_branch": body, "else_branch": body}
    called = helper.make_node(kind, ["", ""] if kind == "Loop" else ["c"], ["z"], **given)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 2])
    whole = [*held, *nodes] if kind == "plain" else [called]
    ends = [helper.make_empty_tensor_value_info("y" if kind == "plain" else "z")]
    graph = helper.make_graph(whole, "g", [x] if kind == "plain" else [x, cond], ends)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def test_extents_inferred_below_0_in_bodies_are_bad_input(tmp_path: Path) -> None:
    for kind, opset in (("If", 18), ("If", 22), ("Loop", 22), ("plain", 18)):
        for reader in READERS.values():
            made = [_inside(kind, [*before, *reader], constants, opset) for before, constants in INSIDE.values()]

            def work(made: Sequence[ModelProto] = made) -> int:
                for one in made:
                    with pytest.raises(BadInput):
                        bound(one)
                return 0

            code, signal, *_ = forked(work, tmp_path / "out", tmp_path / "err", 60)
            assert (code, signal) == (0, 0), f"{kind} {opset} {reader[-1].op_type} {(tmp_path / 'err').read_text()}"


#: Operators whose results ONNX leaves without a type, with their operands: a sparse initialiser, a contradictory body, and an
#: operator without inference.
UNTYPED: dict[str, tuple[str, dict[str, Any]]] = {
    "Einsum": ("w", {"equation": "ab->ab"}),
    "MeanVarianceNormalization": ("x", {"axes": [0]}),
    "Normalizer": ("x", {"domain": "ai.onnx.ml", "norm": "L2"}),
}


def _untyped(producer: str, reader: NodeProto, inside: bool, opset: int) -> ModelProto:
    source, attributes = UNTYPED[producer]
    nodes = [helper.make_node(producer, [source], ["m"], **attributes), reader]
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.ones(2, np.float32), "w"), numpy_helper.from_array(np.array([0, 4])), [2, 3]
    )
    x = helper.make_tensor_value_info("x", TensorProto.DOUBLE, [2, 3])
    ends = [helper.make_empty_tensor_value_info("y")]
    if inside:
        body = helper.make_graph(nodes, "body", [], ends)
        nodes = [helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body)]
        ends = [helper.make_empty_tensor_value_info("z")]
    c = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [x, c], ends, sparse_initializer=[sparse])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 2)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def test_operands_without_a_type(tmp_path: Path) -> None:
    """Check EyeLike with its dtype and RegexFullMatch, which read the missing type of an operand."""
    eye = helper.make_node("EyeLike", ["m"], ["y"], dtype=7)
    cases = [(p, eye, inside, opset) for p in UNTYPED for inside in (False, True) for opset in (13, 20, 22)]
    cases += [(p, helper.make_node("RegexFullMatch", ["m"], ["y"], pattern="a"), False, 20) for p in UNTYPED]

    def work() -> int:
        for producer, reader, inside, opset in cases:
            made = _untyped(producer, reader, inside, opset)
            if inside or reader is not eye or producer == "Normalizer":  # the shape of a body's result may be unknown
                with suppress(BadInput):
                    bound(made)
            else:
                given = {"x": np.ones((2, 3)), "c": np.array(True)}
                np.testing.assert_array_equal(evaluate_graph(bound(made), given)["y"], np.eye(2, 3))
        return 0

    code, signal, *_ = forked(work, tmp_path / "out", tmp_path / "err", 60)
    assert (code, signal) == (0, 0), (tmp_path / "err").read_text()


def _plausible(schema: defs.OpSchema) -> list[AttributeProto]:
    """Return every attribute of an operator, with a value of its kind."""
    kinds: dict[str, Any] = {"INT": 1, "INTS": [1, 1], "FLOAT": 1.0, "FLOATS": [1.0], "STRING": "a", "STRINGS": ["a"]}
    known = [(n, kinds.get(a.type.name), a) for n, a in schema.attributes.items()]
    return [
        a.default_value if a.default_value.type else helper.make_attribute(n, v)
        for n, v, a in known
        if a.default_value.type or v is not None
    ]


def test_no_operator_ends_the_process_over_operands_without_a_type(tmp_path: Path) -> None:
    """Check all versions of all ONNX operators: EyeLike and RegexFullMatch used to end the process."""
    schemas = [s for s in defs.get_all_schemas_with_history() if s.domain == "" and s.max_input]

    def work() -> int:
        for schema in schemas:
            inputs = [f"x{i}" for i in range(max(schema.min_input, 1))]
            node = helper.make_node(schema.name, inputs, [f"y{i}" for i in range(max(schema.min_output, 1))])
            node.attribute.extend(_plausible(schema))
            sources = [helper.make_node("Normalizer", ["x"], [n], domain="ai.onnx.ml") for n in inputs]
            graph = helper.make_graph([*sources, node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])], [])
            imports = [helper.make_opsetid("", schema.since_version), helper.make_opsetid("ai.onnx.ml", 2)]
            made = helper.make_model(graph, opset_imports=imports, ir_version=8)
            declare_types([made.graph])
            (tmp_path / "at").write_text(f"{schema.name} {schema.since_version}")
            for strict in (False, True):
                with suppress(Exception):  # any exception of ONNX's C++ is fine while the process lives
                    shape_inference.infer_shapes(made, check_type=strict, strict_mode=strict, data_prop=True)
        return 0

    assert len(schemas) > 400
    code, signal, *_ = forked(work, tmp_path / "out", tmp_path / "err", 60)
    assert (code, signal) == (0, 0), (tmp_path / "at").read_text()
