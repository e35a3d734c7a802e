"""DFT and STFT as products of the signal with constant tables of cosines and sines.

A long DFT of composite length takes two products (Cooley and Tukey, Math. Comp. 19, 1965)."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import axis_of, make_op, whole_load
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr
from rammer.ir.types import is_float

#: Element limit of a table; longer transforms run on the host.
MOST_TABLE: Final = 1 << 25
#: Longest transform by a single table if its length is composite, and the least factor of a length that is split.
DIRECT: Final = 256
LEAST_FACTOR: Final = 8


def _twiddle_table(length: int, kept: int, inverse: bool, shown: int) -> np.ndarray:
    """Return ``[shown, kept]``: cosines and sines (in the last axis) of ``-2 pi n k / length``. The inverse has conjugates
    divided by ``length``."""
    # The angle is reduced in integers: a float of n * k would lose it.
    angle = (np.outer(np.arange(shown), np.arange(kept)) % length) * (2 * math.pi / length)
    wave = np.exp((1j if inverse else -1j) * angle) / (length if inverse else 1)
    return np.stack([wave.real, wave.imag], axis=-1)


def _check_table(ctx: Lowering, elements: int) -> None:
    if 2 * elements > MOST_TABLE:
        raise CannotLower(f"{ctx.node.op} by a table of {2 * elements} elements, more than {MOST_TABLE}")


@lowering("DFT")
def lower_dft(ctx: Lowering) -> None:
    """Lower DFT: ``y[.., k, ..] = sum_n x[.., n, ..] exp(-2 pi i n k / length)``; the last axis has real and imaginary part."""
    shape, dtype = ctx.shape(ctx.input(0)), ctx.out().dtype
    length, dim = _length_and_axis(ctx, len(shape))
    inverse, parts = bool(ctx.attr("inverse", 0)), shape[-1]
    if parts not in (1, 2) or dim == len(shape) - 1:
        raise ctx.refused(f"an input of {list(shape)} has no real and imaginary parts after axis {dim}")
    half = bool(ctx.attr("onesided", 0))
    axes = ctx.axes(ctx.node.outputs[0])
    # The inverse of a one-sided transform is real: the other side is the conjugate, so every frequency but the ends counts twice.
    real = half and inverse
    kept = min(shape[dim], length // 2 + 1 if real else length)
    shown = axes[dim].extent
    factor = max(f for f in range(1, math.isqrt(length) + 1) if length % f == 0)
    if length > DIRECT and factor >= LEAST_FACTOR and not real:
        return _emit_factored(ctx, dim, (factor, length // factor), inverse)
    _check_table(ctx, kept * shown)
    table = _twiddle_table(length, kept, inverse, shown)
    if real:
        twice = np.full(kept, 2.0)
        twice[0] = 1.0
        if length % 2 == 0 and kept == length // 2 + 1:
            twice[-1] = 1.0
        table = table * twice[:, None]
    _emit_product(ctx, table, dim, kept, "float64" if dtype == "float64" else "float32")


def _emit_factored(ctx: Lowering, dim: int, factors: tuple[int, int], inverse: bool) -> None:
    """Emit a transform of ``n1 n2`` samples, with ``n = n2 m1 + m2`` and ``k = k1 + n1 k2``: products over m1, multiplied by
    powers of the root of unity, and products over m2."""
    (n1, n2), x, axes = factors, ctx.input(0), ctx.axes(ctx.node.outputs[0])
    working, length, last = "float64" if ctx.out().dtype == "float64" else "float32", n1 * n2, axes[-1].name
    parts, kept = ctx.shape(x)[-1], ctx.shape(x)[dim]

    def around(*own: Expr | int | str, part: Expr | int | str) -> list[Expr | int | str]:
        return [*(a.name for a in axes[:dim]), *own, *(a.name for a in axes[dim + 1 : -1]), part]

    def between(*own: Axis) -> tuple[Axis, ...]:
        return (*axes[:dim], *own, *axes[dim + 1 :])

    def waves(angles: np.ndarray, scale: float, name: str) -> str:
        """Add a table with two more axes: the part of the result, then the part of the operand."""
        wave = np.exp((2j if inverse else -2j) * math.pi / length * (angles % length)) * scale
        rows = np.stack([np.stack([wave.real, -wave.imag], -1), np.stack([wave.imag, wave.real], -1)], axis=-2)
        return ctx.constant(rows.astype(working), name)

    over = np.arange(n1), np.arange(n2)
    first = waves(n2 * np.outer(over[0], over[0]), 1.0, "waves")  # [k1, m1, q, p]
    turn = waves(np.outer(over[0], over[1]), 1 / length if inverse else 1.0, "turns")  # [k1, m2, q, p]
    second = waves(n1 * np.outer(over[1], over[1]), 1.0, "waves")  # [k2, m2, q, p]
    part: Expr | int | str = "p" if parts == 2 else 0
    place = ex.make_add(ex.make_mul("m1", n2), "m2")
    value: Expr = ctx.load(x, *around(place, part=part), fill=0.0 if kept < length else None)
    value = value if ctx.type(x).dtype == working else Cast(working, value)
    sums = ctx.emit(
        between(Axis("k1", n1), Axis("m2", n2)),
        make_op("mul", value, ctx.load(first, "k1", "m1", last, part)),
        (Axis("m1", n1), *([Axis("p", 2)] if parts == 2 else [])),
        "sum",
        dtype=working,
        into="inner",
    )
    terms = [make_op("mul", ctx.load(sums, *around("k1", "m2", part=p)), ctx.load(turn, "k1", "m2", last, p)) for p in (0, 1)]
    turned = ctx.emit(between(Axis("k1", n1), Axis("m2", n2)), make_op("add", *terms), dtype=working, into="turned")
    body = make_op("mul", ctx.load(turned, *around("k1", "m2", part="p")), ctx.load(second, "k2", "m2", last, "p"))
    rows = Axis("k2", -(-axes[dim].extent // n1))
    reduce = (Axis("m2", n2), Axis("p", 2))
    outer = ctx.emit(between(rows, Axis("k1", n1)), body, reduce, "sum", dtype=working, into="outer")
    own = axes[dim].name
    total: Expr = ctx.load(outer, *around(ex.make_floordiv(own, n1), ex.make_mod(own, n1), part=last))
    ctx.emit(axes, total if working == ctx.out().dtype else Cast(ctx.out().dtype, total), into=0)


def _length_and_axis(ctx: Lowering, rank: int) -> tuple[int, int]:
    given = ctx.static(1, "dft_length")
    if ctx.node.version >= 20:
        axis = ctx.static(2, "axis")
        dim = axis_of(ctx, -2 if axis is None else int(axis.item()), rank)
    else:
        dim = axis_of(ctx, int(ctx.attr("axis", 1)), rank)
    length = ctx.shape(ctx.input(0))[dim] if given is None else int(given.item())
    if given is None and ctx.attr("inverse", 0) and ctx.attr("onesided", 0):
        length = 2 * (length - 1)
    if length < 1:
        raise ctx.refused(f"a transform of length {length}")
    return length, dim


def _emit_product(ctx: Lowering, table: np.ndarray, dim: int, kept: int, working: str) -> None:
    """Emit the product of the signal with a table ``[shown, kept, (re, im)]``: one sum over samples and, if complex, parts."""
    x, axes = ctx.input(0), ctx.axes(ctx.node.outputs[0])
    parts, last = ctx.shape(x)[-1], axes[-1]
    # rows[k, n, part of x, part of y]: (a + bi)(c + di) = (ac - bd) + (ad + bc)i
    re, im = table[..., 0], table[..., 1]
    rows = np.stack([np.stack([re, im], -1), np.stack([-im, re], -1)], axis=-2)[..., :parts, : last.extent]
    name = ctx.constant(np.ascontiguousarray(rows.transpose(0, 3, 1, 2)).astype(working), "waves")
    index: list[Expr | int | str] = [a.name for a in axes]
    index[dim], index[-1] = "n", "p" if parts == 2 else 0
    value: Expr = ctx.load(x, *index)
    value = value if ctx.type(x).dtype == working else Cast(working, value)
    body = make_op("mul", value, ctx.load(name, axes[dim].name, last.name, "n", "p" if parts == 2 else 0))
    reduce = (Axis("n", kept), *([Axis("p", parts)] if parts == 2 else []))
    _emit_sum(ctx, axes, body, reduce, working)


@lowering("STFT")
def lower_stft(ctx: Lowering) -> None:
    """Lower STFT: ``y[b, f, k] = sum_n signal[b, f * step + n] window[n] exp(-2 pi i n k / length)``."""
    signal, dtype = ctx.input(0), ctx.out().dtype
    step, given = ctx.static(1, "frame_step"), ctx.static(3, "frame_length")
    shape = ctx.shape(signal)
    if step is None or not is_float(dtype):
        raise CannotLower("STFT without its step")
    length = int(given.item()) if given is not None else ctx.shape(ctx.input(2))[0] if ctx.has(2) else shape[1]
    if length < 1 or int(step.item()) < 1 or len(shape) not in (2, 3):
        raise ctx.refused(f"frames of {length} with step {int(step.item())} of a signal of {list(shape)}")
    parts = shape[2] if len(shape) == 3 else 1
    if ctx.has(2) and ctx.shape(ctx.input(2)) != (length,):
        raise ctx.refused(f"a window of {list(ctx.shape(ctx.input(2)))} for frames of {length}")
    axes = ctx.axes(ctx.node.outputs[0])
    working = "float64" if dtype == "float64" else "float32"
    _check_table(ctx, length * axes[2].extent)
    if axes[1].extent and (axes[1].extent - 1) * int(step.item()) + length > shape[1]:
        raise ctx.refused(f"{axes[1].extent} frames of {length} do not fit into a signal of {shape[1]}")
    table = _twiddle_table(length, length, False, axes[2].extent)
    window = ctx.graph.constant(ctx.input(2)) if ctx.has(2) else None
    if window is not None:
        table = table * window.astype(np.float64)[:, None]
    re, im = table[..., 0], table[..., 1]
    rows = np.stack([np.stack([re, im], -1), np.stack([-im, re], -1)], axis=-2)[..., :parts, :]
    waves = ctx.constant(np.ascontiguousarray(rows.transpose(0, 3, 1, 2)).astype(working), "waves")
    part: Expr | int | str = "p" if parts == 2 else 0
    place = ex.make_add(ex.make_mul(axes[1].name, int(step.item())), "n")
    read: tuple[Expr | int | str, ...] = (axes[0].name, place, part) if len(shape) == 3 else (axes[0].name, place)
    value: Expr = ctx.load(signal, *read)
    value = value if ctx.type(signal).dtype == working else Cast(working, value)
    if ctx.has(2) and window is None:
        factor = ctx.load(ctx.input(2), "n")
        weighed = make_op("mul", value, factor if dtype == working else Cast(working, factor))
        framed = (axes[0], axes[1], Axis("n", length), *([Axis("p", parts)] if parts == 2 else []))
        value = whole_load(ctx, ctx.emit(framed, weighed, dtype=working, into="frames"), framed)
    body = make_op("mul", value, ctx.load(waves, axes[2].name, axes[3].name, "n", part))
    reduce = (Axis("n", length), *([Axis("p", parts)] if parts == 2 else []))
    _emit_sum(ctx, axes, body, reduce, working)


def _emit_sum(ctx: Lowering, axes: tuple[Axis, ...], body: Expr, reduce: tuple[Axis, ...], working: str) -> None:
    """Emit the result: a sum in the ``working`` type, converted to the output's type."""
    dtype = ctx.out().dtype
    if working == dtype:
        ctx.emit(axes, body, reduce, "sum", into=0)
        return
    total = ctx.emit(axes, body, reduce, "sum", dtype=working, into="total")
    ctx.emit(axes, Cast(dtype, whole_load(ctx, total, axes)), into=0)
