"""The evaluator of constant folding and host operators: our expressions, or verified implementations."""

from __future__ import annotations

import functools
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, defs, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.bind.evaluator import JUDGED, check_host, evaluate_node, evaluate_proto, host_caveat
from rammer.frontend.host.host_node import HostNode
from rammer.frontend.host.operators import OPERATORS
from rammer.frontend.lower.lowering_registry import REGISTRY
from rammer.frontend.op_traits import Trait, operators
from rammer.frontend.read.function_bodies import has_function
from rammer.frontend.read.node_protos import is_random
from rammer.frontend.read.reader import read_model
from rammer.frontend.spec_rulings.operator_questions import Decision
from rammer.frontend.spec_rulings.rulings import BY_OPERATOR
from rammer.ir.graph import Node
from rammer.ir.types import TensorType
from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.case import OperatorCase
from rammer_testing.operators.oracles import judge, onnxruntime, ours

F32 = np.float32
#: Verified operators without a generator, and their tests: control flow below, constants by their definition, optionals in
#: test_foreign and ONNX's tests, maps in test_classical, bits in tests/devices/test_stored_types.
ELSEWHERE = {"If", "Loop", "Scan", "Constant", "CastLike", "Optional", "BitCast", "ZipMap"} | {
    *("OneHotEncoder", "CategoryMapper", "DictVectorizer", "CastMap", "StringNormalizer"),  # test_words.py
    "com.microsoft.Tokenizer",  # test_contrib_hosted.py
}
#: Operators whose outermost use has no implementation, or of which a decision refuses some uses.
MAY_REFUSE = {"MaxRoiPool", "Erf"}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("op", sorted(DESCRIBED))
def test_folded_as_the_voices_say(op: str) -> None:
    verdict = judge(drawn(op, 2, 0).folded())
    allowed = {"ok", "alone", "runtime", "reference"} | ({"refused"} if op in MAY_REFUSE else set())
    assert verdict.kind in allowed, f"{verdict.kind}: {verdict.case}: {verdict.text}"


def test_every_operator_is_lowered_judged_or_named() -> None:
    newest = {s.name: s for s in defs.get_all_schemas() if s.domain == ""}
    assert len(newest) > 180
    assert {*JUDGED, *OPERATORS} - ELSEWHERE <= set(DESCRIBED)
    for op, schema in newest.items():
        judged = op in JUDGED or op in OPERATORS
        said = host_caveat(Node(op, (), ("y",)))
        assert bool(said) == (("", op) not in REGISTRY and not judged and op not in operators(Trait.RANDOM)), op
        # Operators verified by the search have cases; those with only a lowering are searched in test_operators.
        assert has_function(schema) or said or op in operators(Trait.RANDOM) or judged or ("", op) in REGISTRY


def test_the_unjudged_are_not_folded_but_named() -> None:
    texts = numpy_helper.from_array(np.array(["a", "b"], dtype=object), "s")
    node = helper.make_node("StringConcat", ["s", "s"], ["y"])
    graph = helper.make_graph([node], "g", [], [onnx.ValueInfoProto(name="y")], [texts])
    with pytest.raises(BadInput):
        bind(read_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])), {})
    assert "not compared with ONNX Runtime" in host_caveat(Node("ImageDecoder", (), ("y",)))


U8 = functools.partial(np.asarray, dtype=np.uint8)
ONE = np.asarray(1, F32)
#: An image of one dimension, its scale and zero point, and weights of two channels.
LINE = (U8([[[9, 1, 7, 4]]]), ONE, U8(2), U8([[[3, 4]], [[1, 9]]]))


