"""Quantisation of numbers at rounding ties: every operation before QuantizeLinear rounds once, as in ONNX."""

from __future__ import annotations

from random import Random
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import rammer

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Limits of the integer element types.
ENDS: Final = {
    "uint8": (0, 255),
    "int8": (-128, 127),
    "uint16": (0, 65535),
    "int16": (-32768, 32767),
    "uint4": (0, 15),
    "int4": (-8, 7),
}
#: Integers ``k`` times a scale ``s``, plus half of the scale: ties. Rounding product and sum only once moves some of them. ``v``
#: is quantised; ``ones`` is a matrix of 1, with which a product repeats its first column.
BYTES: Final = "bytes = Cast <to = 2> (k)"
FORMS: Final = {
    "map": "p = Mul(k, s) v = Add(p, half)",
    "difference": "p = Mul(k, s) v = Sub(half, p)",
    "clipped": "p = Mul(k, s) q = Add(p, half) v = Clip(q, low)",
    "dequantised": f"{BYTES} p = DequantizeLinear(bytes, s) v = Add(p, half)",
    "residual": f"{BYTES} p = DequantizeLinear(bytes, s) q = DequantizeLinear(bytes, half) r = Sub(p, q) v = Add(r, p)",
    "integer product": f"{BYTES} m = MatMulInteger(bytes, codes) f = Cast <to = 1> (m) p = Mul(f, s) v = Add(p, half)",
    "product": "m = MatMul(k, ones) p = Mul(m, s) v = Add(p, half)",
    "sum": "m = ReduceSum <keepdims = 1> (k, axes) p = Mul(m, s) v = Add(p, half)",
    "transposed": "t = Transpose(k) p = Mul(t, s) v = Add(p, half)",
}
#: Rows and columns of ``k``: whole vectors with a remainder, or less than one vector.
SHAPES: Final = ((256, 16), (37, 7))
SCALES: Final = 12


def model(form: str, kind: str, columns: int, zero: int) -> ModelProto:
    """Return a model of float inputs ``k``, ``s`` and ``half``; its output is the codes as floats."""
    constants = [
        numpy_helper.from_array(np.ones((columns, columns), np.float32), "ones"),
        numpy_helper.from_array(np.ones((columns, columns), np.int8), "codes"),
        numpy_helper.from_array(np.array(0, np.float32), "low"),
        numpy_helper.from_array(np.array([1]), "axes"),
        helper.make_tensor("zero", getattr(TensorProto, kind.upper()), [], [zero]),
    ]
    text = f"g (float[m, n] k, float s, float half) => (float[a, b] y) {{ {FORMS[form]} "
    graph = parser.parse_graph(text + "c = QuantizeLinear(v, s, zero) y = Cast <to = 1> (c) }")
    graph.initializer.extend(constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def wanted(form: str, k: Array, s: Array, half: Array) -> Array:
    """Return the numbers before QuantizeLinear, with each operation in float32."""
    if form in ("integer product", "product", "sum"):
        k = np.repeat(k.sum(1, keepdims=True), 1 if form == "sum" else k.shape[1], 1)
    p = (k.T if form == "transposed" else k) * s
    if form == "residual":
        return np.asarray((p - k * half) + p)
    if form == "difference":
        return np.asarray(half - p)
    return np.maximum(p + half, np.float32(0)) if form == "clipped" else np.asarray(p + half)


def coded(v: Array, s: Array, zero: int, kind: str) -> Array:
    """Return the codes of float32 numbers, as ONNX defines QuantizeLinear."""
    return np.clip(np.rint(v / s) + np.float32(zero), *ENDS[kind])


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("form", sorted(FORMS))
def test_ties_become_the_codes_of_two_roundings(form: str, device: str, seed: int, rng: np.random.Generator) -> None:
    """Check with an element type and a shape that ``--seed`` reproduces."""
    random = Random(f"{seed} {form}")
    kind, (rows, columns) = random.choice(sorted(ENDS)), random.choice(SHAPES)
    first = 0 if "bytes" in FORMS[form] else -(rows // 2)
    k = np.zeros((rows, columns), np.float32)
    k[:, 0] = first + np.arange(rows)
    if form not in ("integer product", "product", "sum"):
        k[:, 1:] = k[:, :1] % np.float32(19)
    zero = random.choice((0, 3))
    exe = rammer.compile(model(form, kind, columns, zero), device)
    try:
        for _ in range(SCALES):
            s = np.array(np.exp(rng.uniform(-8, 4)), np.float32)
            feeds = {"k": k, "s": s, "half": np.array(s / 2, np.float32)}
            want = coded(wanted(form, *feeds.values()), s, zero, kind)
            have = exe.run(feeds)["y"]
            assert (have == want).all(), f"{kind} {(rows, columns)} {s}: {(have != want).sum()} codes of {want.size}"
    finally:
        exe.close()


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_dynamic_codes_of_ties_are_those_of_onnx(device: str, rng: np.random.Generator) -> None:
    text = "g (float[n] x) => (uint8[n] y, float scale, uint8 zero) { y, scale, zero = DynamicQuantizeLinear(x) }"
    graph = parser.parse_graph(text)
    exe = rammer.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), device)
    try:
        for _ in range(SCALES):
            first = int(rng.integers(-255, 1))
            x = ((first + np.arange(256) + np.float32(0.5)) * np.float32(np.exp(rng.uniform(-8, 4)))).astype(np.float32)
            low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
            scale = np.float32((high - low) / np.float32(255))
            zero = np.clip(np.rint(np.float32(0 - low) / scale), 0, 255)
            have = exe.run({"x": x})
            assert have["scale"] == scale and have["zero"] == zero
            assert (have["y"] == coded(x, scale, int(zero), "uint8")).all()
    finally:
        exe.close()
