"""Normalisations: statistics as reductions, then one map. Variances are means of centred squares, never ``E[x^2] - E[x]^2``,
which cancels. The quotient by the standard deviation is computed once per row, so the map over all elements only multiplies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import emit_narrowed, widen_float16
from rammer.frontend.lower.operators.pool import raise_to_power, take_root
from rammer.frontend.lower.operators.training import batch_statistics
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Const, Expr, Load, Op

#: Limit of the product of mean and factor, relative to a normalised element's size, ``|scale| + |shift|``. Above it, factor and
#: offset stay in float32: rounded to float16, both err by 2^-11 of the product, and their difference is small.
CANCELLING = 8.0


def axis_names(axes: Sequence[Axis]) -> list[str]:
    """Return the names of ``axes``, the indices of an element-wise load."""
    return [a.name for a in axes]


def mean_over(ctx: Lowering, value: Expr, kept: Sequence[Axis], over: Sequence[Axis], hint: str) -> Load:
    """Return the mean of ``value`` over the axes ``over`` as a load at ``kept``: a sum and a division."""
    if not over:
        return ctx.load(ctx.emit(kept, value, into=hint), *axis_names(kept))
    total = ctx.emit(kept, value, over, "sum", into=f"{hint}_sum")
    count = math.prod(a.extent for a in over)
    mean = ctx.emit(kept, Op("div", (ctx.load(total, *axis_names(kept)), Const(count))), into=hint)
    return ctx.load(mean, *axis_names(kept))


def _inverse_deviation(ctx: Lowering, value: Expr, kept: Sequence[Axis], over: Sequence[Axis], epsilon: float) -> Load:
    """Return ``1 / sqrt(mean(value^2) + epsilon)`` over the axes ``over``, as a load at ``kept``."""
    squares = ctx.emit(kept, Op("mul", (value, value)), over, "sum" if over else None, into="squares")
    count = math.prod(a.extent for a in over)
    variance = Op("div", (ctx.load(squares, *axis_names(kept)), Const(count)))
    deviation = Op("sqrt", (Op("add", (variance, Const(epsilon))),))
    return ctx.load(ctx.emit(kept, Op("div", (Const(1.0), deviation)), into="rstd"), *axis_names(kept))


def _scale_and_shift(value: Expr, scale: Expr | None, shift: Expr | None) -> Expr:
    value = value if scale is None else Op("mul", (value, scale))
    return value if shift is None else Op("add", (value, shift))


def _load_optional(ctx: Lowering, index: int, *indices: str | Expr) -> Expr | None:
    return ctx.load(ctx.input(index), *indices) if ctx.has(index) else None


def _channel_axes(ctx: Lowering) -> tuple[Axis, ...]:
    """Return the axes ``n, c, i2, i3, ...`` of an image tensor."""
    names = ("n", "c")
    shape = ctx.shape(ctx.input(0))
    return tuple(Axis(names[d] if d < 2 else f"i{d}", e) for d, e in enumerate(shape))


@lowering("BatchNormalization")
def batch_normalization(ctx: Lowering) -> None:
    """Lower BatchNormalization for inference with stored statistics: ``x * a[c] + b[c]``. Constant parts are folded, in float32
    if they cancel."""
    if ctx.attr("training_mode", 0) and not any(ctx.wants(i) for i in range(3, 5)):
        batch_statistics(ctx)
        return
    if ctx.attr("training_mode", 0) or any(ctx.wants(i) for i in range(1, 5)):
        raise CannotLower("BatchNormalization in training mode")
    if not ctx.attr("spatial", 1):
        raise CannotLower("BatchNormalization with spatial=0")
    epsilon = float(ctx.attr("epsilon", 1e-5))
    axes = _channel_axes(ctx)
    x = ctx.load(ctx.input(0), *axis_names(axes))
    channel: str | int = "c" if len(axes) > 1 else 0
    known = [ctx.graph.constant(ctx.input(i)) for i in range(1, 5)]
    arrays = [k.astype(np.float64) for k in known if k is not None]
    if len(arrays) == 4:
        scale, shift, mean, variance = arrays
        factor = scale / np.sqrt(variance + epsilon)
        dtype = ctx.out().dtype
        cancels = dtype == "float16" and bool((np.abs(mean * factor) > CANCELLING * (np.abs(scale) + np.abs(shift))).any())
        kept = "float32" if cancels else dtype
        a = ctx.constant(factor.astype(kept), "a")
        b = ctx.constant((shift - mean * factor).astype(kept), "b")
        wide = Cast("float32", x) if cancels else x
        ctx.emit(axes, _scale_and_shift(wide, ctx.load(a, channel), ctx.load(b, channel)), into=0, dtype=dtype)
        return
    mean_load, factor_load = ctx.load(ctx.input(3), channel), _channel_factor(ctx, epsilon)
    value = Op("sub", (x, mean_load))
    ctx.emit(
        axes,
        _scale_and_shift(value, ctx.load(factor_load, channel), ctx.load(ctx.input(2), channel)),
        into=0,
        dtype=ctx.out().dtype,
    )


def _channel_factor(ctx: Lowering, epsilon: float) -> str:
    """Return ``scale / sqrt(variance + epsilon)``, one value per channel."""
    axis = Axis("c", ctx.shape(ctx.input(4))[0])
    deviation = Op("sqrt", (Op("add", (ctx.load(ctx.input(4), "c"), Const(epsilon))),))
    return ctx.emit((axis,), Op("div", (ctx.load(ctx.input(1), "c"), deviation)), into="a")


@lowering("InstanceNormalization")
def instance_normalization(ctx: Lowering) -> None:
    """Lower InstanceNormalization: normalise each channel of each image over its spatial dimensions."""
    axes = _channel_axes(ctx)
    _emit_normalised(ctx, axes, axes[:2], axes[2:], _load_optional(ctx, 1, "c"), _load_optional(ctx, 2, "c"))


def _emit_normalised(
    ctx: Lowering, axes: Sequence[Axis], kept: Sequence[Axis], over: Sequence[Axis], scale: Expr | None, shift: Expr | None
) -> tuple[Load, Load]:
    """Emit output 0 and return loads, at ``kept``, of the mean and the inverse deviation."""
    x = _widen_for_stats(ctx, ctx.load(ctx.input(0), *axis_names(axes)))
    mean = mean_over(ctx, x, kept, over, "mean")
    centred = Op("sub", (x, mean))
    rstd = _inverse_deviation(ctx, centred, kept, over, float(ctx.attr("epsilon", 1e-5)))
    _emit_scaled(ctx, axes, Op("mul", (centred, rstd)), scale, shift)
    return mean, rstd


def _widen_for_stats(ctx: Lowering, x: Load) -> Expr:
    """Return ``x``, in float32 if it is narrower and ``stash_type`` requests float32 statistics."""
    narrow = ctx.type(x.tensor).dtype == "float16"
    return Cast("float32", x) if narrow and ctx.attr("stash_type", 1) == 1 else x


def _emit_scaled(ctx: Lowering, axes: Sequence[Axis], value: Expr, scale: Expr | None, shift: Expr | None) -> None:
    """Emit output 0 from the normalised ``value``."""
    ctx.emit(axes, _scale_normalised(ctx, value, scale, shift), into=0)


def _scale_normalised(ctx: Lowering, value: Expr, scale: Expr | None, shift: Expr | None) -> Expr:
    """Return the normalised ``value``, converted to output 0's type before it is scaled."""
    dtype = ctx.out().dtype
    if ctx.type(ctx.input(0)).dtype == "float16" or ctx.type(ctx.input(0)).dtype != dtype:
        value = Cast(dtype, value)
    return _scale_and_shift(value, scale, shift)


