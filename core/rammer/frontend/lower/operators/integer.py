"""Products of 8-bit codes: MatMulInteger, ConvInteger, QLinearMatMul, QLinearConv, IntegerMatMul and IntegerConv.

All have one form, which kernels of every device match. The contraction is ``sum[..] int32(a) * int32(b)`` over bare codes.
Padding is the zero point of ``a``, inside the conversion; zero points never occur inside the product. With

    sum (a - za) * (b - zb)  =  sum a * b  -  za * (sum b - K * zb)  -  zb * sum a

the other terms are a map after it. Their constant part becomes one int32 bias, merged with the model's bias. A ``b`` with a zero
point needs sums of the rows of ``a``. Constant codes are stored without their zero point if signed 8 bits hold the difference.
All arithmetic wraps in 32 bits, like the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operators.matmul import leading_indices
from rammer.frontend.lower.operators.quantised import can_be_nonzero, saturate_quotient, to_float32
from rammer.frontend.lower.sliding_windows import SlidingWindow, window_of
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Const, Expr, Load, Op

#: The domain of IntegerConv and IntegerMatMul, which models cannot name. They extend ConvInteger and MatMulInteger by an int32
#: bias (fifth operand) and a scale (sixth). The scale is one number, or one per channel or column.
DOMAIN = "rammer"


@dataclass(frozen=True)
class _Codes:
    """An operand: its tensor, and the tensor of its zero point, or "" if the zero point is 0."""

    tensor: str
    zero: str


def _quantised_operand(ctx: Lowering, tensor: str, zero: str, channel: int = -1) -> _Codes:
    """Return constant codes as int8, without their zero point if int8 holds the difference. ``channel`` is the axis along which
    the zero point varies."""
    zero = zero if can_be_nonzero(ctx, zero) else ""
    value, known = _known_value(ctx, tensor), _known_value(ctx, zero) if zero else np.zeros((), np.uint8)
    if value is None or known is None:
        return _Codes(tensor, zero)
    moved = known
    if moved.ndim == 1 and moved.size > 1:
        moved = moved.reshape([-1 if d == channel % value.ndim else 1 for d in range(value.ndim)])
    bare = value.astype(np.int32) - (moved.astype(np.int32).reshape(()) if moved.size == 1 else moved.astype(np.int32))
    if bare.min(initial=0) < -128 or bare.max(initial=0) > 127:
        if value.dtype == np.int8:
            return _Codes(tensor, zero)
        signed = [ctx.constant((v.astype(np.int16) - 128).astype(np.int8), n) for v, n in ((value, "codes"), (known, "zero"))]
        return _Codes(signed[0], signed[1])
    if not zero and value.dtype == np.int8:
        return _Codes(tensor, "")
    return _Codes(ctx.constant(bare.astype(np.int8), "codes"), "")


def _known_value(ctx: Lowering, name: str) -> np.ndarray | None:
    """Return the value of a constant of the graph or of this lowering, or None."""
    return ctx.constants[name] if name in ctx.constants else ctx.graph.constant(name)


def _to_int32(x: Expr) -> Expr:
    return Cast("int32", x)


def _wrap_int32(value: np.ndarray) -> np.ndarray:
    """Return sums wrapped to 32 bits."""
    return value.astype(np.int64).astype(np.int32)


@dataclass(frozen=True)
class _Sums:
    """The corrections of a product: loads of both operands' sums and zero points at each of its elements."""

    of_a: Load | None
    of_b: Load | None
    zero_a: Load | None
    zero_b: Load | None
    depth: int


def _correct_zero_points(total: Expr, sums: _Sums) -> Expr:
    """Return the product of the dequantised integers from the product of the codes."""
    value = total
    if sums.zero_a is not None and sums.of_b is not None:
        rest: Expr = sums.of_b
        if sums.zero_b is not None:
            rest = Op("sub", (rest, Op("mul", (Const(sums.depth, "int32"), _to_int32(sums.zero_b)))))
        value = Op("sub", (value, Op("mul", (_to_int32(sums.zero_a), rest))))
    if sums.zero_b is not None and sums.of_a is not None:
        value = Op("sub", (value, Op("mul", (_to_int32(sums.zero_b), sums.of_a))))
    return value


