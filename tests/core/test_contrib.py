"""ONNX Runtime's contrib operators as functions over ONNX's: the supported ones, the unsupported ones, and valid positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import rammer
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.contrib import FUNCTIONS
from rammer.frontend.read import schemas
from rammer.frontend.read.model_rewrites import EVERYWHERE, WITHDRAWN
from rammer.frontend.read.reader import read_model
from rammer_testing.nonempty import some
from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.oracles import difference, on_device, onnxruntime

MICROSOFT = schemas.MICROSOFT
#: Operators without a CPU kernel in ONNX Runtime; their meaning is tested elsewhere.
ONLY_GPU = {"BiasAdd", "BiasSoftmax", "BiasSplitGelu", "NhwcConv", "NhwcFusedConv"}
#: Operators that ONNX Runtime has in ONNX's domain.
ELSEWHERE = {*EVERYWHERE, *WITHDRAWN}
#: Operators that are compared with another operator of ONNX Runtime below.
BESIDE = {"QLinearReduceMean", "SparseAttention", "Tokenizer"}


def model_of(node: onnx.NodeProto, opset: int = 17, **arrays: np.ndarray) -> ModelProto:
    """Make a model of one node; all outputs are float32 of unknown shape."""
    ports = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in arrays.items()]
    outputs = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in node.output if o]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(helper.make_graph([node], "g", ports, outputs), opset_imports=imports, ir_version=8)


def test_every_function_is_searched_against_onnx_runtime() -> None:
    names = {op for domain, op in FUNCTIONS if domain == MICROSOFT}
    assert len(names) > 15
    assert names - ONLY_GPU - ELSEWHERE - BESIDE == {op.rpartition(".")[2] for op in DESCRIBED if op.startswith(MICROSOFT)}


@pytest.mark.parametrize("op", sorted(op for op in DESCRIBED if op.startswith(MICROSOFT)))
def test_onnx_runtime_runs_most_cases(op: str) -> None:
    """Check that ONNX Runtime runs enough cases to judge the search."""
    ran = [onnxruntime(drawn(op, 1, number)).values is not None for number in range(6)]
    assert sum(ran) >= 3


DECIDED = sorted(op for (domain, op), f in FUNCTIONS.items() if f.deciding and f"{domain}.{op}" in DESCRIBED)


@pytest.mark.slow
@pytest.mark.parametrize("op", DECIDED)
def test_operands_that_decide_shapes_may_be_run_time_data(op: str, seed: int) -> None:
    assert {"Trilu", "Range", "Pad", "ExpandDims"} <= {*DECIDED}
    judged = 0
    for number in range(12):
        case = replace(drawn(f"{MICROSOFT}.{op}", seed, number), static=frozenset())
        want = onnxruntime(case).values
        if want is None:  # only rammer supports this type
            continue
        have = on_device(case, "toy")
        assert have.values is not None, f"{case}: {have.why}"
        assert not difference(have.values, want), str(case)
        judged += 1
        if judged == 3:
            break
    assert judged


def test_schemas_have_what_onnx_runtime_has() -> None:
    """Check operands, results and attributes of every function, by their positions and kinds."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    theirs = {s.name: s for s in state.get_all_operator_schema() if s.domain == MICROSOFT}
    found = 0
    for domain, op in some(FUNCTIONS):
        if domain != MICROSOFT or op in ELSEWHERE:
            continue
        mine, other = schemas.get_schema(op, 1, domain), theirs[op]
        found += 1
        assert (len(mine.inputs), len(mine.outputs)) == (len(other.inputs), len(other.outputs)), op
        assert [str(f.option)[-8:] for f in mine.inputs] == [str(f.option)[-8:] for f in other.inputs], op
        kinds = {n: str(a.type).rpartition(".")[2] for n, a in other.attributes.items()}
        assert {n: str(a.type).rpartition(".")[2] for n, a in mine.attributes.items()} == kinds, op
        assert {n for n, a in mine.attributes.items() if a.required} == {n for n, a in other.attributes.items() if a.required}, op
    assert found > 15


def test_a_form_that_is_declined_says_why_and_where() -> None:
    x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 1, 1), np.float32)
    node = helper.make_node("FusedConv", ["x", "w"], ["y"], "strange", domain=MICROSOFT, activation="Swoosh")
    with pytest.raises(BadInput, match="the activation 'Swoosh' is not supported") as caught:
        bind(read_model(model_of(node, x=x, w=w)), {})
    assert "strange" in caught.value.where


def test_what_is_wrong_with_a_use_is_said() -> None:
    x = np.ones((2, 3), np.float32)
    for node, what in (
        (helper.make_node("Gelu", ["x", "x"], ["y"], domain=MICROSOFT), "2 inputs"),
        (helper.make_node("QuickGelu", ["x"], ["y"], domain=MICROSOFT, beta=1.0), "no attribute 'beta'"),
        (helper.make_node("FusedMatMul", ["x", "x"], ["y"], domain=MICROSOFT), "does not accept its operands"),
        (helper.make_node("FusedGelu", ["x"], ["y"], domain=MICROSOFT), "unknown operator FusedGelu in domain com.microsoft"),
    ):
        with pytest.raises(BadInput) as caught:
            bind(read_model(model_of(node, x=x)), {})
        assert what in str(caught.value)


