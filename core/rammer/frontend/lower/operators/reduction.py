"""Reductions (Reduce*), ArgMax and ArgMin, running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Combiner, combiner_identity
from rammer.ir.expr import Cast, Const, Expr, Load, Op
from rammer.ir.types import is_float


@dataclass(frozen=True)
class _Reduction:
    """The axes of a reduction: ``index`` addresses the input by ``axes`` (kept) and ``reduce``. With keepdims a reduced dimension
    stays in ``axes`` with extent 1."""

    axes: tuple[Axis, ...]
    reduce: tuple[Axis, ...]
    index: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of elements combined into one."""
        return math.prod(a.extent for a in self.reduce)

    def load(self, tensor: str) -> Load:
        """Return a load of the input's shape at the reduction's point."""
        return Load(tensor, tuple(ex.as_index(i) for i in self.index))

    def result(self, tensor: str) -> Load:
        """Return a load of a tensor with the reduction's output shape."""
        return Load(tensor, tuple(ex.as_index(a.name) for a in self.axes))


def _make_reduction(ctx: Lowering, dims: set[int], keepdims: bool) -> _Reduction:
    shape = ctx.shape(ctx.input(0))
    axes, reduce, index = [], [], []
    for d, extent in enumerate(shape):
        if d not in dims:
            axes.append(Axis(f"i{d}", extent))
            index.append(f"i{d}")
            continue
        reduce.append(Axis(f"k{d}", extent))
        index.append(f"k{d}")
        if keepdims:
            axes.append(Axis(f"i{d}", 1))
    return _Reduction(tuple(axes), tuple(reduce), tuple(index))


def _reduced_dims(ctx: Lowering) -> set[int]:
    """Return the reduced dimensions from the attribute (older opsets) or the static input ``axes``."""
    rank = len(ctx.shape(ctx.input(0)))
    given = ctx.static(1, "axes")
    axes = ctx.attr("axes") if given is None else given.ravel().tolist()
    if axes is None or len(axes) == 0:
        return set() if ctx.attr("noop_with_empty_axes", 0) else set(range(rank))
    return {int(a) % rank for a in axes}


@dataclass(frozen=True)
class _Recipe:
    """The recipe ``after(combiner over before(x), count)``; if ``real``, integers are computed in float64."""

    combiner: Combiner
    before: Callable[[Expr], Expr] = lambda x: x
    after: Callable[[Expr, int], Expr] | None = None
    real: bool = False


def _square_expr(x: Expr) -> Expr:
    return Op("mul", (x, x))


def _absolute_expr(x: Expr) -> Expr:
    return Op("abs", (x,))


_RECIPES: dict[str, _Recipe] = {
    "ReduceSum": _Recipe("sum"),
    "ReduceMean": _Recipe("sum", after=lambda total, count: Op("div", (total, Const(count)))),
    "ReduceMax": _Recipe("max"),
    "ReduceMin": _Recipe("min"),
    "ReduceProd": _Recipe("prod"),
    "ReduceL1": _Recipe("sum", _absolute_expr),
    "ReduceSumSquare": _Recipe("sum", _square_expr),
    "ReduceL2": _Recipe("sum", _square_expr, lambda total, _: Op("sqrt", (total,)), real=True),
    "ReduceLogSum": _Recipe("sum", after=lambda total, _: Op("log", (total,)), real=True),
}


@lowering(*_RECIPES)
def lower_reduce(ctx: Lowering) -> None:
    """Lower a reduction: one Compute and, if the definition has a final step, one map."""
    recipe = _RECIPES[ctx.node.op]
    shape = _make_reduction(ctx, _reduced_dims(ctx), bool(ctx.attr("keepdims", 1)))
    dtype = ctx.out().dtype
    value: Expr = shape.load(ctx.input(0))
    whole = recipe.after is None
    if recipe.real and not is_float(dtype):
        value = Cast("float64", value)
    elif not whole and dtype == "float16":
        value = Cast("float32", value)
    total = _emit_reduction(ctx, shape, recipe.before(value), recipe.combiner, whole)
    if recipe.after is not None:
        result = recipe.after(shape.result(total), shape.count)
        ctx.emit(shape.axes, result if ctx.type(total).dtype == dtype else Cast(dtype, result), into=0)