# --- matrix products -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Product:
    """The axes of a matrix product, and the load of each operand."""

    axes: tuple[Axis, ...]
    inner: Axis
    a: Load
    b: Load


def _make_product(ctx: Lowering, a: str, b: str, shape: Sequence[int]) -> _Product:
    left, right = ctx.shape(a), ctx.shape(b)
    rows = (Axis("m", left[-2]),) if len(left) > 1 else ()
    columns = (Axis("n", right[-1]),) if len(right) > 1 else ()
    batch = tuple(Axis(f"b{d}", n) for d, n in enumerate(shape[: len(shape) - len(rows) - len(columns)]))
    x = ctx.load(a, *leading_indices(left[:-2], batch), *(r.name for r in rows), "k")
    y = ctx.load(b, *leading_indices(right[:-2], batch), "k", *(c.name for c in columns))
    return _Product((*batch, *rows, *columns), Axis("k", left[-1]), x, y)


def _row_wise(ctx: Lowering, name: str, axes: Sequence[Axis], rows: bool) -> Load | None:
    """Return a load of a scale or zero point: one number, one per row (column), or ``[.., rows, 1]`` (``[.., 1, columns]``)."""
    if not name:
        return None
    shape, along = ctx.shape(name), "m" if rows else "n"
    if shape in ((), (1,)):
        return ctx.load(name, *(0 for _ in shape))
    if len(shape) == 1:
        if all(a.name != along or a.extent != shape[0] for a in axes):
            raise ctx.refused(f"{list(shape)} scales or zero points do not match {[a.extent for a in axes]}")
        return ctx.load(name, along)
    return ctx.broadcast(name, axes)


def _matrix_sum(ctx: Lowering, load: Load, p: _Product) -> Load:
    """Return an operand's sums over the inner axis, constant or computed."""
    kept = [i for i in load.indices if i != ex.Ref(p.inner.name)]
    place = load.indices.index(ex.Ref(p.inner.name))
    value = _known_value(ctx, load.tensor)
    if value is not None:
        return ctx.load(ctx.constant(_wrap_int32(value.astype(np.int64).sum(place)), "sums"), *kept)
    shape = [n for d, n in enumerate(ctx.shape(load.tensor)) if d != place]
    axes = [Axis(f"s{d}", n) for d, n in enumerate(shape)]
    names: list[str] = [a.name for a in axes]
    inside = ctx.load(load.tensor, *names[:place], p.inner.name, *names[place:])
    return ctx.load(ctx.emit(axes, _to_int32(inside), (p.inner,), "sum", "int32", into="sums"), *kept)


def _matrix_total(ctx: Lowering, inputs: Sequence[str], bias: str, shape: Sequence[int]) -> tuple[tuple[Axis, ...], Expr]:
    """Return axes and value of an integer product with corrections; ``inputs`` are a, b and their zero points."""
    left, right = _quantised_operand(ctx, inputs[0], inputs[2], -2), _quantised_operand(ctx, inputs[1], inputs[3], -1)
    p = _make_product(ctx, left.tensor, right.tensor, shape)
    folded = _matrix_bias(ctx, left, right, bias, p)
    za, zb = (_row_wise(ctx, c.zero, p.axes, rows) for c, rows in ((left, True), (right, False)))
    # Sums precede the product, so that consumers may fuse with the product.
    of_a = _matrix_sum(ctx, p.a, p) if zb is not None else None
    of_b = _matrix_sum(ctx, p.b, p) if za is not None and folded is None else None
    total = ctx.emit(p.axes, Op("mul", (_to_int32(p.a), _to_int32(p.b))), (p.inner,), "sum", "int32", into="sum")
    value: Expr = ctx.load(total, *[a.name for a in p.axes])
    if folded is not None:
        return p.axes, Op("add", (value, folded))
    value = _correct_zero_points(value, _Sums(of_a, of_b, za, zb, p.inner.extent))
    return p.axes, Op("add", (value, ctx.broadcast(bias, p.axes))) if bias else value


