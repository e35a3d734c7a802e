"""Storage-only types on every device: casts of every code, operators that compute with them, and input and output arrays."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.errors import BadInput
from rammer.ir.formats import FORMATS, FloatFormat, from_carrier, to_carrier
from rammer.jit.session import open_executable
from rammer_testing.nonempty import some

Array = np.ndarray[Any, np.dtype[Any]]
DEVICES = ["toy", "rocm", "ipu_sim"]
BFLOAT16 = ml_dtypes.bfloat16


def code(dtype: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def model(
    nodes: list[onnx.NodeProto], inputs: dict[str, Array], outputs: dict[str, Any], constants: dict[str, Array] | None = None
) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(n, code(a.dtype), a.shape) for n, a in inputs.items()]
    ends = [helper.make_tensor_value_info(n, code(t), None) for n, t in outputs.items()]
    known = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    graph = helper.make_graph(nodes, "stored", ports, ends, known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)], ir_version=13)


def ran(proto: onnx.ModelProto, device: str, inputs: dict[str, Array]) -> dict[str, Array]:
    exe = rammer.compile(proto, device)
    try:
        found = exe.run(inputs)
        assert not [h.node.node.op for s in some(exe.cache.values()) for h in s.host_nodes]
        return found
    finally:
        exe.close()


@cache
def numbers() -> Array:
    """Return numbers of all magnitudes with many ties, the extremes, infinities and NaN."""
    rng = np.random.default_rng(11)
    halves = np.arange(0, 1 << 16, 7).astype(np.uint16).view(np.float16).astype(np.float32)
    bits = rng.integers(0, 1 << 32, 5_000, dtype=np.uint32)
    ties = bits & ~np.uint32(0x7FFF) | np.uint32(0x8000)
    small = rng.integers(-600, 600, 2_000).astype(np.float32) / 64
    ends = np.array([0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 448, 464, 480, 57344, 61440, 240, 3.4e38], np.float32)
    return np.concatenate([halves, bits.view(np.float32), ties.view(np.float32), small, ends])


def casts(saturate: bool) -> tuple[list[onnx.NodeProto], dict[str, Array], dict[str, Any]]:
    """Return casts from float32 to every float format, and from every code of every format."""
    nodes, inputs, outputs = list[onnx.NodeProto](), {"x": numbers()}, dict[str, Any]()
    for kind in FORMATS.values():
        if isinstance(kind, FloatFormat):
            nodes.append(helper.make_node("Cast", ["x"], [f"to_{kind.name}"], to=code(kind.name), saturate=int(saturate)))
            outputs[f"to_{kind.name}"] = np.dtype(kind.name)
        every = np.arange(1 << (16 if kind.carrier == "uint16" else getattr(kind, "bits", 8))).astype(kind.carrier)
        if isinstance(kind, FloatFormat) and 0 < kind.sign < 0x80:
            every = every[: 2 * kind.sign]
        inputs[f"c_{kind.name}"] = from_carrier(every, kind.name)
        nodes.append(helper.make_node("Cast", [f"c_{kind.name}"], [f"from_{kind.name}"], to=TensorProto.FLOAT))
        outputs[f"from_{kind.name}"] = np.float32
    return nodes, inputs, outputs


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_casts(device: str, saturate: bool) -> None:
    nodes, inputs, outputs = casts(saturate)
    found = ran(model(nodes, inputs, outputs), device, inputs)
    x = inputs["x"]
    for kind in some(FORMATS.values()):
        want = inputs[f"c_{kind.name}"].astype(np.float32)
        np.testing.assert_array_equal(found[f"from_{kind.name}"], want, kind.name)
        if not isinstance(kind, FloatFormat):
            continue
        have = found[f"to_{kind.name}"]
        assert have.dtype == np.dtype(kind.name)
        with np.errstate(all="ignore"):
            if not kind.sign:
                want = numpy_helper.to_float8e8m0(x, saturate, "up")
            else:
                limited = saturate and kind.carrier == "uint8"
                want = numpy_helper.saturate_cast(x, np.dtype(kind.name)) if limited else x.astype(kind.name)
        known = ~np.isnan(x) if kind.nan is None else np.ones(x.shape, bool)
        np.testing.assert_array_equal(have[known].astype(np.float32), want[known].astype(np.float32), kind.name)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_rounded_after_every_operator(device: str) -> None:
    """Check MatMul, Add and Softmax of bfloat16: exact results of rounded operands, rounded once by each operator."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 9, s).astype(BFLOAT16) / BFLOAT16(8) for s in ((5, 24), (24, 6)))
    c = rng.standard_normal(6).astype(BFLOAT16)
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["p"]),
        helper.make_node("Add", ["p", "c"], ["s"]),
        helper.make_node("Transpose", ["s"], ["t"]),
        helper.make_node("Softmax", ["t"], ["y"]),
    ]
    inputs = {"a": a, "b": b}
    found = ran(model(nodes, inputs, {"p": BFLOAT16, "t": BFLOAT16, "y": BFLOAT16}, {"c": c}), device, inputs)
    product = (a.astype(np.float64) @ b.astype(np.float64)).astype(BFLOAT16)  # exact in float32 in any order
    np.testing.assert_array_equal(found["p"], product)
    total = (product.astype(np.float32) + c.astype(np.float32)).astype(BFLOAT16).T
    np.testing.assert_array_equal(found["t"], total)
    power = np.exp(total.astype(np.float64) - total.astype(np.float64).max(-1, keepdims=True))
    np.testing.assert_allclose(found["y"].astype(np.float64), power / power.sum(-1, keepdims=True), rtol=2.0**-8)


