"""Tensor-parallel products: weights once over all devices, one exchange for two layers, and equal results."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.distributed_program import DistributedProgram, Link
from rammer.distributed.partition.search import compile_spread
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.verifier import verify
from rammer_testing.spreads import run_steps, run_whole

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
#: (text, weights by name): models with products that can be split, and with others.
MODELS: Mapping[str, tuple[str, Mapping[str, tuple[int, ...]], int]] = {
    "two layers": ("g (float[1,64] x) => (float[1,64] y) { a = Gemm(x, w, b) h = Tanh(a) y = MatMul(h, v) }",
                   {"w": (64, 256), "b": (256,), "v": (256, 64)}, 2),
    "a layer alone": ("g (float[1,64] x) => (float[1,256] y) { a = MatMul(x, w) y = Tanh(a) }", {"w": (64, 256)}, 1),
    "rows are added": ("g (float[3,64] x) => (float[3] y) { a = MatMul(x, w) h = Exp(a) y = ReduceSum<keepdims = 0>(h, one) }",
                       {"w": (64, 256), "one": ()}, 2),
    "across parts": ("g (float[1,64] x) => (float[1,255] y) { a = MatMul(x, w) s, t = Split<axis = 1>(a, sizes) y = Tanh(t) }",
                     {"w": (64, 256), "sizes": ()}, 1),
    "a softmax and a product": ("g (float[2,64] x) => (float[2,64] y) { a = MatMul(x, w) p = Softmax(a) y = MatMul(p, v) }",
                                {"w": (64, 256), "v": (256, 64)}, 6),
    "by heads": (
        "g (float[1,4,64] x) => (float[1,4,64] y) { a = MatMul(x, w) r = Reshape(a, heads) q = Transpose<perm = [0,2,1,3]>(r) "
        "k = Transpose<perm = [0,2,3,1]>(r) s = MatMul(q, k) p = Softmax(s) c = MatMul(p, q) t = Transpose<perm = [0,2,1,3]>(c) "
        "j = Reshape(t, joined) o = MatMul(j, v) y = Add(x, o) }",
        {"w": (64, 64), "v": (64, 64), "heads": (), "joined": ()}, 2),
}  # fmt: skip
INTEGERS = {"one": [1], "sizes": [1, 255], "heads": [1, 4, 4, 16], "joined": [1, 4, 64]}


def model_of(name: str, seed: int) -> onnx.ModelProto:
    text, weights, _ = MODELS[name]
    model, rng = onnx.parser.parse_model(HEAD + text), np.random.default_rng(seed)
    for n, shape in weights.items():
        value = np.array(INTEGERS[n]) if n in INTEGERS else (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, n))
    return model


def spread_of(model: onnx.ModelProto, devices: int) -> DistributedProgram:
    """Return the program over links without cost, so that all possible products are split."""
    registry, read = Registry(), read_model(model)
    made = Compiler(registry.open("ipu_sim", options={"tiles": "8"}), CompileOptions(), KernelStore(None), registry)
    links = [Link(a, b, 1e-12, 1e15) for a in range(devices) for b in range(devices) if a != b]
    return compile_spread([("ipu_sim", made)] * devices, read, {p.name: p.shape for p in read.inputs}, links, "latency")  # type: ignore[misc]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [2, 4])
def test_shares_compute_what_one_device_does(name: str, devices: int, seed: int) -> None:
    from onnx.reference import ReferenceEvaluator

    model = model_of(name, seed)
    spread = spread_of(model, devices)
    assert spread.how == f"large products in {devices} shares" and verify(spread.whole).tasks
    shape = tuple(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim)
    inputs = {"x": np.random.default_rng(seed + 1).standard_normal(shape).astype(np.float32)}
    want = ReferenceEvaluator(model).run(None, inputs)[0]
    backend = Registry().open("ipu_sim", options={"tiles": "128"})
    for got in (run_steps(spread, inputs, [backend] * devices), run_whole(spread, inputs, backend)):
        np.testing.assert_allclose(got["y"], want, rtol=1e-4, atol=1e-5)
    _, weights, exchanges = MODELS[name]
    assert len(spread.transfers) <= exchanges * devices * (devices - 1)
    large = sum(int(np.prod(s)) * 4 for s in weights.values() if len(s) == 2)
    mine = [sum(v.nbytes for s in p.steps for v in s.constants.values() if v.ndim == 2) for p in spread.parts]
    assert sum(mine) == large and max(mine) == large // devices