@pytest.mark.parametrize(("op", "opset"), [("SimplifiedLayerNormalization", 17), ("LayerNormalization", 14)])
def test_operators_that_onnx_runtime_puts_into_onnxs_domain(op: str, opset: int) -> None:
    rng = np.random.default_rng(3)
    x, scale = rng.normal(size=(2, 3, 8)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    node = helper.make_node(op, ["x", "scale"], ["y"], epsilon=1e-3)
    model = model_of(node, opset, x=x, scale=scale)
    if op == "LayerNormalization":
        want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3) * scale
    else:
        want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale
    executable = rammer.compile(model, device="toy")
    np.testing.assert_allclose(executable.run({"x": x, "scale": scale})["y"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Affine", {"alpha": 2.0, "beta": -1.0}),
        ("Scale", {"scale": 3.0}),
        ("ParametricSoftplus", {"alpha": 2.0, "beta": 0.5}),
        ("ScaledTanh", {"alpha": 2.0, "beta": 0.5}),
        ("ImageScaler", {"scale": 2.0, "bias": [1.0, -1.0]}),
        ("Crop", {"border": [1, 0, 1, 2]}),
        ("Crop", {"border": [1, 2, 0, 0], "scale": [2, 1]}),
        ("DynamicSlice", {}),
    ],
)
def test_operators_that_onnx_withdrew(op: str, attributes: dict[str, float], rng: np.random.Generator) -> None:
    x = rng.normal(size=(1, 2, 5, 4)).astype(np.float32)
    operands = {"x": x}
    if op == "DynamicSlice":
        operands |= {"starts": np.array([1, -3]), "ends": np.array([5, 99]), "axes": np.array([2, 3])}
    model = model_of(helper.make_node(op, list(operands), ["y"], **attributes), 9, **operands)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    have = rammer.compile(model, device="toy").run(operands)["y"]
    np.testing.assert_allclose(have, session.run(None, operands)[0], rtol=1e-5, atol=1e-6)


