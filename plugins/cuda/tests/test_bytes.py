"""Products of bytes on tensor cores: exact sums in int32 for any signs, padding and layout; on a GPU also results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("cuda.bindings")

from families import operator

from rammer.codegen.contraction_form import roles_of
from rammer.codegen.task_parameters import Unsuited
from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Array, Binding, OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.ir import expr as ex
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Cast
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType
from rammer.plan.image_layout import channels_last
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

from .cuda_choices import choices
from .cuda_on_host import on_host
from .emulator.launch import COMPILER, HostKernel, find_race, run_on_host
from .host_wgmma import run_warpgroups
from .test_single import alone
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.contraction.choose import PRODUCTS
from rammer_cuda.source import task_kernel

Case = tuple[ROperator, Binding]
FAMILIES = {f.name: f for f in PRODUCTS if f.name in ("gemm_i8", "gemm_wgmma_i8")}
C = "cast(int32, {})"


def backend(target: str = "sm_90a") -> CudaBackend:
    found = open_backend(OpenOptions(target=target))
    assert isinstance(found, CudaBackend)
    return found


def matmul(rows: int, depth: int, columns: int, a: str = "uint8", w: str = "int8", constant: bool = True, batch: int = 0) -> Case:
    """Return a product that is requantised after the sum: ``saturate(rint((x w + b) f) + 3)`` as ``a``."""
    h, n = ("h, ", f"h:{batch}, ") if batch else ("", "")
    axes, point, low = f"{n}i:{rows}, j:{columns}", f"{h}i, j", -128 if a == "int8" else 0
    code = f"min(max(round(cast(float32, u[{point}]) * f[j]) + 3.0, {low}.0), {low + 255}.0)"
    texts = [
        f"s: i32[{axes}] = sum[k:{depth}] cast(int32, x[{h}i, k]) * cast(int32, w[{h}k, j])",
        f"u: i32[{axes}] = s[{point}] + b[j]",
        f"y: {'i8' if a == 'int8' else 'u8'}[{axes}] = cast({a}, cast(int32, {code}))",
    ]
    shapes = {"x": (rows, depth), "w": (depth, columns), "b": (columns,), "f": (columns,)}
    if batch:
        shapes |= {"x": (batch, rows, depth), "w": (batch, depth, columns)}
    return operator(texts, shapes, "wbf" if constant else "bf", "thread", {"x": a, "w": w, "b": "int32"})


def bare(rows: int, depth: int, columns: int) -> Case:
    """Return the sum alone, exact to the last bit."""
    text = f"y: i32[i:{rows}, j:{columns}] = sum[k:{depth}] cast(int32, x[i, k]) * cast(int32, w[k, j])"
    shapes = {"x": (rows, depth), "w": (depth, columns)}
    return operator([text], shapes, "w", "thread", {"x": "int8", "w": "int8"})


def conv(m: int, c: int, size: int, kernel: int, stride: int = 1, fill: int = 0, groups: int = 1, last: bool = True) -> Case:
    """Return a padded convolution of bytes with a residual of bytes. Channels are ``last`` in memory."""
    out, pad = (size - 1) // stride + 1, kernel // 2
    channel = f"((m // {m // groups}) * {c}) + c" if groups > 1 else "c"
    place = ", ".join(f"(({a} * {stride}) + k{a}) + -{pad}" for a in "hw")
    read = f"pad(x[n, {channel}, {place}], {fill})" if pad else f"x[n, {channel}, h * {stride}, w * {stride}]"
    taps = f", kh:{kernel}, kw:{kernel}"
    axes, point = f"n:2, m:{m}, h:{out}, w:{out}", "n, m, h, w"
    read = read if pad else read.replace("+ kh", "").replace("+ kw", "")
    tap = "kh, kw" if pad else "0, 0"
    texts = [
        f"s: i32[{axes}] = sum[c:{c}{taps if pad else ''}] cast(int32, {read}) * cast(int32, g[m, c, {tap}])",
        f"u: i32[{axes}] = s[{point}] + b[m]",
        f"v: f32[{axes}] = (cast(float32, u[{point}]) * f[m]) + (cast(float32, r[{point}]) * 0.5)",
        f"y: u8[{axes}] = cast(uint8, cast(int32, min(max(round(v[{point}]), 0.0), 255.0)))",
    ]
    shapes = {"x": (2, c * groups, size, size), "g": (m, c, kernel, kernel), "b": (m,), "f": (m,), "r": (2, m, out, out)}
    kinds = {"x": "uint8", "g": "int8", "b": "int32", "r": "uint8"}
    found, binding = operator(texts, shapes, "gbf", "thread", kinds)
    if last:
        moved = {n: replace(binding.storages[n], strides=channels_last(binding.types[n].shape)) for n in "xry"}
        binding = replace(binding, storages={**binding.storages, **moved})
    return found, binding


CASES: dict[str, Case] = {
    "linear": matmul(70, 96, 56),
    "odd": matmul(37, 70, 21),
    "fours": matmul(33, 68, 20),
    "eights": matmul(24, 72, 40, "int8", "uint8"),
    "signed": matmul(64, 160, 72, "int8", "int8"),
    "unsigned": matmul(64, 128, 64, "uint8", "uint8"),
    "scores": matmul(40, 64, 48, "int8", "int8", constant=False, batch=2),
    "one row": matmul(1, 256, 64),
    "deep": matmul(16, 1024, 32),
    "bare": bare(50, 112, 36),
    "pointwise": conv(48, 64, 6, 1),
    "strided": conv(40, 32, 7, 1, stride=2),
    "three by three": conv(24, 32, 7, 3, fill=17),
    "channels first": conv(24, 32, 7, 3, fill=17, last=False),
    "grouped": conv(32, 16, 6, 3, fill=255, groups=2),
    "image": conv(40, 64, 7, 3, fill=17),
    "first layer": conv(16, 3, 11, 7, stride=2, fill=114, last=False),
}


def offered(case: str, family: str) -> list[ROperator]:
    return [c.operator for c in choices(backend(), *CASES[case], (FAMILIES[family],))]


def given(rng: np.random.Generator, tiled: ROperator, binding: Binding) -> dict[str, Array]:
    """Return bytes of the full range including extremes, and a scale for which sums are neither all saturated nor all equal."""
    values = dict[str, Array]()
    deep = int(np.prod([r.extent for r in tiled.computes[0].reduce]))
    for name in tiled.inputs:
        kind = binding.types[name]
        if kind.dtype == "float32":
            values[name] = (rng.random(kind.shape, np.float32) + 0.5) / np.float32(64 * np.sqrt(deep))
        else:
            ends = np.iinfo(kind.dtype) if kind.dtype != "int32" else np.iinfo(np.int16)
            values[name] = rng.integers(ends.min, ends.max, kind.shape, endpoint=True).astype(kind.dtype)
    a, w = (values[n].mean() for n in tiled.computes[0].reads)
    values["b"] = (values["b"] - a * w * deep).astype(np.int32) if "b" in values else values["x"]
    return {n: values[n] for n in tiled.inputs}


def reference(tiled: ROperator, values: Mapping[str, Array]) -> Array:
    """Return the result with sums in int64 and the epilogue in float32, as the operator specifies."""
    known = dict(values)
    main = tiled.computes[0]
    body = ex.transform(main.body, lambda e: e.arg if isinstance(e, Cast) else None)
    exact = evaluate_compute(replace(main, dtype="int64", body=body), {n: values[n].astype(np.int64) for n in main.reads})
    assert np.abs(exact).max() < 2**31
    known[main.name] = exact.astype(np.int32)
    for c in tiled.computes[1:]:
        known[c.name] = evaluate_compute(c, known)
    return known[tiled.outputs[0]]


def wrong(have: Array, want: Array) -> bool:
    """Return True if integers differ. A few codes from floats may differ by one. There a product and a sum are rounded together
    and a code is a near tie."""
    off = np.abs(have.astype(np.int64) - want)
    return bool(off.any()) if want.dtype == np.int32 else bool(off.max() > 1 or np.mean(off) > 0.01)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", sorted(CASES))
def test_warps_multiply_bytes_exactly(case: str, rng: np.random.Generator) -> None:
    binding = CASES[case][1]
    found = [o for o in offered(case, "gemm_i8") if dict(o.config)["split_k"] == 1]
    tiled = next(o for o in map(found.__getitem__, rng.permutation(len(found))) if task_kernel(o, binding).threads <= 256)
    values = given(rng, tiled, binding)
    kernel = task_kernel(tiled, binding)
    have = run_on_host(HostKernel.of(kernel, binding, values, on_host(kernel), tiled.task_count), values)["y"]
    want = reference(tiled, values)
    assert len(np.unique(want)) > 20, "the case shows nothing"
    assert not wrong(have, want), tiled.head()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", ["linear", "signed", "unsigned", "pointwise", "image", "strided", "bare"])
def test_warpgroups_multiply_bytes_exactly(case: str, rng: np.random.Generator) -> None:
    binding = CASES[case][1]
    found = choices(backend(), *CASES[case], (FAMILIES["gemm_wgmma_i8"],), 60)
    for down in some({dict(c.operator.config)["down"] for c in found}):
        tiled = alone(next(c for c in found if dict(c.operator.config)["down"] == down)).operator
        values = given(rng, tiled, binding)
        late = bool(rng.integers(2))
        have = run_warpgroups(task_kernel(tiled, binding), tiled, binding, values, late, not late)["y"]
        want = reference(tiled, values)
        assert not wrong(have, want), tiled.head()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case, target", [("fours", "sm_80"), ("first layer", "sm_80"), ("signed", "sm_90a"), ("image", "sm_90a")]
)
def test_machine_code(case: str, target: str) -> None:
    """Check integer tensor core instructions, sufficient registers, and clusters on sm_90 alone."""
    own = backend(target)
    found: dict[tuple[object, ...], ROperator] = {}
    for c in choices(own, *CASES[case], FAMILIES.values() if target == "sm_90a" else (FAMILIES["gemm_i8"],), 80):
        config = dict(c.operator.config)
        found.setdefault((c.operator.family, config["split_k"] > 1, config["bk"] > 64), c.operator)
    assert {f for f, _, _ in found} >= {"gemm_i8"} and (target == "sm_90a" or not any(split for _, split, _ in found))
    for tiled in some(found.values()):
        resources = own.resources(tiled, CASES[case][1])
        assert resources.spills == 0 and 16 <= resources.registers <= 255, tiled.head()
        text = task_kernel(tiled, CASES[case][1]).text
        assert ("wgmma.mma_async" if "wgmma" in tiled.family else "mma.sync.aligned.m16n8k32") in text


def test_warpgroups_leave_what_does_not_lie_along_the_sum() -> None:
    """Check operands rejected since warpgroups read 16 contiguous bytes in one order only."""
    for case in ("scores", "odd", "eights", "channels first"):
        assert not choices(backend(), *CASES[case], (FAMILIES["gemm_wgmma_i8"],), 1), case


def test_columns_are_what_is_contiguous_in_the_result() -> None:
    """Check that adjacent threads store adjacent elements: channels with channels last, pixels otherwise."""
    for case, columns in (("image", (1,)), ("channels first", (0, 2, 3))):
        assert roles_of(*CASES[case], "int8").columns == columns


def test_other_families_leave_bytes_alone() -> None:
    """Check that byte families and other families do not overlap: halves, floats, and sums of bytes that are not int32."""
    own = backend()
    for case in some(CASES.values()):
        assert {o.family for o in own.all_candidates(*case)} <= {*FAMILIES, "", "window"}
    product, binding = operator(["y: f32[i:64, j:64] = sum[k:64] x[i, k] * w[k, j]"], {"x": (64, 64), "w": (64, 64)}, "w")
    assert not choices(own, product, binding, FAMILIES.values())
    narrow = replace(binding, types={**binding.types, **{n: TensorType("int8", (64, 64)) for n in "xw"}})
    with pytest.raises(Unsuited, match="a mixture"):
        roles_of(product, narrow, "int8")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_no_two_threads_race() -> None:
    """Check fills, which are ordinary stores concurrent with asynchronous copies."""
    binding = CASES["three by three"][1]
    found = [o for o in offered("three by three", "gemm_i8") if dict(o.config)["split_k"] == 1]
    tiled = min(found, key=lambda o: task_kernel(o, binding).threads)
    kernel = task_kernel(tiled, binding)
    values = {n: np.ones(binding.types[n].shape, binding.types[n].dtype) for n in binding.constants}
    assert find_race(HostKernel.of(kernel, binding, values, on_host(kernel))) == ""


@pytest.mark.cuda
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_family_agrees_with_integers(case: str, rng: np.random.Generator) -> None:
    from rammer_cuda.backend import whole_program

    own = open_backend(OpenOptions())
    assert isinstance(own, CudaBackend)
    untiled, binding = CASES[case]
    sampled = list[ROperator]()
    for family in (f for f in FAMILIES.values() if f in own.usable):
        found = choices(own, untiled, binding, (family,))
        sampled += [found[int(i)].operator for i in rng.permutation(len(found))[:8]]
    for tiled in some(sampled):
        program, constants = whole_program(tiled, binding)
        values = given(rng, tiled, binding)
        loaded = own.load(program, {n: values[n] for n in constants})
        inputs = {p.external: values[p.tensor] for p in program.inputs}
        have, again = (loaded.run(inputs).outputs["y"] for _ in range(2))
        loaded.close()
        assert not wrong(have, reference(tiled, values)), tiled.head()
        assert have.tobytes() == again.tobytes()


def block_of(batch: int, channels: int, size: int) -> onnx.ModelProto:
    """Return a residual block of codes: two convolutions and an addition between QuantizeLinear and DequantizeLinear."""
    rng, nodes, constants = np.random.default_rng(1), list[onnx.NodeProto](), dict[str, Array]()

    def node(op: str, *inputs: object, **attributes: object) -> str:
        names = [i if isinstance(i, str) else f"c{len(constants) + n}" for n, i in enumerate(inputs)]
        constants.update((n, np.asarray(i)) for n, i in zip(names, inputs, strict=True) if not isinstance(i, str))
        nodes.append(helper.make_node(op, names, [f"v{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    s, z = np.float32(0.05), np.uint8(120)
    first = y = node("QuantizeLinear", "x", s, z)
    for k in (3, 1):
        w = rng.integers(-127, 128, (channels, channels, k, k)).astype(np.int8)
        f = np.full(channels, 0.02 / (k * channels**0.5), np.float32)
        bias = rng.integers(-500, 500, channels).astype(np.int32)
        y = node("QLinearConv", y, s, z, w, f, np.zeros(channels, np.int8), s, z, bias, pads=[k // 2] * 4)
    total = node("Add", node("DequantizeLinear", y, s, z), node("DequantizeLinear", first, s, z))
    node("DequantizeLinear", node("QuantizeLinear", node("Relu", total), s, z), s, z)
    ports = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (batch, channels, size, size)) for n in ("x", "y")]
    nodes[-1].output[0] = "y"
    tensors = [numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = helper.make_graph(nodes, "block", ports[:1], ports[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_block_of_codes_is_two_products_with_channels_last() -> None:
    """Check that a quantised residual network compiles by default without float tensors between products."""
    compiler = Compiler(backend(), CompileOptions(), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(block_of(1, 128, 28)), {}).segments
    assert isinstance(segment, ProgramSegment)
    program = segment.program
    products = [o for o in program.operators if o.family in FAMILIES]
    assert len(products) == 2 and len(program.operators) == 3, "codes of the input, and two products"
    assert "v0" in products[1].inputs and products[1].outputs == (program.outputs[0].tensor,), "the residual is added behind it"
    between = [program.storage[t] for o in products for t in (*o.inputs, *o.outputs) if len(program.types[t].shape) == 4]
    codes = [s for s in between if program.buffer[s.buffer].kind == "arena"]
    assert len(codes) == 4 and all(s.strides[1] == 1 and program.types[s.tensor].dtype == "uint8" for s in codes)


@pytest.mark.slow
def test_codes_are_stored_by_words() -> None:
    """Check that four columns at contiguous, aligned words are stored at a time, also residuals, and others one by one."""
    for case, column, stored in (("image", 1, 4), ("linear", 1, 4), ("image", 1, 2), ("channels first", 3, 1), ("odd", 1, 1)):
        tiled = next(o for o in offered(case, "gemm_i8") if gcd(o.tile[column], 4) == stored)
        assert ("*(unsigned *)(p" in task_kernel(tiled, CASES[case][1]).text) == (stored == 4), (case, tiled.tile)
    residual = next(o for o in offered("image", "gemm_i8") if o.tile[1] % 4 == 0)
    assert "= *(const unsigned *)(p4" in task_kernel(residual, CASES["image"][1]).text
    shifted, binding = CASES["image"]
    moved = replace(binding, storages={**binding.storages, "r": replace(binding.storages["r"], offset=2)})
    assert "*(unsigned *)(p" not in task_kernel(replace(residual, computes=shifted.computes), moved).text