#: Cases that onnx.reference folds wrongly or not at all.
CASES = [
    OperatorCase("LpNormalization", 22, (np.array([[3, -1], [0, -2]], F32),), {"p": 1}),
    OperatorCase("LpNormalization", 22, (np.array([[3, -1], [0, -2]], F32),), {"p": 2, "axis": 0}),
    OperatorCase(
        "LpPool", 22, (np.arange(-4, 5, dtype=F32).reshape(1, 1, 3, 3),), {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0]}
    ),
    OperatorCase("MaxPool", 22, (np.arange(24, dtype=F32).reshape(1, 2, 4, 3),), {"kernel_shape": [2, 2]}, 2),
    OperatorCase(
        "MaxPool", 22, (np.arange(12, dtype=F32).reshape(1, 1, 4, 3),), {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"}
    ),
    OperatorCase("GlobalMaxPool", 22, (np.arange(24, dtype=F32).reshape(1, 2, 2, 3, 2),)),
    OperatorCase("LRN", 13, (np.arange(1, 9, dtype=F32).reshape(1, 2, 2, 2),), {"size": 1, "alpha": 0.5}),
    OperatorCase("Hardmax", 12, (np.arange(8, dtype=F32).reshape(2, 2, 2),), {"axis": 1}),
    OperatorCase("ReduceL2", 18, (np.array([100, 100, 100], np.int32),)),
    OperatorCase("ReduceLogSum", 18, (np.array([0, 0], F32),)),
    OperatorCase("LogSoftmax", 13, (np.array([[-np.inf, 0, 1], [-np.inf, 2, -np.inf]], F32),)),
    OperatorCase("GatherElements", 13, (np.arange(512)[None], np.arange(128)[None]), {"axis": 1}),
    OperatorCase("GatherElements", 13, (np.arange(12).reshape(3, 4), np.array([[2, -1], [0, 0]])), {"axis": 0}),
    OperatorCase("Unique", 11, (np.array([[1, 2, 1], [0, 2, 0]], F32),), {"axis": 0, "sorted": 0}, 4),
    OperatorCase("Softplus", 7, (np.array([-20, -50], F32),)),
    *(
        OperatorCase("QuantizeLinear", o, (np.array([1e10, -1e10, 3e38, 2.5, 3.5, -1.5], F32), ONE, U8(3)))
        for o in (10, 13, 19, 21)
    ),
    OperatorCase("QLinearMatMul", 10, (U8([[5], [7]]), ONE, U8(0), U8([[1]]), np.asarray(0.5, F32), U8(0), ONE, U8(3))),
    OperatorCase("QLinearConv", 10, (*LINE, np.array([0.5, 0.25], F32), U8([1, 2]), ONE, U8(4), np.array([3, -4], np.int32))),
    OperatorCase("ConvInteger", 10, (LINE[0], LINE[3], U8(2), U8(5)), {"pads": [1, 0], "dilations": [2], "strides": [2]}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_folded_as_onnx_runtime(case: OperatorCase) -> None:
    mine, theirs = ours(case.folded()), onnxruntime(case)
    assert mine.values is not None and theirs.values is not None and not mine.host, (mine, theirs)
    for have, want in zip(mine.values, theirs.values, strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=1e-5)


@pytest.mark.parametrize("op", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"direction": "reverse"},
        {"direction": "bidirectional"},
        {"clip": 0.3},
        {"activations": ["Relu", "Softsign", "HardSigmoid"]},
    ],
    ids=str,
)
def test_folded_recurrent_layers(op: str, attributes: dict[str, Any], rng: np.random.Generator) -> None:
    gates, functions = {"RNN": (1, 1), "GRU": (3, 2), "LSTM": (4, 3)}[op]
    many = 2 if attributes.get("direction") == "bidirectional" else 1
    shapes = ((5, 2, 3), (many, gates * 4, 3), (many, gates * 4, 4), (many, 2 * gates * 4))
    operands = (*(rng.uniform(-1, 1, s).astype(F32) for s in shapes), np.array([5, 2], np.int32))
    given = {k: v[:functions] if k == "activations" else v for k, v in attributes.items()}
    case = OperatorCase(op, 14, operands, {"hidden_size": 4, **given}, 2)
    for mine in (ours(case.folded()), ours(case)):
        theirs = onnxruntime(case)
        assert mine.values is not None and theirs.values is not None and not mine.host, (mine, theirs)
        for have, want in zip(mine.values, theirs.values, strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_bodies_use_the_same_operators(rng: np.random.Generator) -> None:
    """Check a branch that reverses a sequence: the reference runs it forward."""
    state = [2, 1, 3]
    weights = [numpy_helper.from_array(rng.uniform(-1, 1, (1, 3, 3)).astype(F32), n) for n in ("w", "r")]
    nodes = [
        helper.make_node("RNN", ["x", "w", "r"], ["o"], hidden_size=3, direction="reverse"),
        helper.make_node("Softplus", ["o"], ["p"]),
    ]
    shown = helper.make_tensor_value_info("p", TensorProto.FLOAT, [2, 1, 1, 3])
    yes = helper.make_graph(nodes, "yes", [], [shown], weights)
    no = helper.make_graph(
        [helper.make_node("Constant", [], ["p"], value=numpy_helper.from_array(np.zeros((2, 1, 1, 3), F32)))], "no", [], [shown]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=yes, else_branch=no)
    ports = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, state),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph([node], "g", ports, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 1, 1, 3])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8)
    feeds = {"x": rng.uniform(-1, 1, state).astype(F32) - 9, "c": np.array(True)}
    want = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    bound = bind(read_model(model), {})
    (branch,) = bound.nodes
    have = evaluate_node(branch, feeds, dict(bound.types), host=True)
    np.testing.assert_allclose(have["y"], want, rtol=1e-5, atol=1e-12)