def test_inside_a_body_on_the_device_and_interpreted() -> None:
    """Check a Loop with a contrib operator in its body: the state keeps its shape, or grows and is interpreted."""
    for grows in (False, True):
        step = [helper.make_node("QuickGelu", ["h"], ["g"], domain=MICROSOFT), helper.make_node("Identity", ["c"], ["d"])]
        step.append(
            helper.make_node("Concat", ["g", "g"], ["r"], axis=0) if grows else helper.make_node("Add", ["g", "g"], ["r"])
        )
        body = helper.make_graph(
            step,
            "body",
            [
                helper.make_tensor_value_info("i", TensorProto.INT64, []),
                helper.make_tensor_value_info("c", TensorProto.BOOL, []),
                helper.make_tensor_value_info("h", TensorProto.FLOAT, None),
            ],
            [
                helper.make_tensor_value_info("d", TensorProto.BOOL, []),
                helper.make_tensor_value_info("r", TensorProto.FLOAT, None),
            ],
        )
        node = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
        x = np.array([0.5, -1.0, 2.0], np.float32)
        model = model_of(node, x=x)
        model.graph.initializer.append(numpy_helper.from_array(np.array(3, np.int64), "n"))
        want = x
        for _ in range(3):
            want = want / (1 + np.exp(-1.702 * want))
            want = np.concatenate([want, want]) if grows else want + want
        have = rammer.compile(model, device="toy").run({"x": x})["y"]
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_what_no_cpu_of_onnx_runtimes_runs() -> None:
    """Check operators of its GPU kernels against their definition."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(2, 3, 4)).astype(np.float32)
    bias, skip = rng.normal(size=4).astype(np.float32), rng.normal(size=(2, 3, 4)).astype(np.float32)
    node = helper.make_node("BiasAdd", ["x", "bias", "skip"], ["y"], domain=MICROSOFT)
    have = rammer.compile(model_of(node, x=x, bias=bias, skip=skip), device="toy").run({"x": x, "bias": bias, "skip": skip})
    np.testing.assert_allclose(have["y"], x + bias + skip, rtol=1e-6)
    total = x + bias
    half = total[..., 2:]
    from math import erf

    want = total[..., :2] * half * (1 + np.vectorize(erf)(half / np.sqrt(2))) / 2
    node = helper.make_node("BiasSplitGelu", ["x", "bias"], ["y"], domain=MICROSOFT)
    have = rammer.compile(model_of(node, x=x, bias=bias), device="toy").run({"x": x, "bias": bias})
    np.testing.assert_allclose(have["y"], want, rtol=1e-5, atol=1e-6)
    power = np.exp(x + skip[:1])
    node = helper.make_node("BiasSoftmax", ["x", "b"], ["y"], domain=MICROSOFT, axis=2, is_inner_broadcast=1)
    have = rammer.compile(model_of(node, x=x, b=skip[:1]), device="toy").run({"x": x, "b": skip[:1]})
    np.testing.assert_allclose(have["y"], power / power.sum(-1, keepdims=True), rtol=1e-5)


def run(node: onnx.NodeProto, **arrays: np.ndarray) -> np.ndarray:
    """Return the first result of a model of one node."""
    return rammer.compile(model_of(node, **arrays), device="toy").run(arrays)[node.output[0]]


def test_packed_heads_are_what_they_are_made_of() -> None:
    """Check packed forms, which ONNX Runtime has only on GPUs, and projections without a bias, which crash its CPU kernel."""
    rng = np.random.default_rng(6)
    batch, length, heads, width = 2, 3, 2, 4
    q, k, v = (rng.normal(size=(batch, length, heads, width)).astype(np.float32) for _ in range(3))
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
    flat = {n: x.reshape(batch, length, heads * width) for n, x in (("q", q), ("k", k), ("v", v))}
    attributes = {"domain": MICROSOFT, "num_heads": heads}
    want = run(helper.make_node("MultiHeadAttention", ["q", "k", "v", "", "m"], ["y"], **attributes), **flat, m=mask)
    all_three = np.stack([q, k, v], 3)
    node = helper.make_node("MultiHeadAttention", ["q", "", "", "", "m"], ["y"], **attributes)
    np.testing.assert_allclose(run(node, q=all_three, m=mask), want, rtol=1e-5, atol=1e-6)
    node = helper.make_node("MultiHeadAttention", ["q", "k", "", "", "m"], ["y"], **attributes)
    np.testing.assert_allclose(run(node, q=flat["q"], k=np.stack([k, v], 3), m=mask), want, rtol=1e-5, atol=1e-6)
    one = np.eye(3 * heads * width, dtype=np.float32)
    node = helper.make_node("Attention", ["x", "w", "", "m"], ["y"], **attributes)
    joined = np.concatenate(list(flat.values()), axis=2)
    np.testing.assert_allclose(run(node, x=joined, w=one, m=mask), want, rtol=1e-5, atol=1e-6)


def test_a_total_length_that_is_run_time_data_is_waited_for() -> None:
    """Check that the run-time length sets the extent of the present keys: consumers are compiled for its value."""
    rng = np.random.default_rng(7)
    q, k = rng.normal(size=(1, 1, 32)).astype(np.float32), rng.normal(size=(1, 1, 3, 16)).astype(np.float32)
    names = ["q", "n", "n", "k", "k", "ends", "total"]
    node = helper.make_node("GroupQueryAttention", names, ["y", "p", "s"], domain=MICROSOFT, num_heads=2, kv_num_heads=1)
    arrays = {"q": q, "n": q[:, :, :16], "k": k, "ends": np.array([3], np.int32), "total": np.array(4, np.int32)}
    executable = rammer.compile(model_of(node, **arrays), device="toy")
    assert executable.run(arrays)["p"].shape == (1, 1, 4, 16)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [("y",), ("y", "h", "c"), ("", "h", "c")])
def test_a_recurrent_layer_of_integers_rounds_inputs_and_state(wanted: tuple[str, ...], rng: np.random.Generator) -> None:
    """Check ONNX Runtime with one thread, and a device. An omitted output changes the quantisation of a finished row."""
    steps, batch, rows, hidden = 5, 3, 4, 6
    arrays = {
        "w": rng.integers(0, 256, (2, rows, 4 * hidden)).astype(np.uint8),
        "r": rng.integers(0, 256, (2, hidden, 4 * hidden)).astype(np.uint8),
        "s": rng.uniform(0.002, 0.01, (2, 4 * hidden)).astype(np.float32),
        "z": np.full((2, 4 * hidden), 120, np.uint8),
    }
    x = rng.normal(size=(steps, batch, rows)).astype(np.float32)
    lengths = np.array([5, 2, 3], np.int32)
    node = helper.make_node(
        "DynamicQuantizeLSTM", ["x", "w", "r", "", "n", "", "", "", "s", "z", "s", "z"], list(wanted), domain=MICROSOFT,
        hidden_size=hidden, direction="bidirectional",
    )  # fmt: skip
    model = model_of(node, x=x, n=lengths)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {"x": x, "n": lengths}
    have = rammer.compile(model, device="toy").run(given)
    for name, want in zip(some([n for n in wanted if n]), session.run(None, given), strict=True):
        np.testing.assert_allclose(have[name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_convolution_with_channels_last(fused: bool) -> None:
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=(1, 5, 5, 2)).astype(np.float32), rng.normal(size=(3, 2, 3, 3)).astype(np.float32)
    more = {"activation": "Relu"} if fused else {}
    node = helper.make_node("NhwcFusedConv" if fused else "NhwcConv", ["x", "w"], ["y"], domain=MICROSOFT, pads=[1] * 4, **more)
    have = rammer.compile(model_of(node, x=x, w=w), device="toy").run({"x": x, "w": w})["y"]
    framed = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    want = sum(framed[:, i : i + 5, j : j + 5] @ w[:, :, i, j].T for i in range(3) for j in range(3))
    np.testing.assert_allclose(have, np.maximum(want, 0) if fused else want, rtol=1e-4, atol=1e-5)
