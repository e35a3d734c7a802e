"""Products of bytes: every candidate of sampled matrix products and convolutions against NumPy's 64-bit sums, exactly."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from rammer.device.manifest import Array, Binding, OpenOptions
from rammer.ir.compute import Compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import Storage
from rammer.ir.types import TensorType, row_major
from rammer.runtime.host_memory import storage_view
from rammer_testing.nonempty import some

pytest.importorskip("pyopencl")
from rammer_testing.single import images, placed

from rammer_rocm.families import OpenClKernels
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)

PAIRS = [(a, b) for a in ("uint8", "int8") for b in ("uint8", "int8")]


@pytest.fixture(scope="module", params=["native", "plain"])
def backend(request: pytest.FixtureRequest) -> Any:
    """Return the unit with its instruction for byte products, and as one without the instruction."""
    made: Any = copy.copy(DEVICE.open(OpenOptions()))
    if made.vdevice.threads > 1 or (request.param == "native" and not made.vdevice.dots):
        pytest.skip("this unit has no such kernels")
    if request.param == "plain":
        OpenClKernels.__init__(made, replace(made.vdevice, dots=0.0))
    return made


@dataclass(frozen=True)
class Case:
    """An operator with its input values and its result."""

    operator: ROperator
    values: Mapping[str, Array]
    constants: frozenset[str]
    wanted: Array

    @property
    def binding(self) -> Binding:
        """The binding with dense storages for all tensors."""
        types = {n: TensorType(str(v.dtype), v.shape) for n, v in self.values.items()}
        types |= {c.name: c.type for c in self.operator.computes}
        storages = {n: Storage(n, n, 0, t.shape, row_major(t.shape)) for n, t in types.items()}
        return Binding(types, storages, self.constants)

    def wrong(self, backend: Any, tiled: ROperator) -> int:
        """Return the number of elements that a candidate computes wrongly."""
        constants = {n: v for n, v in self.values.items() if n in self.constants}
        place = placed(tiled, self.binding, constants, backend.vdevice.veus)
        loaded = backend.load(place.program, constants)
        try:
            loaded.poison()
            free = {n: v for n, v in self.values.items() if n not in constants}
            image = loaded.run(images(place, free)).outputs[tiled.anchor.name]
            have = storage_view(np.array(image), place.program.storage[tiled.anchor.name])
        finally:
            loaded.close()
        return int((have.astype(np.int64) != self.wanted.astype(np.int64)).sum())


def case(lines: list[str], values: dict[str, Array], free: set[str], wanted: Array) -> Case:
    computes = tuple(Compute.parse(line) for line in lines)
    edges = tuple(Connection(p, c.name, "thread") for c in computes for p in c.reads if p in {d.name for d in computes})
    operator = ROperator(computes[-1].name, computes, edges, (computes[-1].name,))
    return Case(operator, values, frozenset(values) - free, wanted)


def drawn(rng: np.random.Generator, kind: str, *shape: int) -> Array:
    """Return all values of a type, often extremes."""
    ends = np.iinfo(kind)
    values = rng.integers(ends.min, ends.max + 1, shape)
    return np.where(rng.random(shape) < 0.1, np.where(values % 2, ends.min, ends.max), values).astype(kind)


def requantised(
    rng: np.random.Generator, axes: str, point: str, sums: Array, values: dict[str, Array]
) -> tuple[list[str], Array]:
    """Return bias, scale, rounding, zero point and saturation after sums [n, m, ...], as lines and as
    codes. Adds to ``values``."""
    m = sums.shape[1]
    bias, scale, zero = rng.integers(-5000, 5000, m).astype(np.int32), (rng.random(m) * 1e-3).astype(np.float32), np.uint8(117)
    values |= {"bias": bias, "scale": scale, "zero": np.array(zero)}
    lines = [
        f"z: f32[{axes}] = cast(float32, acc[{point}] + bias[m]) * scale[m]",
        f"y: u8[{axes}] = cast(uint8, cast(int32, min(max(round(z[{point}]) + cast(float32, zero[()]), 0.0), 255.0)))",
    ]
    side = (-1, *(1,) * (sums.ndim - 2))
    real = (sums + bias.reshape(side)).astype(np.float32) * scale.reshape(side)
    return lines, np.clip(np.rint(real) + np.float32(zero), 0, 255).astype(np.uint8)


def convolution(rng: np.random.Generator, kinds: tuple[str, str], least: int) -> Case:
    """Return a convolution with any stride, window, padding and groups, optionally followed by 8-bit codes."""
    g = int(rng.choice([1, 1, 1, 2, 3]))
    c, m = int(rng.integers(1, 20)) * g, int(rng.integers(1, 24)) * g
    h, w, k, s = int(rng.integers(6, 30)), int(rng.integers(6, 40)), int(rng.choice([1, 2, 3, 5])), int(rng.integers(1, 3))
    p = int(rng.integers(0, (k + 1) // 2 + 1))  # a window of one, too, may read nothing but padding
    h = max(h, -(-least // (w * c * m * k * k // (g * s * s) or 1)) // 2)
    oh, ow = (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1
    x, weights = drawn(rng, kinds[0], 1, c, h, w), drawn(rng, kinds[1], m, c // g, k, k)
    pad = int(drawn(rng, kinds[0], 1)[0])
    channel = "c" if g == 1 else f"(m // {m // g}) * {c // g} + c"
    place = f"n, {channel}, (h * {s} + kh) + {-p}, (w * {s} + kw) + {-p}"
    axes = f"n:1, m:{m}, h:{oh}, w:{ow}"
    over = f"sum[c:{c // g}, kh:{k}, kw:{k}]"
    lines = [f"acc: i32[{axes}] = {over} cast(int32, pad(x[{place}], {pad})) * cast(int32, w[m, c, kh, kw])"]
    framed = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (p, p), (p, p)), constant_values=pad).reshape(
        1, g, c // g, *(h + 2 * p, w + 2 * p)
    )
    sums = np.zeros((1, g, m // g, oh, ow), np.int64)
    by = weights.astype(np.int64).reshape(g, m // g, c // g, k, k)
    for i, j in np.ndindex(k, k):
        part = framed[..., i : i + (oh - 1) * s + 1 : s, j : j + (ow - 1) * s + 1 : s]
        sums += np.einsum("gmc,ngchw->ngmhw", by[..., i, j], part)
    wanted, values = sums.reshape(1, m, oh, ow), {"x": x, "w": weights}
    if rng.random() < 0.5:
        more, wanted = requantised(rng, axes, "n, m, h, w", wanted, values)
        lines += more
    return case(lines, values, {"x", "w"} if k == 1 and rng.integers(2) else {"x"}, wanted)


def product(rng: np.random.Generator, kinds: tuple[str, str], least: int) -> Case:
    """Return a matrix product of constants or of two inputs, in either order."""
    b, free = int(rng.integers(1, 4)), bool(rng.integers(2))
    m, k, n = (int(rng.integers(1, limit)) for limit in (70, 150, 130))
    k = max(k, -(-least // (m * n * b)))
    turned = bool(rng.integers(2))
    shape = (n, k) if turned else (k, n)
    x, w = drawn(rng, kinds[0], b, m, k), drawn(rng, kinds[1], *((b, *shape) if free else shape))
    read = f"{'b, ' if free else ''}{'n, k' if turned else 'k, n'}"
    line = f"acc: i32[b:{b}, m:{m}, n:{n}] = sum[k:{k}] cast(int32, x[b, m, k]) * cast(int32, w[{read}])"
    wanted = x.astype(np.int64) @ (np.swapaxes(w, -1, -2) if turned else w).astype(np.int64)
    return case([line], {"x": x, "w": w}, {"x", "w"} if free else {"x"}, wanted)


@pytest.mark.sampled(3, of="make")
@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("make", [convolution, product])
def test_products_of_bytes_are_exact(backend: Any, kinds: tuple[str, str], make: Any, rng: np.random.Generator) -> None:
    """Check random candidates: every sign, partial tiles, sums not divisible by four, windows in one copy."""
    tried = 0
    for _ in range(2 if backend.vdevice.dots else 1):
        one = make(rng, kinds, 100_000)
        offered = [o for o in backend.all_candidates(one.operator, one.binding) if o.family == "dots"]
        fitting = (offered[i] for i in rng.permutation(len(offered)))
        for tiled in [o for o, _ in zip((o for o in fitting if backend.fits(o, one.binding)), range(1), strict=False)]:
            assert not one.wrong(backend, tiled), (str(one.operator), tiled.tile, tiled.config)
            tried += 1
    assert tried


def test_a_product_of_bytes_is_what_is_offered_first(backend: Any, rng: np.random.Generator) -> None:
    """Check that the generic kernel, which is 20 times slower, is not first."""
    one = product(rng, ("uint8", "int8"), 10_000_000)
    assert next(iter(backend.candidates(one.operator, one.binding))).family == "dots"


@pytest.mark.parametrize("end", ["min", "max"])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_long_sums_wrap_nowhere(backend: Any, a: str, b: str, end: str) -> None:
    """Check the largest products of 16,384 bytes, which saturating 16-bit instructions would clip."""
    k = 16_384
    line = f"acc: i32[m:2, n:20] = sum[k:{k}] cast(int32, x[m, k]) * cast(int32, w[k, n])"
    x, w = (np.full(shape, getattr(np.iinfo(t), end), t) for shape, t in (((2, k), a), ((k, 20), b)))
    one = case([line], {"x": x, "w": w}, {"x"}, x.astype(np.int64) @ w.astype(np.int64))
    found = [o for o in backend.all_candidates(one.operator, one.binding) if o.family == "dots"]
    assert not one.wrong(backend, next(some(found)))


def depthwise(rng: np.random.Generator, kinds: tuple[str, str]) -> Case:
    """Return a depthwise convolution, its codes, and an activation of the dequantised values. ``dots`` does not apply."""
    c, h, w, k, s = (int(rng.integers(*ends)) for ends in ((2, 9), (8, 30), (8, 40), (2, 6), (1, 3)))
    p, pad = int(rng.integers(0, k)), int(drawn(rng, kinds[0], 1)[0])
    oh, ow = (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1
    x, weights = drawn(rng, kinds[0], 1, c, h, w), drawn(rng, kinds[1], c, 1, k, k)
    axes, point = f"n:1, m:{c}, h:{oh}, w:{ow}", "n, m, h, w"
    load = f"pad(x[n, m, (h * {s} + kh) + {-p}, (w * {s} + kw) + {-p}], {pad})"
    lines = [f"acc: i32[{axes}] = sum[kh:{k}, kw:{k}] cast(int32, {load}) * cast(int32, w[m, 0, kh, kw])"]
    framed = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (p, p), (p, p)), constant_values=pad)
    taps = (
        framed[..., i : i + (oh - 1) * s + 1 : s, j : j + (ow - 1) * s + 1 : s]
        * weights[:, 0, i, j].astype(np.int64)[:, None, None]
        for i, j in np.ndindex(k, k)
    )
    values = {"x": x, "w": weights}
    more, codes = requantised(rng, axes, point, sum(taps, np.zeros((1, c, oh, ow), np.int64)), values)
    lines += [*more, f"r: i8[{axes}] = cast(int8, max(cast(int32, y[{point}]) - cast(int32, zero[()]), -7))"]
    return case(lines, values, {"x"}, np.maximum(codes.astype(np.int64) - int(values["zero"]), -7).astype(np.int8))


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kinds", PAIRS)
def test_channels_alone_are_computed_in_vectors_of_whole_numbers(
    backend: Any, kinds: tuple[str, str], rng: np.random.Generator
) -> None:
    """Check the generic kernel: it widens bytes at the load, sums in 32 bits, and wraps at conversions to bytes."""
    one = depthwise(rng, kinds)
    offered = [o for o in backend.all_candidates(one.operator, one.binding) if not o.family]
    tiled = offered[int(rng.integers(len(offered)))]
    narrow = one.operator.main.shape[-1] < 4  # rows that fill no vector
    assert narrow or any("rm_i" in backend.writer.written(o, one.binding).text for o in offered[:8])
    assert not one.wrong(backend, tiled), (str(one.operator), tiled.tile)


def test_padding_ends_with_the_sum(backend: Any, rng: np.random.Generator) -> None:
    """Check that padding contributes nothing. Two bytes of a row are followed by two of another, where
    an image is padded, too."""
    x, w = drawn(rng, "uint8", 1, 2, 9, 17), drawn(rng, "int8", 3, 2, 1, 1)
    load = "pad(x[n, c, h + -1, w + -1], 17)"
    line = f"acc: i32[n:1, m:3, h:11, w:19] = sum[c:2] cast(int32, {load}) * cast(int32, w[m, c, 0, 0])"
    framed = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=17)
    one = case([line], {"x": x, "w": w}, {"x", "w"}, np.einsum("mc,nchw->nmhw", w[..., 0, 0].astype(np.int64), framed))
    found = (o for o in backend.all_candidates(one.operator, one.binding) if o.family == "dots" and backend.fits(o, one.binding))
    assert not one.wrong(backend, next(some(found)))
