"""Shape operators, each one map with a single load. The storage pass makes a view of it if the address is affine in the axes, and
a copy otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import axis_of, emit_copy, out_axes, static_ints, whole_load
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Load
from rammer.ir.piecewise import concat_body
from rammer.ir.reindex import reshape_indices
from rammer.ir.types import is_float

#: Largest number of parts of a concatenation in one expression; more parts are joined in groups of this size first.
MAX_PIECES = 256
PIECES = 64


@lowering("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def lower_reshape(ctx: Lowering) -> None:
    """Lower reshapes: the same elements in row-major order under the inferred shape."""
    x, axes = ctx.input(0), out_axes(ctx)
    if ctx.type(x).size != ctx.out().size:
        raise CannotLower(f"{ctx.node.op} of {ctx.shape(x)} to {ctx.out().shape} changes the size")
    ctx.emit(axes, Load(x, reshape_indices(ctx.shape(x), axes)), into=0)


@lowering("Transpose")
def lower_transpose(ctx: Lowering) -> None:
    """Lower Transpose: ``y[i0, i1, ..] = x[i at perm^-1]``; the default reverses the axes."""
    x, axes = ctx.input(0), out_axes(ctx)
    rank = len(axes)
    perm = [int(p) for p in ctx.attr("perm") or reversed(range(rank))]
    ctx.emit(axes, ctx.load(x, *[axes[perm.index(d)].name for d in range(rank)]), into=0)


@lowering("Expand")
def lower_expand(ctx: Lowering) -> None:
    """Lower Expand: NumPy broadcasting to the declared shape."""
    axes = out_axes(ctx)
    ctx.emit(axes, ctx.broadcast(ctx.input(0), axes), into=0)


@lowering("Tile")
def lower_tile(ctx: Lowering) -> None:
    """Lower Tile: ``x`` repeated along each axis."""
    x, axes = ctx.input(0), out_axes(ctx)
    indices = [a.name if n == a.extent else ex.make_mod(a.name, max(n, 1)) for n, a in zip(ctx.shape(x), axes, strict=True)]
    ctx.emit(axes, ctx.load(x, *indices), into=0)


@lowering("Concat")
def lower_concat(ctx: Lowering) -> None:
    """Lower Concat: inputs one after another along ``axis``."""
    axes = out_axes(ctx)
    dim = axis_of(ctx, int(ctx.attr("axis", 1)), len(axes))
    if len(ctx.node.inputs) == 1:
        emit_copy(ctx, ctx.input(0))
        return
    parts = [(name, ctx.shape(name)[dim]) for name in ctx.node.inputs]
    fill = 0.0 if is_float(ctx.out().dtype) else 0
    while len(parts) > MAX_PIECES:  # compilers take minutes over an expression of thousands of pieces
        parts = [_emit_joined(ctx, parts[i : i + PIECES], axes, dim, fill) for i in range(0, len(parts), PIECES)]
    ctx.emit(axes, concat_body(parts, axes, dim, fill), into=0)


def _emit_joined(
    ctx: Lowering, parts: Sequence[tuple[str, int]], axes: Sequence[Axis], dim: int, fill: ex.Number
) -> tuple[str, int]:
    """Emit a part of a concatenation as a tensor, and return it with its extent; storage makes it a slice of the whole."""
    extent = sum(n for _, n in parts)
    inner = [Axis(a.name, extent) if d == dim else a for d, a in enumerate(axes)]
    return ctx.emit(inner, concat_body(parts, inner, dim, fill)), extent


@lowering("Split")
def lower_split(ctx: Lowering) -> None:
    """Lower Split: consecutive ranges along ``axis``, of explicit lengths or equal ones except the last."""
    x = ctx.input(0)
    dim = axis_of(ctx, int(ctx.attr("axis", 0)), len(ctx.shape(x)))
    count = len(ctx.node.outputs)
    lengths = static_ints(ctx, 1, "split") or (-(-ctx.shape(x)[dim] // int(ctx.attr("num_outputs") or count)),) * count
    start = 0
    for index, length in zip(range(count), lengths, strict=True):
        if ctx.wants(index):
            axes = out_axes(ctx, index)
            indices = [ex.make_add(a.name, start if d == dim else 0) for d, a in enumerate(axes)]
            ctx.emit(axes, ctx.load(x, *indices), into=index)
        start += length


@lowering("Slice")
def lower_slice(ctx: Lowering) -> None:
    """Lower Slice: ``x[start + step * i]`` along each listed axis; bounds are known at compile time."""
    x, axes = ctx.input(0), out_axes(ctx)
    source = ctx.shape(x)
    starts = static_ints(ctx, 1, "starts")
    if starts is None:
        raise CannotLower("Slice without starts")
    dims = static_ints(ctx, 3, "axes") or tuple(range(len(starts)))
    steps = static_ints(ctx, 4, "steps") or (1,) * len(starts)
    indices = [ex.as_index(a.name) for a in axes]
    for start, dim, step in zip(starts, dims, steps, strict=True):
        d = axis_of(ctx, dim, len(source))
        if step == 0:
            raise CannotLower("Slice with step 0")
        # The end only decides the number of elements, which the declared shape already contains.
        first = start + source[d] if start < 0 else start
        first = min(max(first, 0), source[d] if step > 0 else source[d] - 1)
        indices[d] = ex.make_add(ex.make_mul(axes[d].name, step), first) if axes[d].extent > 1 else ex.integer(first)
    empty = 0 in ctx.out().shape
    ctx.emit(axes, whole_load(ctx, x, axes) if empty else ctx.load(x, *indices), into=0)
