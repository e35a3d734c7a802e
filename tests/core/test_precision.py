"""Precision: changes of the float16 pass, permitted requests, and separate cache entries."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from precision_model import LITTLE

import rammer
from rammer.compile_options import check_precision
from rammer.device.loader import Registry
from rammer.device.manifest import Binding
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute, run_graph
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.operator import ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType
from rammer.passes.graph.convert_to_float16 import ConvertToFloat16, is_safe_in_float16, narrow_graph
from rammer.passes.pass_pipeline import Pipeline, default_passes
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.tuner import Tuner
from rammer_testing.nonempty import some


def halved(graph: Graph) -> Graph:
    return narrow_graph(Pipeline(default_passes()).run(graph)[0], default_passes())[0]


def graph_of(
    nodes: list[Node], types: dict[str, TensorType], inputs: str, outputs: str, constants: dict[str, np.ndarray] | None = None
) -> Graph:
    values = [tuple(Value(n, types[n], n) for n in names.split()) for names in (inputs, outputs)]
    return Graph("g", values[0], values[1], tuple(nodes), types, constants or {}, 21)


def test_everything_inside_is_float16_and_the_ports_keep_their_types() -> None:
    graph = bind(read_model(LITTLE.build(np.random.default_rng(3))), {})
    half = halved(graph)
    assert [v.type for v in half.inputs] == [v.type for v in graph.inputs]
    assert [v.type for v in half.outputs] == [v.type for v in graph.outputs]
    made = {o: half.types[o].dtype for n in half.nodes if n.op not in ("Cast",) for o in n.outputs}
    assert set(made.values()) == {"float16"}
    assert {a.dtype.name for n, a in half.constants.items() if a.dtype.kind == "f"} == {"float16"}
    assert narrow_graph(half, default_passes())[0] is half, "a second time there is nothing to do"


def test_results_are_those_of_float32_but_for_rounding(rng: np.random.Generator) -> None:
    graph = bind(read_model(LITTLE.build(np.random.default_rng(3))), {})
    feeds = {"x": rng.standard_normal((1, 3, 8, 8)).astype(np.float32), "i": np.array([3, 1])}
    want, have = (run_graph(lower(g), feeds, precise) for g, precise in ((graph, True), (halved(graph), False)))
    for value in some(graph.outputs):
        error = np.linalg.norm(have[value.name] - want[value.name]) / np.linalg.norm(want[value.name])
        assert have[value.name].dtype == np.float32
        assert 1e-6 < error < 2e-3, "float16 has a unit of 1e-3; without any error nothing was rounded"


@pytest.mark.parametrize(
    "value, kept", [(3e4, False), (65504.0, True), (65520.0, True), (-3.4e38, True), (1e-9, True), (1e-6, False)]
)
def test_operators_with_constants_beyond_float16_stay_float32(value: float, kept: bool) -> None:
    assert is_safe_in_float16(np.array([value], np.float32)) == (not kept or value == 65504)
    types = {n: TensorType("float32", (2,)) for n in "xy"} | {"k": TensorType("float32", ())}
    graph = graph_of([Node("Add", ("x", "k"), ("y",), {}, "n", "", 14)], types, "x", "y", {"k": np.array(value, np.float32)})
    half = ConvertToFloat16()(graph)
    assert (half is graph) == kept
    # A limit beyond float16's range has no effect: it may become infinite.
    clip = graph_of([Node("Clip", ("x", "", "k"), ("y",), {}, "n", "", 13)], types, "x", "y", {"k": np.array(value, np.float32)})
    assert ConvertToFloat16()(clip) is not clip


def test_operators_typed_by_the_model_and_steering_operands_stay() -> None:
    shape = TensorType("float32", (1, 1, 4, 4))
    types = {
        "x": shape,
        "r": TensorType("float32", (1, 1, 6, 6)),
        "y": TensorType("float32", (1, 1, 6, 6)),
        "f": TensorType("float32", (4,)),
        "s": TensorType("float32", ()),
    }
    types |= {n: TensorType("float32", ()) for n in ("a", "b", "d")}
    nodes = [
        Node("Resize", ("x", "", "f"), ("r",), {"mode": "nearest"}, "n", "", 19),
        Node("Neg", ("r",), ("y",), {}, "m", "", 13),
    ]
    scales = np.array([1, 1, 1.5, 1.5], np.float32)
    half = ConvertToFloat16()(graph_of(nodes, types, "x", "y", {"f": scales}))
    resize = next(n for n in half.nodes if n.op == "Resize")
    assert half.constants[resize.inputs[2]] is scales
    assert half.types[resize.outputs[0]].dtype == half.types[resize.inputs[0]].dtype == "float16"
    ints = {"i": TensorType("int64", (4,)), "c": TensorType("float32", (4,)), "y": TensorType("float32", (4,))}
    cast = [Node("Cast", ("i",), ("c",), {"to": 1}, "n", "", 19), Node("Neg", ("c",), ("y",), {}, "m", "", 13)]
    half = ConvertToFloat16()(graph_of(cast, ints, "i", "y"))
    assert [n.op for n in half.nodes] == ["Cast", "Cast", "Neg", "Cast"]
    assert [half.types[n.outputs[0]].dtype for n in half.nodes] == ["float32", "float16", "float16", "float32"]


def test_operators_on_the_host_stay_float32() -> None:
    types = {"x": TensorType("float32", (2,)), "u": TensorType("float32", (2,)), "y": TensorType("float32", (2,))}
    nodes = [Node("Unheard", ("x",), ("u",), {}, "n", "somewhere", 1), Node("Neg", ("u",), ("y",), {}, "m", "", 13)]
    half = ConvertToFloat16()(graph_of(nodes, types, "x", "y"))
    assert [n.op for n in half.nodes] == ["Unheard", "Cast", "Neg", "Cast"]
    assert half.nodes[0] == nodes[0]


def test_float16_computes_in_float32() -> None:
    """Check 60,000 added three times, minus twice 60,000: sums in float16 would overflow."""
    x = np.array([[6e4, 6e4, 6e4, -6e4, -6e4]], np.float16)
    for text in ("y: f16[i:1] = sum[k:5] x[i, k]", "y: f16[i:1] = sum[k:5] x[i, k] * w[k]"):
        have = evaluate_compute(Compute.parse(text), {"x": x, "w": np.ones(5, np.float16)})
        assert have.dtype == np.float16 and float(have[0]) == 6e4
    square = evaluate_compute(Compute.parse("y: f16[i:1] = (x[i] * x[i]) / 1000.0"), {"x": np.array([300], np.float16)})
    assert square.dtype == np.float16 and float(square[0]) == 90, "between load and store it is float32"


def test_a_mean_survives_a_sum_beyond_float16() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[1,2,64,64] x) => (float[1,2,1,1] y, float[1,2,1,1] r) {
            y = GlobalAveragePool(x)
            k = Constant<value_ints=[2,3]>()
            r = ReduceMean(x, k)
        }"""
    )
    half = halved(bind(read_model(model), {}))
    found = run_graph(lower(half), {"x": np.full((1, 2, 64, 64), 100.0, np.float32)}, precise=False)
    assert np.array_equal(found["y"].ravel(), [100, 100]) and np.array_equal(found["r"].ravel(), [100, 100])


