"""Matrix products and convolutions as operators, for the tests of kernel families."""

from __future__ import annotations

from rammer.device.manifest import Binding
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Load, Op, Ref, integer, make_add, make_floordiv, make_mul
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType


def conv(m: int, c: int, size: int, kernel: int, stride: int = 1, groups: int = 1) -> tuple[ROperator, Binding]:
    """Return a padded convolution with bias, residual and ReLU; ``c`` channels a group."""
    out, pad = (size - 1) // stride + 1, kernel // 2
    channel = make_add(make_mul(make_floordiv("m", m // groups), c), "c") if groups > 1 else Ref("c")
    x = Load("x", (Ref("n"), channel, *(make_add(make_add(make_mul(a, stride), f"k{a}"), -pad) for a in "hw")), 0.0)
    w = Load("w", (Ref("m"), Ref("c"), Ref("kh"), Ref("kw")))
    axes = (Axis("n", 1), Axis("m", m), Axis("h", out), Axis("w", out))
    point = tuple(Ref(a.name) for a in axes)
    total = Compute("t", "float32", axes, Op("mul", (x, w)), (Axis("c", c), Axis("kh", kernel), Axis("kw", kernel)), "sum")
    biased = Compute("u", "float32", axes, Op("add", (Load("t", point), Load("b", (Ref("m"),)))))
    body = Op("add", (Load("u", point), Load("r", point)))
    final = Compute("y", "float32", axes, Op("max", (body, Load("z", (integer(0),)))))
    links = (Connection("t", "u", "thread"), Connection("u", "y", "thread"))
    operator = ROperator("y", (total, biased, final), links, ("y",))
    shapes = {"x": (1, c * groups, size, size), "w": (m, c, kernel, kernel), "b": (m,), "z": (1,), "r": (1, m, out, out)}
    return bound(operator, shapes, frozenset(("w", "b")))


def matmul(rows: int, depth: int, columns: int, constant: bool) -> tuple[ROperator, Binding]:
    """Return ``y[i, j] = sum[k] x[i, k] * w[k, j]``."""
    body = Op("mul", (Load("x", (Ref("i"), Ref("k"))), Load("w", (Ref("k"), Ref("j")))))
    y = Compute("y", "float32", (Axis("i", rows), Axis("j", columns)), body, (Axis("k", depth),), "sum")
    shapes = {"x": (rows, depth), "w": (depth, columns)}
    return bound(ROperator("y", (y,), (), ("y",)), shapes, frozenset(("w",) if constant else ()))


def normalised(m: int, c: int, size: int, kernel: int, stride: int = 1, first: bool = True) -> tuple[ROperator, Binding]:
    """Return a convolution of ``relu(x * f + g)``, with bias. Padding is 0 after these maps. With ``first``, weights are the
    second factor of the product."""
    image, index = f"n:1, c:{c}, h:{size}, w:{size}", [f"(({a} * {stride}) + k{a}) + -{kernel // 2}" for a in "hw"]
    axes = f"n:1, m:{m}, h:{(size - 1) // stride + 1}, w:{(size - 1) // stride + 1}"
    load = f"pad(v[n, c, {', '.join(index)}], 0.0)" if kernel > 1 else f"v[n, c, h * {stride}, w * {stride}]"
    factors = [load, "w[m, c, kh, kw]"] if first else ["w[m, c, kh, kw]", load]
    texts = [
        f"u: f32[{image}] = (x[n, c, h, w] * f[c]) + g[c]",
        f"v: f32[{image}] = max(u[n, c, h, w], 0.0)",
        f"t: f32[{axes}] = sum[c:{c}, kh:{kernel}, kw:{kernel}] {' * '.join(factors)}",
        f"y: f32[{axes}] = t[n, m, h, w] + b[m]",
    ]
    computes = tuple(Compute.parse(t) for t in texts)
    links = tuple(Connection(p, q.name, "thread") for p, q in (("u", computes[1]), ("v", computes[2]), ("t", computes[3])))
    shapes = {"x": (1, c, size, size), "f": (c,), "g": (c,), "w": (m, c, kernel, kernel), "b": (m,)}
    return bound(ROperator("y", computes, links, ("y",)), shapes, frozenset("fgwb"))


def bound(operator: ROperator, shapes: dict[str, tuple[int, ...]], constants: frozenset[str]) -> tuple[ROperator, Binding]:
    """Return types and dense storages of all tensors, in float32."""
    types = {n: TensorType("float32", s) for n, s in shapes.items()} | {c.name: c.type for c in operator.computes}
    stored = (*operator.inputs, *operator.outputs)
    return operator, Binding(types, {n: dense(n, f"b_{n}", types[n].shape) for n in stored}, constants)


CASES = {
    "pointwise": conv(48, 32, 12, 1),
    "three by three": conv(20, 16, 13, 3),
    "first layer": conv(16, 3, 17, 7, stride=2),
    "grouped": conv(32, 8, 9, 3, groups=2),
    "strided": conv(24, 40, 11, 3, stride=2),
    "deep": conv(16, 512, 7, 1),
    "matmul": matmul(37, 70, 52, False),
    "constant": matmul(16, 96, 40, True),
    "row": matmul(1, 256, 100, True),
}
#: Maps before a contraction: batch normalisation and ReLU. "row" has fewer channels than a block of products. "odd" has rows that
#: do not fit copies of 16 bytes, "first layer" a flat walk.
PROLOGUES = {
    "pointwise": normalised(48, 64, 12, 1),
    "odd": normalised(24, 40, 7, 1),
    "row": normalised(32, 10, 8, 1),
    "strided": normalised(20, 33, 9, 1, stride=2),
    "three by three": normalised(20, 32, 13, 3),
    "first layer": normalised(16, 3, 17, 7, stride=2),
    "turned": normalised(48, 70, 10, 3, first=False),
}
