"""Matrix products: MatMul, Gemm and Einsum."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.frontend.lower.einsum_equations import parse_equation
from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.ir.compute import Axis
from rammer.ir.expr import Const, Expr, Op
from rammer.ir.types import is_float


@lowering("MatMul")
def lower_matmul(ctx: Lowering) -> None:
    """Lower MatMul like NumPy: leading dimensions broadcast; a vector is a row on the left, a column on the right."""
    a, b = ctx.input(0), ctx.input(1)
    left, right = ctx.shape(a), ctx.shape(b)
    out = ctx.out().shape
    inner = int(len(left) > 1) + int(len(right) > 1)
    batch = tuple(Axis(f"b{d}", n) for d, n in enumerate(out[: len(out) - inner]))
    rows = (Axis("m", left[-2]),) if len(left) > 1 else ()
    columns = (Axis("n", right[-1]),) if len(right) > 1 else ()
    x = ctx.load(a, *leading_indices(left[:-2], batch), *(r.name for r in rows), "k")
    y = ctx.load(b, *leading_indices(right[:-2], batch), "k", *(c.name for c in columns))
    ctx.emit((*batch, *rows, *columns), Op("mul", (x, y)), (Axis("k", left[-1]),), "sum", into=0)


def leading_indices(shape: Sequence[int], batch: Sequence[Axis]) -> list[str | int]:
    """Return indices of broadcast leading dimensions: 0 for a stretched extent of 1."""
    tail = batch[len(batch) - len(shape) :]
    return [0 if n == 1 and a.extent != 1 else a.name for n, a in zip(shape, tail, strict=True)]


@lowering("Gemm")
def lower_gemm(ctx: Lowering) -> None:
    """Lower Gemm: ``alpha * op(a) @ op(b) + beta * c``, as one contraction and, if needed, one map."""
    a, b = ctx.input(0), ctx.input(1)
    rows, columns = ctx.out().shape
    flip_a, flip_b = bool(ctx.attr("transA", 0)), bool(ctx.attr("transB", 0))
    x = ctx.load(a, *(("k", "m") if flip_a else ("m", "k")))
    y = ctx.load(b, *(("n", "k") if flip_b else ("k", "n")))
    inner = Axis("k", ctx.shape(a)[0 if flip_a else 1])
    dtype = ctx.out().dtype
    alpha, beta = _attribute_factor(ctx, "alpha", dtype), _attribute_factor(ctx, "beta", dtype)
    axes = (Axis("m", rows), Axis("n", columns))
    plain = not ctx.has(2) and alpha is None
    total = ctx.emit(axes, Op("mul", (x, y)), (inner,), "sum", into=0 if plain else "gemm")
    if plain:
        return
    value = _scale_value(ctx.load(total, "m", "n"), alpha)
    if ctx.has(2):
        value = Op("add", (value, _scale_value(ctx.broadcast(ctx.input(2), axes), beta)))
    ctx.emit(axes, value, into=0)


def _attribute_factor(ctx: Lowering, name: str, dtype: str) -> Const | None:
    """Return the attribute as a literal, or None if it is 1."""
    value = float(ctx.attr(name, 1.0))
    if not is_float(dtype) and not value.is_integer():
        raise CannotLower(f"Gemm of {dtype} with {name}={value}")
    return None if value == 1.0 else Const(value, dtype)


def _scale_value(value: Expr, factor: Const | None) -> Expr:
    return value if factor is None else Op("mul", (value, factor))


@lowering("Einsum")
def lower_einsum(ctx: Lowering) -> None:
    """Lower Einsum of any number of operands; repeated labels select diagonals, ``...`` broadcasts."""
    equation = parse_equation(str(ctx.attr("equation")), [ctx.shape(name) for name in ctx.node.inputs])
    extents, output = equation.extents, equation.result
    reduce = [Axis(n, e) for n, e in extents.items() if n not in output]
    body: Expr | None = None
    for names, operand in zip(equation.operands, ctx.node.inputs, strict=True):
        indices = [0 if e != extents[n] else n for n, e in zip(names, ctx.shape(operand), strict=True)]
        load = ctx.load(operand, *indices)
        body = load if body is None else Op("mul", (body, load))
    if body is None:
        raise CannotLower("Einsum without operands")
    axes = [Axis(n, extents[n]) for n in output]
    ctx.emit(axes, body, reduce, "sum" if reduce else None, into=0)