def _trailing_axes(ctx: Lowering) -> tuple[tuple[Axis, ...], int]:
    """Return the axes of the input and the index of the first normalised one (attribute ``axis``)."""
    axes = ctx.axes(ctx.input(0))
    return axes, int(ctx.attr("axis", -1)) % len(axes)


@lowering("LayerNormalization")
def layer_normalization(ctx: Lowering) -> None:
    """Lower LayerNormalization over the dimensions from ``axis`` on; Mean and InvStdDev keep them with extent 1."""
    axes, first = _trailing_axes(ctx)
    scale = ctx.broadcast(ctx.input(1), axes)
    shift = ctx.broadcast(ctx.input(2), axes) if ctx.has(2) else None
    mean, rstd = _emit_normalised(ctx, axes, axes[:first], axes[first:], scale, shift)
    ones = [Axis(a.name, 1) for a in axes[first:]]
    for index, value in ((1, mean), (2, rstd)):
        if ctx.wants(index):
            same = ctx.type(value.tensor).dtype == ctx.out(index).dtype
            ctx.emit((*axes[:first], *ones), value if same else Cast(ctx.out(index).dtype, value), into=index)


@lowering("RMSNormalization")
def rms_normalization(ctx: Lowering) -> None:
    """Lower RMSNormalization: ``x / sqrt(mean(x^2) + epsilon) * scale`` over the dimensions from ``axis`` on."""
    axes, first = _trailing_axes(ctx)
    x = _widen_for_stats(ctx, ctx.load(ctx.input(0), *axis_names(axes)))
    rstd = _inverse_deviation(ctx, x, axes[:first], axes[first:], float(ctx.attr("epsilon", 1e-5)))
    _emit_scaled(ctx, axes, Op("mul", (x, rstd)), ctx.broadcast(ctx.input(1), axes), None)


