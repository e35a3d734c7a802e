"""Conformance of addresses: operands and results at any buffer offset, of every element type, and every lane of a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, has_loads, interval, loads
from rammer.ir.program import Storage
from rammer.ir.types import SHORT, row_major
from rammer_testing.bound_checks import opened
from rammer_testing.judge import relative_error
from rammer_testing.samples import Sample, check_samples, place, refusal
from rammer_testing.small_models import SmallModel
from rammer_testing.subject import Subject

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Operators with moved tensors, and the element type of their operands.
MOVED = (
    ("float32", "y: f32[i:5, j:19] = a[i, j] * 2.0 + b[i, j]"),
    ("float32", "y: f32[i:6] = sum[k:23] a[i, k]"),
    ("float32", "y: f32[i:7] = max[k:18] a[k, i]"),
    ("float32", "y: f32[i:9, j:18] = sum[k:21] a[i, k] * b[k, j]"),
    ("float16", "y: f16[i:3, j:17] = max(a[i, j], b[i, j])"),
    ("int8", "y: i32[i:7, j:9] = sum[k:21] cast(int32, a[i, k]) * cast(int32, b[j, k])"),
    ("int8", "y: i8[i:5, j:11] = max(a[i, j], b[j, i])"),
    ("int64", "y: i64[i:4, j:9] = a[i, j] - b[i, j]"),
)
#: Lengths of vectors of every type, and their offsets.
LENGTHS, OFFSETS = (1, 7, 16, 33), (0, 1, 3)
#: Lengths of rows in which every element counts once: all short ones, and those around the widths of vectors, warps and groups.
ROWS = (*range(1, 13), 15, 16, 17, 31, 33, 64, 100, 130, 257, 513)
#: Most rows of one length, columns of matrices, and elements of a task.
MOST, WIDE, PIECE = 520, 24, 8192
#: Extent of an axis whose index is loaded.
LOADED = 5
SOFTMAX = SmallModel("lanes", "(float[N,C] x) => (float[N,C] y) {\n y = Softmax<axis=1>(x)\n}")


def check_places(device: Subject) -> None:
    """Check operands and results with strides of any sign and size at any offset, for each tensor of each operator."""
    found = [s for kind, line in MOVED for s in _moved(device, kind, line)]
    check_samples(device, found, "tensors at other places")


def _moved(device: Subject, kind: str, line: str) -> Iterator[Sample]:
    """Yield ``line`` with each storage of a tensor; every tensor gets every storage."""
    compute = Compute.parse(line)
    shapes = {**operand_shapes(compute), "y": compute.shape}
    ways = {n: list(_ways(n, shape)) for n, shape in shapes.items()}
    for turn in range(max(map(len, ways.values()))):
        chosen = {n: ways[n][(turn + 3 * i) % len(ways[n])] for i, n in enumerate(ways)}
        inputs = {n: _random(device, kind, shapes[n]) for n in shapes if n != "y"}
        for name, array in inputs.items():  # aliased elements have equal values
            for axis, (extent, stride) in enumerate(zip(array.shape, chosen[name].strides, strict=True)):
                if stride == 0 and extent > 1:
                    array[...] = np.take(array, [0], axis)
        yield Sample(line, inputs, chosen)


def operand_shapes(compute: Compute) -> dict[str, tuple[int, ...]]:
    """Return the operand shapes of a Compute, determined by its indices; loaded indices are below ``LOADED``."""
    box = {a.name: (0, a.extent - 1) for a in (*compute.axes, *compute.reduce)}

    def reach(index: Expr) -> int:
        known = None if has_loads(index) else interval(index, box)
        return LOADED if known is None else known[1] + 1

    return {load.tensor: tuple(map(reach, load.indices)) for load in loads(compute.body)}


def _ways(name: str, shape: Sequence[int]) -> Iterator[Storage]:
    """Yield storages: dense, offset, padded, with gaps, transposed, reversed along each axis and all; for operands also
    broadcast."""
    dense, inner = row_major(tuple(shape)), shape[-1]
    wide = [row_major((*shape[:-1], inner + more)) for more in (1, 3)]
    turned = tuple(row_major(tuple(shape)[::-1]))[::-1]
    yield place(name, shape, dense, 1)
    yield place(name, shape, wide[0], 0)
    yield place(name, shape, tuple(-s for s in dense), 2)
    yield place(name, shape, turned, 0)
    yield place(name, shape, tuple(2 * s for s in dense), 1)
    yield place(name, shape, wide[1], 3)
    yield place(name, shape, (*dense[:-1], -1), 0)
    if len(shape) > 1:
        yield place(name, shape, (-wide[0][0], *wide[0][1:]), 1)
        yield place(name, shape, tuple(-s for s in turned), 0)
        if name != "y":
            yield place(name, shape, (0, *dense[1:]), 0)
            yield place(name, shape, (*dense[:-1], 0), 1)


def _random(device: Subject, kind: str, shape: Sequence[int]) -> Array:
    """Return values of the whole range of narrow integers; other types are N(0,1) or below 1,000."""
    dtype, rng = np.dtype(kind), device.rng
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    ends = np.iinfo(dtype)
    return rng.integers(max(ends.min, -1000), min(ends.max, 1000) + 1, shape).astype(dtype)


def check_types(device: Subject) -> None:
    """Check vectors of every element type with odd and even lengths and offsets: no other element is read or written."""
    skipped = list[str]()
    for kind, short in SHORT.items():
        line = "xor(a[i], b[i])" if kind == "bool" else "max(a[i], b[i])"
        samples = list[Sample]()
        for number, length in enumerate(LENGTHS):
            inputs = {n: _random(device, kind, (length,)) for n in "ab"}
            shift = {n: OFFSETS[(number + i) % len(OFFSETS)] for i, n in enumerate("aby")}
            places = {n: place(n, (length,), (1,), s) for n, s in shift.items()}
            samples.append(Sample(f"y: {short}[i:{length}] = {line}", inputs, places, exact=True))
        if said := refusal(device, samples):
            skipped.append(f"{kind}: {said}")
            continue
        check_samples(device, samples, f"vectors of {kind}")
    if skipped:
        device.skip("it refuses programs of " + "; ".join(skipped))


def check_lanes(device: Subject) -> None:
    """Check reductions of rows of many lengths with the deciding element at each index: no lane is omitted."""
    samples = list[Sample]()
    for length in ROWS:
        rows = np.arange(length) if length <= MOST else np.sort(device.rng.choice(length, MOST, replace=False))
        rows[-1], count = length - 1, len(rows)
        quiet = device.rng.uniform(-1, 1, (count, length)).astype(np.float32)
        high, low = quiet.copy(), quiet.copy()
        high[np.arange(count), rows], low[np.arange(count), rows] = 9 + rows, -9 - rows
        tile = (max(1, min(-(-count // 2), PIECE // length)),)
        samples.append(Sample(f"y: f32[i:{count}] = max[k:{length}] x[i, k]", {"x": high}, tile=tile))
        samples.append(Sample(f"y: f32[i:{count}] = min[k:{length}] x[i, k]", {"x": low}, tile=tile))
        if length in (5, 12, 17, 31, 64, 130, 513):
            samples += _sums(device, rows, count, length, tile)
    check_samples(device, samples, "one element decides")
    _softmax(device)


def _sums(device: Subject, rows: Array, count: int, length: int, tile: tuple[int, ...]) -> Iterator[Sample]:
    """Yield sums, products and maxima along columns and over two axes, in which each element counts."""
    one = np.zeros((count, length), np.float32)
    one[np.arange(count), rows] = 3 + rows
    yield Sample(f"y: f32[i:{count}] = sum[k:{length}] x[i, k]", {"x": one}, tile=tile)
    yield Sample(f"y: f32[i:{count}] = prod[k:{length}] x[i, k]", {"x": np.where(one, 2, 1).astype(np.float32)}, tile=tile)
    yield Sample(f"y: f32[i:{count}] = max[k:{length}] x[k, i]", {"x": np.ascontiguousarray(one.T)}, tile=tile)
    whole = one[:, None, :] * np.eye(3, dtype=np.float32)[device.rng.integers(3, size=count)][:, :, None]
    yield Sample(f"y: f32[i:{count}] = max[k:3, l:{length}] x[i, k, l]", {"x": whole}, tile=tile)
    small = one.astype(np.int8)
    small[np.arange(count), rows] = 1 + rows % 100
    yield Sample(f"y: i8[i:{count}] = max[k:{length}] x[i, k]", {"x": small}, tile=tile, exact=True)
    matrix = device.rng.integers(-4, 5, (length, WIDE)).astype(np.float32)
    yield Sample(
        f"y: f32[i:{count}, j:{WIDE}] = sum[k:{length}] x[i, k] * w[k, j]", {"x": one, "w": matrix}, tile=(*tile, WIDE // 2)
    )


def _softmax(device: Subject) -> None:
    """Check a softmax over rows with one dominant element: if it is omitted, exponentials overflow."""
    with opened(device, SOFTMAX) as exe:
        for count, length in ((37, 37), (24, 130)):
            rows = np.arange(length)[-count:]
            x = device.rng.uniform(-1, 1, (count, length)).astype(np.float32)
            x[np.arange(count), rows] = 400
            want = np.zeros(x.shape, np.float64)
            want[np.arange(count), rows] = 1
            error = relative_error(exe.run({"x": x})["y"], want)
            device.expect(
                error <= 1e-6, f"softmax of rows of {length} in which one element decides: relative L2 error {error:.1e}"
            )