def test_devices_say_what_they_have() -> None:
    toy = Registry().open("toy").vdevice
    assert toy.precisions == ("float32",)
    with pytest.raises(BadInput, match="does not compute in float16") as caught:
        check_precision("float16", "toy", toy)
    assert caught.value.hint == "it has float32"
    with pytest.raises(BadInput, match="unknown precision 'float8'"):
        check_precision("float8", "toy", toy)
    with pytest.raises(BadInput, match="does not compute in tf32"):
        rammer.compile(LITTLE.build(np.random.default_rng(3)), device="toy", precision="tf32")


def test_tuned_kernels_are_kept_by_precision() -> None:
    """Check that a kernel measured with tf32 is not used without tf32."""
    backend, store = Registry().open("toy"), KernelStore(None)
    compute = Compute.parse("y: f32[i:8, j:8] = sum[k:8] x[i, k] * w[k, j]")
    operator = ROperator("y", (compute,), (), ("y",))
    types = {n: TensorType("float32", (8, 8)) for n in "xwy"}
    measured = []
    for precision in ("float32", "tf32", "float32"):
        tuner = Tuner(backend, store, "quick")
        tuner.kernels(operator, Binding(types, {n: dense(n, n, (8, 8)) for n in types}, precision=precision))
        measured.append(tuner.measured > 0)
    assert measured == [True, True, False]


def test_a_cast_behind_a_reshape_is_not_moved_for_ever(rng: np.random.Generator) -> None:
    """Check a product's result: one pass moves casts before the reshape, and float16 rounding would move them after it."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[33, 1] x) => (bool[66] y)
        <float[1, 2] w = {0.0, 1.0}, int64[1] s = {66}>
        { a = MatMul(x, w)  b = Reshape(a, s)  y = Cast <to = 9> (b) }"""
    half = halved(bind(read_model(onnx.parser.parse_model(text)), {}))
    assert [n.op for n in half.nodes] == ["Cast", "MatMul", "Cast", "Reshape", "Cast"]
    x = rng.standard_normal((33, 1)).astype(np.float32)
    compute = lower(half)
    found = run_graph(compute, {compute.inputs[0]: x})
    wanted = (x @ np.array([[0.0, 1.0]], np.float32)).ravel() != 0
    np.testing.assert_array_equal(found[compute.outputs[0]], wanted)