@pytest.mark.parametrize("dtype", [n for n in FORMATS if not n.startswith("float6")])
@pytest.mark.parametrize("device", ["toy", "rocm"])
def test_what_moves_elements_moves_codes(device: str, dtype: str) -> None:
    """Check operators that move elements, on every code (with the bits of NaN) and on constants, without rounding."""
    kind = FORMATS[dtype]
    size = 1 << kind.bits if not isinstance(kind, FloatFormat) else 16 if dtype == "float4_e2m1fn" else 256
    x = from_carrier((np.arange(256) % size).astype(kind.carrier), dtype).reshape(4, 64)
    k = from_carrier((np.arange(64) * 3 % size).astype(kind.carrier), dtype).reshape(1, 64)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"]),
        helper.make_node("Reshape", ["t", "shape"], ["r"]),
        helper.make_node("Pad", ["r", "pads", "fill"], ["y"]),
        helper.make_node("Identity", ["k"], ["z"]),
    ]
    constants = {"shape": np.array([4, 64]), "pads": np.array([1, 0, 0, 2]), "k": k, "fill": k[0, 1]}
    found = ran(model(nodes, {"x": x}, {"y": x.dtype, "z": x.dtype}, constants), device, {"x": x})
    want = np.pad(to_carrier(x).T.reshape(4, 64), ((1, 0), (0, 2)), constant_values=to_carrier(k)[0, 1])
    assert found["y"].dtype == found["z"].dtype == x.dtype
    np.testing.assert_array_equal(to_carrier(found["y"]), want)
    np.testing.assert_array_equal(to_carrier(found["z"]), to_carrier(k))