def _emit_reduction(ctx: Lowering, shape: _Reduction, body: Expr, combiner: Combiner, whole: bool) -> str:
    """Emit the reduction, which is the ``whole`` operator or a part; an empty reduction gives the combiner's identity."""
    into: int | str = 0 if whole else combiner
    if not shape.reduce:
        return ctx.emit(shape.axes, body, into=into)
    if shape.count == 0:
        dtype = ex.dtype_of(body, {ctx.input(0): ctx.type(ctx.input(0)).dtype})
        return ctx.emit(shape.axes, combiner_identity(combiner, dtype), into=into)
    return ctx.emit(shape.axes, body, shape.reduce, combiner, into=into)


@lowering("ReduceLogSumExp")
def reduce_log_sum_exp(ctx: Lowering) -> None:
    """Lower ReduceLogSumExp: ``max + log(sum(exp(x - max)))``; an infinite maximum is not subtracted (inf - inf is NaN)."""
    shape = _make_reduction(ctx, _reduced_dims(ctx), bool(ctx.attr("keepdims", 1)))
    dtype = ctx.out().dtype
    x: Expr = shape.load(ctx.input(0))
    x = Cast("float32" if dtype == "float16" else "float64", x) if dtype == "float16" or not is_float(dtype) else x
    if shape.count == 0:
        nothing = Const(-math.inf, dtype) if is_float(dtype) else combiner_identity("max", dtype)
        ctx.emit(shape.axes, nothing, into=0)
        return
    largest = shape.result(_emit_reduction(ctx, shape, x, "max", False))
    finite = Op("where", (Op("isinf", (largest,)), Const(0.0), largest))
    offset = shape.result(ctx.emit(shape.axes, finite, dtype=ctx.type(largest.tensor).dtype, into="offset"))
    exponential = Op("exp", (Op("sub", (x, offset)),))
    total = shape.result(_emit_reduction(ctx, shape, exponential, "sum", False))
    result = Op("add", (Op("log", (total,)), offset))
    ctx.emit(shape.axes, result if ctx.type(total.tensor).dtype == dtype else Cast(dtype, result), into=0)


@lowering("ArgMax", "ArgMin")
def arg_extreme(ctx: Lowering) -> None:
    """Lower ArgMax and ArgMin: the extreme value, then the first (or last) position that holds it."""
    rank = len(ctx.shape(ctx.input(0)))
    dim = int(ctx.attr("axis", 0)) % rank
    shape = _make_reduction(ctx, {dim}, bool(ctx.attr("keepdims", 1)))
    if shape.count == 0:
        raise CannotLower(f"{ctx.node.op} over an empty dimension")
    x = shape.load(ctx.input(0))
    extreme = shape.result(_emit_reduction(ctx, shape, x, "max" if ctx.node.op == "ArgMax" else "min", False))
    place = ex.as_index(f"k{dim}")
    last = bool(ctx.attr("select_last_index", 0))
    other = ex.integer(0 if last else shape.count - 1)
    found: Expr = Op("eq", (x, extreme))
    if is_float(ctx.type(ctx.input(0)).dtype):
        # A NaN is the extreme of its row, as in NumPy and torch, but equals nothing.
        found = Op("or_", (found, Op("isnan", (x,))))
    candidate = Op("where", (found, place, other))
    ctx.emit(shape.axes, candidate, shape.reduce, "max" if last else "min", into=0, dtype="int64")


@lowering("CumSum", "CumProd")
def lower_cumulative(ctx: Lowering) -> None:
    """Lower CumSum and CumProd: ``y[i] = combine[k] x[i - k]``, guarded by the identity before the first element."""
    axis = ctx.static(1, "axis")
    if axis is None:
        raise CannotLower(f"{ctx.node.op} without its axis")
    axes = ctx.axes(ctx.input(0))
    dim = int(axis.ravel()[0]) % len(axes)
    sign = 1 if ctx.attr("reverse", 0) else -1
    place = ex.make_add(ex.make_add(axes[dim].name, ex.make_mul("k", sign)), sign * int(ctx.attr("exclusive", 0)))
    indices: list[Expr | int | str] = [a.name for a in axes]
    indices[dim] = place
    combiner: Combiner = "sum" if ctx.node.op == "CumSum" else "prod"
    body = ctx.load(ctx.input(0), *indices, fill=0 if combiner == "sum" else 1)
    ctx.emit(axes, body, (Axis("k", axes[dim].extent),), combiner, into=0)