def test_what_is_known_to_be_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # All current decisions concern operators with expressions, so this test adds a decision for another operator.
    decision = Decision(("StringSplit",), "words", lambda use: use.attr("maxsplit") == 1, ("reference",), "as a test")
    monkeypatch.setitem(cast("dict[str, tuple[Decision, ...]]", BY_OPERATOR), "StringSplit", (decision,))
    node = Node("StringSplit", ("x",), ("y",), {"maxsplit": 1}, "sample", "", 20)
    with pytest.raises(BadInput, match="no trustworthy implementation"):
        check_host(node, {"x": TensorType("float32", (1,))})
    with pytest.raises(BadInput, match="no trustworthy implementation"):
        HostNode(node, {"y": TensorType("float32", (1,))}).run({"x": np.ones(1, F32)})
    said = ours(
        OperatorCase(
            "LSTM",
            14,
            (np.ones((1, 1, 1), F32), np.ones((1, 4, 1), F32), np.ones((1, 4, 1), F32)),
            {"hidden_size": 1, "activations": ["Sigmoid", "Tanh", "Swash"]},
        )
    )
    assert said.values is None and not said.broken and "Swash" in said.why


def test_training_statistics(rng: np.random.Generator) -> None:
    """Check BatchNormalization-15: 'running_mean = input_mean * momentum + current_mean * (1 - momentum)'."""
    x = rng.uniform(-1, 1, (3, 2, 4)).astype(F32)
    s, b, m, v = (rng.uniform(0.5, 1, 2).astype(F32) for _ in range(4))
    said = ours(OperatorCase("BatchNormalization", 15, (x, s, b, m, v), {"training_mode": 1, "momentum": 0.75}, 3))
    mean, var = x.mean(axis=(0, 2)), x.var(axis=(0, 2))
    y = (x - mean[:, None]) / np.sqrt(var[:, None] + 1e-5) * s[:, None] + b[:, None]
    assert said.values is not None
    for have, want in zip(said.values, (y, m * 0.75 + mean * 0.25, v * 0.75 + var * 0.25), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23, 24, 25])
def test_quantisation_runs_at_every_version(opset: int) -> None:
    """Check the versions that the reference lacks; they mean the same as versions that it has."""
    node = helper.make_node("DequantizeLinear", ["x", "s", "z"], ["y"])
    values = {"x": np.array([3, 7], np.uint8), "s": np.float32(0.5), "z": np.uint8(1)}
    made = evaluate_proto(node, {n: np.asarray(v) for n, v in values.items()}, {"": opset})
    assert made["y"].tolist() == [1, 3]
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
    values = {"x": np.array([1, 300, -2.25], np.float32), "s": np.float32(0.5), "z": np.uint8(1)}
    made = evaluate_proto(node, {n: np.asarray(v) for n, v in values.items()}, {"": opset})
    assert made["y"].tolist() == [3, 255, 0]


@pytest.mark.parametrize("numbers", [(0, 0), (-1.5, 0.3, 2.5), (0.4, 3), (-2,)])
def test_dynamic_quantisation_folded_is_that_at_run_time(numbers: tuple[float, ...]) -> None:
    x = np.array(numbers, F32)
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])
    made = evaluate_proto(node, {"x": x}, {"": 17})
    body = defs.get_schema("DynamicQuantizeLinear", 17, "").function_body.node
    values = {"x": x}
    for step in body:
        values |= evaluate_proto(step, {n: values[n] for n in step.input if n}, {"": 17})
    # "y_scale = (maximum(0, max(x)) - minimum(0, min(x))) / (qmax - qmin)": 0 for zeros, where folding once gave 1 / 255.
    assert made["scale"] == values["y_scale"] == (max(x.max(), 0) - min(x.min(), 0)) / F32(255)
    assert np.array_equal(made["y"], values["y"]) and made["zero"] == values["y_zero_point"]
    assert [made[n].dtype for n in ("y", "scale", "zero")] == [np.uint8, F32, np.uint8]