def _matrix_bias(ctx: Lowering, left: _Codes, right: _Codes, bias: str, p: _Product) -> Load | None:
    """Return all corrections and the bias as one constant per column, or None if that is impossible."""
    zero, b = _known_value(ctx, left.zero) if left.zero else np.zeros((), np.int32), _known_value(ctx, right.tensor)
    own = _known_value(ctx, bias) if bias else np.zeros((), np.int32)
    if right.zero or zero is None or zero.size != 1 or own is None or own.ndim > 1 or (not left.zero and not bias):
        return None
    if not left.zero:
        return ctx.broadcast(bias, p.axes)
    if b is None or b.ndim != 2:
        return None
    value = _wrap_int32(own.astype(np.int64) - int(zero.reshape(())) * b.astype(np.int64).sum(0))
    return ctx.load(ctx.constant(value, "bias"), "n")


@lowering("MatMulInteger")
def integer_matmul(ctx: Lowering) -> None:
    """Lower MatMulInteger: ``sum (a - za) * (b - zb)`` in 32 bits.

    Zero points may be per row of ``a`` and per column of ``b``."""
    _emit_sum(ctx, *_matrix_total(ctx, _input_names(ctx, 4), "", ctx.out().shape))


@lowering("IntegerMatMul", domain=DOMAIN)
def integer_matmul_with_bias(ctx: Lowering) -> None:
    """Lower IntegerMatMul: MatMulInteger with a bias and an optional scale."""
    inputs = _input_names(ctx, 6)
    axes, value = _matrix_total(ctx, inputs, inputs[4], ctx.out().shape)
    _emit_scaled(ctx, axes, value, _row_wise(ctx, inputs[5], axes, False))


def _input_names(ctx: Lowering, count: int) -> list[str]:
    return [ctx.input(i) if ctx.has(i) else "" for i in range(count)]


def _emit_sum(ctx: Lowering, axes: Sequence[Axis], value: Expr) -> None:
    """Emit output 0: the contraction itself if it has no correction."""
    last = ctx.computes[-1]
    if isinstance(value, Load) and value.tensor == last.name:
        ctx.computes.pop()
        ctx.types.pop(last.name)
        ctx.emit(axes, last.body, last.reduce, last.combiner, "int32", into=0)
    else:
        ctx.emit(axes, value, dtype="int32", into=0)


def _emit_scaled(ctx: Lowering, axes: Sequence[Axis], value: Expr, scale: Load | None) -> None:
    """Emit output 0: integer sums, or floats if ``scale`` is present."""
    if scale is None:
        _emit_sum(ctx, axes, value)
    else:
        ctx.emit(axes, Op("mul", (Cast("float32", value), scale)), into=0)


@lowering("QLinearMatMul")
def linear_matmul(ctx: Lowering) -> None:
    """Lower QLinearMatMul: ``saturate(round(sum * (sa * sb / sy)) + zy)``, rounded like QuantizeLinear."""
    a, of_a, zero_a, b, of_b, zero_b, of_y, zero = _input_names(ctx, 8)
    axes, value = _matrix_total(ctx, (a, b, zero_a, zero_b), "", ctx.out().shape)
    known = [_known_value(ctx, n) for n in (of_a, of_b, of_y)]
    if all(v is not None and v.size == 1 for v in known[::2]) and known[1] is not None and known[1].ndim < 2:
        scale: Expr = _row_wise(ctx, _combined_scale(ctx, known), axes, False) or Const(1.0)
    else:
        sa, sb, sy = (_row_wise(ctx, n, axes, rows) for n, rows in ((of_a, True), (of_b, False), (of_y, True)))
        assert sa is not None and sb is not None and sy is not None, "QLinearMatMul has three scales"
        scale = Op("div", (Op("mul", (to_float32(ctx, sa), to_float32(ctx, sb))), to_float32(ctx, sy)))
    _emit_requantised(ctx, axes, value, scale, _row_wise(ctx, zero, axes, True) if can_be_nonzero(ctx, zero) else None)


