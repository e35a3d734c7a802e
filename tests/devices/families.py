"""Operators on rows, windows and matrices with few vectors, for tests of kernel families."""

from __future__ import annotations

from collections.abc import Mapping

from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType

Case = tuple[ROperator, Binding]


def operator(
    texts: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    constants: str = "",
    layer: str = "veu",
    dtypes: Mapping[str, str] | None = None,
) -> Case:
    """Return an operator from the texts of its computes; its result is the last one's."""
    computes = tuple(Compute.parse(t) for t in texts)
    names = {c.name for c in computes}
    links = tuple(Connection(r, c.name, layer) for c in computes for r in c.reads if r in names)  # type: ignore[arg-type]
    result = ROperator("op", computes, links, (computes[-1].name,))
    types = {n: TensorType((dtypes or {}).get(n, "float32"), s) for n, s in shapes.items()} | {c.name: c.type for c in computes}
    stored = (*result.inputs, *result.outputs)
    return result, Binding(types, {n: dense(n, f"b_{n}", types[n].shape) for n in stored}, frozenset(constants))


def softmax(rows: int, length: int, log: bool = False) -> Case:
    """Return scaled scores and their softmax (or its logarithm) along the last axis."""
    last = "(s[i, j] - m[i]) - log(t[i])" if log else "e[i, j] / t[i]"
    i, j = f"i:{rows}", f"j:{length}"
    return operator(
        [
            f"s: f32[{i}, {j}] = x[i, j] * 0.125",
            f"m: f32[{i}] = max[{j}] s[i, j]",
            f"e: f32[{i}, {j}] = exp(s[i, j] - m[i])",
            f"t: f32[{i}] = sum[{j}] e[i, j]",
            f"y: f32[{i}, {j}] = {last}",
        ],
        {"x": (rows, length)},
    )


def channel_softmax(channels: int, pixels: int, dtype: str = "f32") -> Case:
    """Return a softmax over an axis whose elements are not contiguous."""
    c, p = f"c:{channels}", f"p:{pixels}"
    full = {"f16": "float16", "f32": "float32"}[dtype]
    return operator(
        [
            f"m: {dtype}[{p}] = max[{c}] x[c, p]",
            f"e: {dtype}[{c}, {p}] = exp(x[c, p] - m[p])",
            f"t: {dtype}[{p}] = sum[{c}] e[c, p]",
            f"y: {dtype}[{c}, {p}] = e[c, p] / t[p]",
        ],
        {"x": (channels, pixels)},
        dtypes={"x": full},
    )


def layer_norm(rows: int, length: int) -> Case:
    """Return a residual sum, normalised over the last axis, scaled and shifted."""
    i, j = f"i:{rows}", f"j:{length}"
    return operator(
        [
            f"a: f32[{i}, {j}] = x[i, j] + r[i, j]",
            f"u: f32[{i}] = sum[{j}] a[i, j]",
            f"m: f32[{i}] = u[i] / {float(length)}",
            f"v: f32[{i}] = sum[{j}] (a[i, j] - m[i]) * (a[i, j] - m[i])",
            f"d: f32[{i}] = 1.0 / sqrt((v[i] / {float(length)}) + 1e-05)",
            f"y: f32[{i}, {j}] = (((a[i, j] - m[i]) * d[i]) * g[j]) + b[j]",
        ],
        {"x": (rows, length), "r": (rows, length), "g": (length,), "b": (length,)},
        "gb",
    )


def instance_norm(channels: int, high: int, wide: int) -> Case:
    """Return each channel normalised over its image, by the mean of its squares alone."""
    c, hw = f"c:{channels}", f"h:{high}, w:{wide}"
    return operator(
        [
            f"v: f32[n:1, {c}] = sum[{hw}] x[n, c, h, w] * x[n, c, h, w]",
            f"y: f32[n:1, {c}, {hw}] = (x[n, c, h, w] / sqrt(v[n, c] + 0.5)) * g[c]",
        ],
        {"x": (1, channels, high, wide), "g": (channels,)},
        "g",
    )