@lowering("GroupNormalization")
def group_normalization(ctx: Lowering) -> None:
    """Lower GroupNormalization of channel groups; scale and bias are per channel, or per group before opset 21."""
    axes = _channel_axes(ctx)
    groups, channels = int(ctx.attr("num_groups")), axes[1].extent
    if not channels or channels % groups or {ctx.shape(ctx.input(i)) for i in (1, 2)} not in ({(groups,)}, {(channels,)}):
        raise ctx.refused(
            f"{channels} channels in {groups} groups have scales {list(ctx.shape(ctx.input(1)))} and biases "
            f"{list(ctx.shape(ctx.input(2)))}"
        )
    depth = channels // groups
    # A view with a separate axis for groups: statistics and the map after them iterate over the same axes.
    split = (axes[0], Axis("g", groups), Axis("c", depth), *axes[2:])
    member = ex.make_add(ex.make_mul("g", depth), "c")
    view = ctx.emit(split, ctx.load(ctx.input(0), "n", member, *axis_names(axes[2:])), into="groups")
    x = _widen_for_stats(ctx, ctx.load(view, *axis_names(split)))
    centred = Op("sub", (x, mean_over(ctx, x, split[:2], split[2:], "mean")))
    rstd = _inverse_deviation(ctx, centred, split[:2], split[2:], float(ctx.attr("epsilon", 1e-5)))
    place = ex.as_index("g") if ctx.shape(ctx.input(1)) == (groups,) != (channels,) else member
    value = _scale_normalised(ctx, Op("mul", (centred, rstd)), ctx.load(ctx.input(1), place), ctx.load(ctx.input(2), place))
    whole = ctx.emit(split, value, into="whole")
    places = (ex.make_floordiv("c", depth), ex.make_mod("c", depth)) if groups > 1 else (ex.integer(0), ex.as_index("c"))
    ctx.emit(axes, ctx.load(whole, "n", *places, *axis_names(axes[2:])), into=0)


@lowering("MeanVarianceNormalization")
def mean_variance_normalization(ctx: Lowering) -> None:
    """Lower MeanVarianceNormalization: ``(x - mean) / (standard deviation + 1e-9)`` over ``axes`` (the constant is ONNX's)."""
    axes = ctx.axes(ctx.input(0))
    dims = {int(d) % len(axes) for d in ctx.attr("axes", (0, 2, 3))}
    kept = [a for d, a in enumerate(axes) if d not in dims]
    over = [a for d, a in enumerate(axes) if d in dims]
    x = widen_float16(ctx, ctx.load(ctx.input(0), *axis_names(axes)))
    centred = Op("sub", (x, mean_over(ctx, x, kept, over, "mean")))
    variance = mean_over(ctx, Op("mul", (centred, centred)), kept, over, "variance")
    deviation = Op("add", (Op("sqrt", (variance,)), Const(1e-9)))
    emit_narrowed(ctx, axes, Op("div", (centred, deviation)))


@lowering("LpNormalization")
def lp_normalization(ctx: Lowering) -> None:
    """Lower LpNormalization: divide by the Lp norm along ``axis``; a row of zeros stays zero."""
    axes, dim = _trailing_axes(ctx)
    power = int(ctx.attr("p", 2))
    kept = [a for a in axes if a != axes[dim]]
    x = widen_float16(ctx, ctx.load(ctx.input(0), *axis_names(axes)))
    total = ctx.emit(kept, raise_to_power(x, power), axes[dim : dim + 1], "sum", into="sum")
    norm = ctx.load(ctx.emit(kept, take_root(ctx.load(total, *axis_names(kept)), power), into="norm"), *axis_names(kept))
    zero = Op("eq", (norm, Const(0.0)))
    emit_narrowed(ctx, axes, Op("where", (zero, Const(0.0), Op("div", (x, norm)))))


@lowering("LRN")
def local_response_normalization(ctx: Lowering) -> None:
    """Lower LRN: ``x / (bias + alpha / size * sum of squares over neighbouring channels)^beta``."""
    axes = _channel_axes(ctx)
    size = int(ctx.attr("size"))
    # A window wider than all channels adds nothing beyond them.
    before, after = (min(n, max(axes[1].extent - 1, 0)) for n in ((size - 1) // 2, size // 2))
    neighbour = ex.make_add(ex.make_add("c", "j"), -before)
    near = widen_float16(ctx, ctx.load(ctx.input(0), "n", neighbour, *axis_names(axes[2:]), fill=0.0))
    squares = ctx.emit(axes, Op("mul", (near, near)), (Axis("j", before + after + 1),), "sum", into="squares")
    spread = Op("mul", (ctx.load(squares, *axis_names(axes)), Const(float(ctx.attr("alpha", 1e-4)) / size)))
    base = Op("add", (spread, Const(float(ctx.attr("bias", 1.0)))))
    power = Op("pow", (base, Const(float(ctx.attr("beta", 0.75)))))
    emit_narrowed(ctx, axes, Op("div", (widen_float16(ctx, ctx.load(ctx.input(0), *axis_names(axes))), power)))