@pytest.mark.parametrize("op", ["MatMulInteger", "QLinearMatMul"])
def test_zero_points_of_rows_and_columns(op: str) -> None:
    """Check 'per row for a and per column for b', which ONNX Runtime lacks; the reference confuses rows with columns."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 255, (2, 3, 3), np.uint8), rng.integers(-99, 99, (3, 3), np.int8)
    rows, columns = rng.integers(0, 255, (3,), np.uint8), rng.integers(-99, 99, (3,), np.int8)
    total = (a.astype(int) - rows[:, None]) @ (b.astype(int) - columns)
    if op == "MatMulInteger":
        values, want = {"a": a, "b": b, "za": rows, "zb": columns}, total
    else:
        scale = {n: 2.0 ** rng.integers(-6, -2, 3).astype(F32) for n in "aby"}
        zero = rng.integers(0, 255, (3,), np.uint8)
        values = {"a": a, "sa": scale["a"], "za": rows, "b": b, "sb": scale["b"], "zb": columns, "sy": scale["y"], "zy": zero}
        quotient = total * (scale["a"][:, None].astype(float) * scale["b"] / scale["y"][:, None])
        want = np.clip(np.rint(quotient) + zero[:, None], 0, 255)
    types = {"y": TensorType("int32" if op == "MatMulInteger" else "uint8", want.shape)}
    (have,) = evaluate_node(Node(op, tuple(values), ("y",)), values, types).values()
    np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_blocks_are_counted_from_either_end(axis: int, dtype: Any) -> None:
    rng = np.random.default_rng(4)
    x, scale = rng.normal(0, 20, (2, 5, 3)).astype(dtype), rng.uniform(0.1, 2, (2, 3, 3)).astype(dtype)
    zero = rng.integers(-9, 9, (2, 3, 3)).astype(np.int16)
    whole, moved = (np.repeat(v, 2, 1)[:, :5] for v in (scale, zero))
    given = {"x": x, "s": scale, "z": zero}
    attributes = {"axis": axis, "block_size": 2}
    types = {"y": TensorType("int16", x.shape), "x": TensorType(str(np.dtype(dtype)), x.shape)}
    (made,) = evaluate_node(Node("QuantizeLinear", tuple(given), ("y",), attributes), given, types).values()
    # The quotient of two float16 is not rounded to float16 before it is rounded to an integer.
    np.testing.assert_array_equal(made, np.rint(x.astype(F32) / whole.astype(F32)).astype(int) + moved)
    (again,) = evaluate_node(Node("DequantizeLinear", ("y", "s", "z"), ("x",), attributes), {**given, "y": made}, types).values()
    assert again.dtype == dtype
    np.testing.assert_allclose(again, (made - moved).astype(float) * whole, rtol=1e-3)


def test_a_dropout_that_trains_draws(rng: np.random.Generator) -> None:
    x = rng.uniform(1, 2, 2000).astype(F32)
    operands = [x, np.array(0.25, F32), np.array(True)]
    once, mask = OPERATORS["Dropout"]({}, operands)
    again, _ = OPERATORS["Dropout"]({}, operands)
    assert once.dtype == F32 and 0.6 < mask.mean() < 0.9 and not np.array_equal(once, again)
    np.testing.assert_allclose(once, np.where(mask, x / 0.75, 0), rtol=1e-6)
    seeded = [OPERATORS["Dropout"]({"seed": 5}, operands)[0] for _ in range(2)]
    np.testing.assert_array_equal(seeded[0], seeded[1])
    plain, everywhere = OPERATORS["Dropout"]({}, [x, None, np.array(False)])
    np.testing.assert_array_equal(plain, x)
    assert everywhere.all()
    names = ("x", "r", "t")
    assert is_random(Node("Dropout", names, ("y",))) and not is_random(Node("Dropout", names, ("y",), {"seed": 5}))
    assert not is_random(Node("Dropout", names[:2], ("y",)))