def pool_all(channels: int, high: int, wide: int) -> Case:
    """Return ReLU, then the mean of each image."""
    c, hw = f"c:{channels}", f"p:{high}, q:{wide}"
    return operator(
        [
            f"r: f32[n:1, {c}, h:{high}, w:{wide}] = max(x[n, c, h, w], 0.0)",
            f"s: f32[n:1, {c}, h:1, w:1] = sum[{hw}] r[n, c, p, q]",
            f"y: f32[n:1, {c}, h:1, w:1] = s[n, c, h, w] / {float(high * wide)}",
        ],
        {"x": (1, channels, high, wide)},
    )


def arg_max(rows: int, length: int) -> Case:
    """Return the first position of the largest element."""
    i, j = f"i:{rows}", f"j:{length}"
    return operator(
        [f"m: f32[{i}] = max[{j}] x[i, j]", f"y: i64[{i}] = min[{j}] where(eq(x[i, j], m[i]), j, {length})"],
        {"x": (rows, length)},
    )


def scale_shift(channels: int, size: int) -> Case:
    """Return batch normalisation that cannot be folded, and ReLU."""
    axes, point = f"n:1, c:{channels}, h:{size}, w:{size}", "n, c, h, w"
    return operator(
        [f"t: f32[{axes}] = (x[{point}] * a[c]) + b[c]", f"y: f32[{axes}] = max(t[{point}], 0.0)"],
        {"x": (1, channels, size, size), "a": (channels,), "b": (channels,)},
        "ab",
        "thread",
    )


def turned(rows: int, columns: int) -> Case:
    """Return a transposed copy of a matrix."""
    return operator([f"y: f32[i:{rows}, j:{columns}] = x[j, i] + 1.0"], {"x": (columns, rows)})


def shifted(rows: int, columns: int) -> Case:
    """Return rows shifted by one with zeros, plus their position."""
    return operator(
        [f"y: f32[i:{rows}, j:{columns}] = pad(x[i, j + 1], 0.0) + table(float32, {[0.5] * columns}, j)"], {"x": (rows, columns)}
    )


def taken(rows: int, length: int, columns: int) -> Case:
    """Return rows looked up in a table."""
    return operator(
        [f"y: f32[i:{rows}, j:{columns}] = pad(x[k[i], j], 0.0)"], {"x": (length, columns), "k": (rows,)}, dtypes={"k": "int64"}
    )


def matvec(vectors: int, depth: int, rows: int, turned: bool = False, constant: bool = True) -> Case:
    """Return ``vectors`` products with one matrix, a bias and a ReLU; ``turned`` stores the matrix products first."""
    w, shape = ("w[k, n]", (depth, rows)) if turned else ("w[n, k]", (rows, depth))
    m, n = f"m:{vectors}", f"n:{rows}"
    return operator(
        [
            f"s: f32[{m}, {n}] = sum[k:{depth}] x[m, k] * {w}",
            f"a: f32[{m}, {n}] = s[m, n] + b[n]",
            f"y: f32[{m}, {n}] = max(a[m, n] + r[m, n], 0.0)",
        ],
        {"x": (vectors, depth), "w": shape, "b": (rows,), "r": (vectors, rows)},
        "wb" if constant else "b",
        "thread",
    )


def weighted(heads: int, depth: int, width: int) -> Case:
    """Return the last product of an attention for one token. The values are weighted by the token's row of attention weights."""
    body = f"y: f32[h:{heads}, m:1, n:{width}] = sum[k:{depth}] p[h, m, k] * v[h, k, n]"
    return operator([body], {"p": (heads, 1, depth), "v": (heads, depth, width)})