def _combined_scale(ctx: Lowering, known: Sequence[np.ndarray | None]) -> str:
    """Return ``sa * sb / sy`` in float32: a constant of one number, or one per channel."""
    a, b, y = (np.asarray(v, np.float32) for v in known)
    with np.errstate(all="ignore"):
        return ctx.constant(np.asarray(a.reshape(()) * b / y.reshape(()), np.float32), "scale")


def _emit_requantised(ctx: Lowering, axes: Sequence[Axis], total: Expr, scale: Expr, zero: Load | None) -> None:
    """Emit output 0: the requantised sums. A finite constant scale excludes NaN."""
    value = _known_value(ctx, scale.tensor) if isinstance(scale, Load) else None
    sure = value is not None and bool(np.all(np.isfinite(value)))
    quotient = Op("mul", (Cast("float32", total), scale))
    ctx.emit(axes, saturate_quotient(quotient, zero, ctx.out().dtype, sure), into=0)


# --- convolutions --------------------------------------------------------------------------------


def _conv_total(ctx: Lowering, inputs: Sequence[str], bias: str) -> tuple[tuple[Axis, ...], Expr]:
    """Return axes and value of an integer convolution with corrections; ``inputs`` are x, w and their zero points."""
    x, w = _quantised_operand(ctx, inputs[0], inputs[2]), _quantised_operand(ctx, inputs[1], inputs[3], 0)
    batch, _, *source = ctx.shape(x.tensor)
    features, each, *kernel = ctx.shape(w.tensor)
    groups, window, tensor, fill = int(ctx.attr("group", 1)), window_of(ctx, source, kernel), x.tensor, 0
    if x.zero and (zero := _known_value(ctx, x.zero)) is not None:
        fill = int(zero.reshape(()))
    elif x.zero and window.padded:
        tensor, window = _emit_padded(ctx, x, window)
    channel = ex.as_index("c" if each != 1 else 0)
    group = ex.make_floordiv("m", features // groups) if groups > 1 else ex.integer(0)
    axes = (Axis("n", batch), Axis("m", features), *window.axes)
    reduce = (*([Axis("c", each)] if each != 1 else []), *window.taps)
    weight = ctx.load(w.tensor, "m", channel, *window.tap_indices)
    data = window.load(tensor, ("n", ex.make_add(ex.make_mul(group, each), channel)), fill)
    folded = _conv_bias(ctx, x, w, bias)
    of_b = _weight_sums(ctx, w, weight, reduce) if x.zero and folded is None else None
    of_a = None
    if w.zero:
        # Sums precede the product, so that consumers may fuse with the product.
        rows = (Axis("n", batch), Axis("g", groups), *window.axes)
        first = ex.make_mul("g", each) if groups > 1 else ex.integer(0)
        codes = window.load(tensor, ("n", ex.make_add(first, channel)), fill)
        sums = ctx.emit(rows, _to_int32(codes), reduce, "sum" if reduce else None, "int32", into="sums")
        of_a = ctx.load(sums, "n", group, *[a.name for a in window.axes])
    total = ctx.emit(
        axes, Op("mul", (_to_int32(data), _to_int32(weight))), reduce, "sum" if reduce else None, "int32", into="sum"
    )
    value: Expr = ctx.load(total, *[a.name for a in axes])
    if folded is not None:
        return axes, Op("add", (value, folded))
    za, zb = _load_channel(ctx, x.zero), _load_channel(ctx, w.zero)
    value = _correct_zero_points(value, _Sums(of_a, of_b, za, zb, each * int(np.prod(kernel))))
    return axes, Op("add", (value, ctx.load(bias, "m"))) if bias else value


def _load_channel(ctx: Lowering, name: str) -> Load | None:
    """Return a load of one number, or of one per output channel."""
    return ctx.load(name, *("m" if n > 1 else 0 for n in ctx.shape(name))) if name else None


def _conv_bias(ctx: Lowering, x: _Codes, w: _Codes, bias: str) -> Load | None:
    """Return all corrections and the bias as one value per channel, or None if that is impossible."""
    zero = _known_value(ctx, x.zero) if x.zero else np.zeros((), np.int32)
    weights, own = _known_value(ctx, w.tensor), _known_value(ctx, bias) if bias else np.zeros((), np.int32)
    if w.zero or (not x.zero and not bias):
        return None
    if not x.zero:
        return ctx.load(bias, "m")
    if zero is None or weights is None or own is None:
        return None
    sums = weights.astype(np.int64).sum(tuple(range(1, weights.ndim)))
    return ctx.load(ctx.constant(_wrap_int32(own.astype(np.int64) - int(zero.reshape(())) * sums), "bias"), "m")


def _weight_sums(ctx: Lowering, w: _Codes, weight: Load, reduce: Sequence[Axis]) -> Load:
    """Return the sum of every output channel's weights."""
    value = _known_value(ctx, w.tensor)
    if value is not None:
        return ctx.load(ctx.constant(_wrap_int32(value.astype(np.int64).sum(tuple(range(1, value.ndim)))), "sums"), "m")
    rows = (Axis("m", ctx.shape(w.tensor)[0]),)
    return ctx.load(ctx.emit(rows, _to_int32(weight), reduce, "sum" if reduce else None, "int32", into="sums"), "m")


def _emit_padded(ctx: Lowering, x: _Codes, window: SlidingWindow) -> tuple[str, SlidingWindow]:
    """Return the image padded with its run-time zero point, and the window over the padded image."""
    batch, channels, *source = ctx.shape(x.tensor)
    reach = [
        (o - 1) * s + (k - 1) * d + 1
        for o, s, k, d in zip(window.out, window.strides, window.kernel, window.dilations, strict=True)
    ]
    spatial = tuple(Axis(n, e) for n, e in zip(window.names, reach, strict=True))
    places = [ex.make_add(a.name, -p) for a, p in zip(spatial, window.begin, strict=True)]
    inside: Expr = Const(True, "bool")
    for index, extent in zip(places, source, strict=True):
        within = Op("and_", (Op("le", (ex.integer(0), index)), Op("lt", (index, ex.integer(extent)))))
        inside = within if isinstance(inside, Const) else Op("and_", (inside, within))
    load = ctx.load(x.tensor, "n", "c", *places, fill=0)
    body = Op("where", (inside, load, ctx.load(x.zero, *(0 for _ in ctx.shape(x.zero)))))
    framed = ctx.emit((Axis("n", batch), Axis("c", channels), *spatial), body, into="framed")
    none = (0,) * len(source)
    return framed, SlidingWindow(tuple(reach), window.out, window.kernel, window.strides, window.dilations, none, none)


@lowering("ConvInteger")
def integer_conv(ctx: Lowering) -> None:
    """Lower ConvInteger: ``sum (x - zx) * (w - zw)`` over windows, in 32 bits; padding is 0, which is the code ``zx``."""
    _emit_sum(ctx, *_conv_total(ctx, _input_names(ctx, 4), ""))


@lowering("IntegerConv", domain=DOMAIN)
def integer_conv_with_bias(ctx: Lowering) -> None:
    """Lower IntegerConv: ConvInteger with a bias per channel and an optional scale."""
    inputs = _input_names(ctx, 6)
    axes, value = _conv_total(ctx, inputs, inputs[4])
    _emit_scaled(ctx, axes, value, _load_channel(ctx, inputs[5]))


@lowering("QLinearConv")
def linear_conv(ctx: Lowering) -> None:
    """Lower QLinearConv: ``saturate(round((sum + bias) * (sx * sw / sy)) + zy)``; scales may be per output channel."""
    x, of_x, zero_x, w, of_w, zero_w, of_y, zero, bias = _input_names(ctx, 9)
    axes, value = _conv_total(ctx, (x, w, zero_x, zero_w), bias)
    known = [_known_value(ctx, n) for n in (of_x, of_w, of_y)]
    if all(v is not None for v in known):
        scale: Expr = _load_channel(ctx, _combined_scale(ctx, known)) or Const(1.0)
    else:
        sx, sw, sy = (_load_channel(ctx, n) for n in (of_x, of_w, of_y))
        assert sx is not None and sw is not None and sy is not None, "QLinearConv has three scales"
        scale = Op("div", (Op("mul", (sx, sw)), sy))
    _emit_requantised(ctx, axes, value, scale, _load_channel(ctx, zero) if can_be_nonzero(ctx, zero) else None)