PAIRS = [
    *(("bfloat16", "uint16"), ("int16", "bfloat16"), ("float8_e4m3fn", "int8"), ("uint8", "float8_e5m2"), ("int4", "uint4")),
    *(("float4_e2m1fn", "uint4"), ("float32", "uint32"), ("int32", "float32"), ("float64", "int64"), ("uint64", "float64")),
    *(("uint16", "int16"), ("float32", "int32"), ("int8", "uint8"), ("float8_e4m3fn", "float8_e5m2")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_bits_stay_as_they_are(device: str) -> None:
    """Check every BitCast between numbers of one width, with random bits. NaN of float32 may become
    quiet on the way to floats."""
    rng = np.random.default_rng(23)
    nodes, inputs, outputs = list[onnx.NodeProto](), dict[str, Array](), dict[str, Any]()
    for i, (source, target) in enumerate(PAIRS):
        size = np.dtype(source).itemsize
        raw = rng.integers(0, 16 if "4" in (source[-1], target[-1]) and size == 1 else 256, (33, size)).astype(np.uint8)
        inputs[f"x{i}"], outputs[f"y{i}"] = raw.view(source)[:, 0], np.dtype(target)
        nodes.append(helper.make_node("BitCast", [f"x{i}"], [f"y{i}"], to=code(target)))
    found = ran(model(nodes, inputs, outputs), device, inputs)
    for i, (source, target) in enumerate(PAIRS):
        want = inputs[f"x{i}"].view(target)
        assert found[f"y{i}"].dtype == want.dtype
        quiet = np.isnan(want) if target in ("float32", "float64") else np.zeros(want.shape, bool)
        bits = f"u{want.itemsize}"
        np.testing.assert_array_equal(found[f"y{i}"].view(bits)[~quiet], want.view(bits)[~quiet], f"{source} {target}")
        assert not quiet.any() or np.isnan(found[f"y{i}"][quiet]).all()


def test_bits_that_devices_do_not_read() -> None:
    """Check that bits of float16 are read on the host, since devices compute float16 as float32."""
    x = np.random.default_rng(2).integers(0, 1 << 16, 50).astype(np.uint16)
    proto = model([helper.make_node("BitCast", ["x"], ["y"], to=TensorProto.FLOAT16)], {"x": x}, {"y": np.float16})
    exe = rammer.compile(proto, "toy")
    np.testing.assert_array_equal(exe.run({"x": x})["y"].view(np.uint16), x)
    exe.close()


def test_bodies_know_the_model_s_types(tmp_path: Path) -> None:
    """Check captured values and branch results of an If in a run, in a bound call and from a compiled file."""
    x = np.array([1, 2, 3, 4.5]).astype(BFLOAT16)
    port = [helper.make_tensor_value_info("b", TensorProto.BFLOAT16, [4])]
    taken = helper.make_graph([helper.make_node("Add", ["n", "n"], ["b"])], "taken", [], port)
    other = helper.make_graph([helper.make_node("Mul", ["n", "n"], ["b"])], "other", [], port)
    nodes = [
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node("If", ["c"], ["i"], then_branch=taken, else_branch=other),
        helper.make_node("Abs", ["i"], ["y"]),
    ]
    inputs = {"x": x, "c": np.array(True)}
    exe = rammer.compile(model(nodes, inputs, {"y": BFLOAT16}), "toy")
    save_artifact(tmp_path / "m.rammer", exe.artifact(exe.compile_only({})))
    again = open_executable(tmp_path / "m.rammer", "")
    for runner in (exe, again):
        np.testing.assert_array_equal(runner.run(inputs)["y"], x + x)
        np.testing.assert_array_equal(runner.run({"x": x, "c": np.array(False)})["y"], x * x)
        bound = runner.bind(inputs)
        bound.run()
        np.testing.assert_array_equal(bound.to_host()["y"], x + x)
        bound.close()
        runner.close()


@pytest.mark.parametrize("block", [0, 3, 4])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn"])
def test_quantised_floats(dtype: str, block: int) -> None:
    """Check per-tensor and blocked scales, with a shorter last block. A float16 scale multiplies in float32 and rounds once."""
    rng = np.random.default_rng(block)
    x = (rng.standard_normal((2, 8, 3)) * 9).astype(np.float32)
    scale = rng.uniform(0.2, 2, (2, -(-8 // block), 3) if block else ()).astype(np.float32)
    half = scale.astype(np.float16)
    grain = {"axis": 1, "block_size": block} if block else {}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"], output_dtype=code(dtype), **grain),
        helper.make_node("DequantizeLinear", ["q", "half"], ["y"], **grain),
    ]
    proto = model(nodes, {"x": x}, {"q": np.dtype(dtype), "y": np.float16}, {"scale": scale, "half": half})
    found = ran(proto, "toy", {"x": x})
    of, by = (np.repeat(s, block, 1)[:, :8] if block else s for s in (scale, half))
    want = numpy_helper.saturate_cast(x / of, np.dtype(dtype))
    np.testing.assert_array_equal(to_carrier(found["q"]) & 0x7F, to_carrier(want) & 0x7F)
    np.testing.assert_array_equal(found["y"], (want.astype(np.float32) * by.astype(np.float32)).astype(np.float16))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2"])
@pytest.mark.parametrize("axis", [0, 1])
def test_quantised_integers(dtype: str, axis: int) -> None:
    kind = FORMATS[dtype]
    assert not isinstance(kind, FloatFormat)
    rng = np.random.default_rng(axis)
    x = (rng.standard_normal((5, 7)) * 20).astype(np.float32)
    scale = rng.uniform(0.5, 2, x.shape[axis]).astype(np.float32)
    zero = rng.integers(kind.ends[0], kind.ends[1] + 1, x.shape[axis]).astype(dtype)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], axis=axis),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], axis=axis),
    ]
    proto = model(nodes, {"x": x}, {"q": np.dtype(dtype), "y": np.float32}, {"scale": scale, "zero": zero})
    exe = rammer.compile(proto, "toy")
    found = exe.run({"x": x})
    exe.close()
    of, at = (np.expand_dims(v, 1 - axis) for v in (scale, zero.astype(np.int32)))
    whole = np.clip(np.rint(x / of) + at, *kind.ends)
    assert found["q"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found["q"].astype(np.int32), whole)
    np.testing.assert_array_equal(found["y"], ((whole - at) * of).astype(np.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_fixed_arrays_and_files(device: str, tmp_path: Path) -> None:
    """Check that a bound call reads and writes arrays of the type, and that a compiled file keeps the type."""
    x = np.arange(12).astype(BFLOAT16).reshape(3, 4)
    y = np.zeros((4, 3), BFLOAT16)
    exe = rammer.compile(model([helper.make_node("Transpose", ["x"], ["y"])], {"x": x}, {"y": BFLOAT16}), device)
    bound = exe.bind({"x": x}, {"y": y} if device != "ipu_sim" else None)
    bound.run()
    np.testing.assert_array_equal(bound.to_host()["y"], x.T)
    if device != "ipu_sim":
        np.testing.assert_array_equal(y, x.T)
    other = x + BFLOAT16(1)
    bound.write({"x": other})
    bound.run()
    np.testing.assert_array_equal(bound.to_host("y")["y"], other.T)
    bound.close()
    with pytest.raises(BadInput, match="is uint16, the model declares bfloat16"):
        exe.run({"x": x.view(np.uint16)})
    file = tmp_path / "m.rammer"
    save_artifact(file, exe.artifact(exe.compile_only({})))
    exe.close()
    again = open_executable(file, "")
    assert again.head.inputs[0].dtype == "bfloat16"
    np.testing.assert_array_equal(again.run({"x": x.view("V2")})["y"], x.T)  # as NumPy's files store it
    again.close()