def depthwise(channels: int, size: int, kernel: int, stride: int) -> Case:
    """Return a padded depthwise convolution with bias and ReLU6."""
    out, pad = (size - 1) // stride + 1, kernel // 2
    axes = f"n:1, m:{channels}, h:{out}, w:{out}"
    index = ", ".join(f"(({a} * {stride}) + k{a}) + -{pad}" for a in "hw")
    return operator(
        [
            f"s: f32[{axes}] = sum[kh:{kernel}, kw:{kernel}] pad(x[n, m, {index}], 0.0) * f[m, 0, kh, kw]",
            f"a: f32[{axes}] = s[n, m, h, w] + b[m]",
            f"y: f32[{axes}] = min(max(a[n, m, h, w], 0.0), 6.0)",
        ],
        {"x": (1, channels, size, size), "f": (channels, 1, kernel, kernel), "b": (channels,)},
        "fb",
        "thread",
    )


def max_pool(channels: int, size: int, out: int) -> Case:
    """Return 3 by 3 windows at stride 2 that may reach over the end (ceil mode)."""
    axes = f"n:1, c:{channels}, h:{out}, w:{out}"
    return operator(
        [f"y: f32[{axes}] = max[kh:3, kw:3] pad(x[n, c, (h * 2) + kh, (w * 2) + kw], -1e30)"], {"x": (1, channels, size, size)}
    )


def average_pool(channels: int, size: int) -> Case:
    """Return an average over 3 by 3 windows; padding does not count."""
    axes = f"n:1, c:{channels}, h:{size}, w:{size}"
    counts = str([2.0, *[3.0] * (size - 2), 2.0])
    return operator(
        [
            f"s: f32[{axes}] = sum[kh:3, kw:3] pad(x[n, c, (h + kh) + -1, (w + kw) + -1], 0.0)",
            f"y: f32[{axes}] = s[n, c, h, w] / (table(float32, {counts}, h) * table(float32, {counts}, w))",
        ],
        {"x": (1, channels, size, size)},
        "",
        "thread",
    )


ROWS = {
    "softmax": softmax(37, 128),
    "long softmax": softmax(3, 1000),
    "odd softmax": softmax(5, 77),
    "log": softmax(9, 260, True),
    "layer norm": layer_norm(19, 768),
    "odd layer norm": layer_norm(6, 333),
    "instance norm": instance_norm(10, 6, 14),
    "pool": pool_all(33, 7, 7),
    "even pool": pool_all(20, 8, 8),
    "arg max": arg_max(21, 50),
    "long": softmax(2, 8192),
    "channels": channel_softmax(21, 60),
}
VECTORS = {
    "one": matvec(1, 256, 100),
    "four": matvec(4, 256, 60),
    "eight": matvec(8, 96, 33),
    "turned": matvec(2, 512, 40, True),
    "odd": matvec(3, 77, 50, True),
    "deep": matvec(1, 12544, 24),
    "computed": matvec(2, 128, 30, constant=False),
    "across": matvec(1, 257, 64, True, constant=False),
    "values": weighted(3, 257, 64),
    "odd across": matvec(3, 77, 52, True, constant=False),
}
WINDOWS = {
    "depthwise": depthwise(13, 17, 3, 1),
    "strided": depthwise(24, 15, 3, 2),
    "five": depthwise(8, 16, 5, 1),
    "seven": depthwise(6, 14, 7, 2),
    "max": max_pool(11, 14, 7),
    "average": average_pool(9, 17),
}
MAPS = {
    "scale": scale_shift(7, 14),
    "odd scale": scale_shift(9, 7),
    "turned copy": turned(40, 12),
    "shifted": shifted(5, 33),
    "taken": taken(11, 2, 24),
}
CASES = ROWS | VECTORS | WINDOWS | MAPS
HALVES = {
    "softmax": channel_softmax(32, 40, "f16"),
    "pool": operator(
        ["y: f16[c:5, h:6, w:7] = max[p:3, q:3] pad(x[c, h + p, w + q], -1.0)"], {"x": (5, 7, 8)}, dtypes={"x": "float16"}
    ),
    "map": operator(["y: f16[i:6, j:40] = tanh(x[i, j] * 2.0)"], {"x": (6, 40)}, dtypes={"x": "float16"}),
}
