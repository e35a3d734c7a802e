"""Det: Gaussian elimination with the largest pivot, unrolled over the columns."""

from __future__ import annotations

from typing import Final

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import make_literal, make_op
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr, Load

#: Row limit of matrices; the host handles larger ones, since a column needs four Computes.
MOST_ROWS: Final = 64


@lowering("Det")
def lower_det(ctx: Lowering) -> None:
    """Lower Det: the product of the pivots, with the sign of the row exchanges."""
    shape, dtype = ctx.shape(ctx.input(0)), ctx.out().dtype
    if shape[-1] != shape[-2]:
        raise ctx.refused(f"matrices of {list(shape[-2:])} are not square")
    if shape[-1] > MOST_ROWS:
        raise CannotLower(f"Det of {shape[-1]} rows, more than {MOST_ROWS}")
    lead, working = ctx.axes(ctx.node.outputs[0], "b"), "float32" if dtype == "float16" else dtype
    result: Expr = make_literal(1, working)
    matrix, point = ctx.input(0), [a.name for a in lead]

    def at(tensor: str, row: Expr | int | str, column: Expr | int | str) -> Expr:
        load = Load(tensor, tuple(ex.as_index(i) for i in (*point, row, column)), 0.0 if isinstance(row, Load) else None)
        return load if ctx.type(tensor).dtype == working else Cast(working, load)

    for rows in range(shape[-1], 0, -1):
        row = Axis("r", rows)
        size = make_op("abs", at(matrix, "r", 0))
        largest = ctx.load(ctx.emit(lead, size, (row,), "max", dtype=working, into=f"largest{rows}"), *point)
        found = make_op("where", make_op("eq", size, largest), ex.as_index("r"), ex.integer(rows - 1))
        place = ctx.load(ctx.emit(lead, found, (row,), "min", dtype="int64", into=f"row{rows}"), *point)
        pivot = at(matrix, place, 0)
        signed = make_op("where", make_op("eq", place, ex.integer(0)), pivot, make_op("neg", pivot))
        made = ctx.emit(lead, make_op("mul", result, signed), dtype=working, into=f"product{rows}")
        result = ctx.load(made, *point)
        if rows > 1:
            matrix = _eliminate_column(ctx, at, matrix, place, (*lead, Axis("i", rows - 1), Axis("j", rows - 1)), working)
    ctx.emit(lead, result if working == dtype else Cast(dtype, result), into=0)


def _eliminate_column(ctx: Lowering, at: object, matrix: str, place: Load, axes: tuple[Axis, ...], working: str) -> str:
    """Return the matrix without its first column and the pivot's row, which is replaced by the first row."""
    assert callable(at)
    below, right = ex.make_add("i", 1), ex.make_add("j", 1)
    # One load with a selected index, so that both rows are read alike.
    source = make_op("where", make_op("eq", below, place), ex.integer(0), below)
    rest = ctx.emit(
        (*axes[:-1], Axis("j", axes[-1].extent + 1)), _load_row(at(matrix, place, "j"), source), dtype=working, into="rest"
    )
    point = [a.name for a in axes]
    pivot, first = at(matrix, place, 0), ctx.load(rest, *point[:-1], 0)
    factor = make_op(
        "where", make_op("eq", pivot, make_literal(0, working)), make_literal(0, working), make_op("div", first, pivot)
    )
    value = make_op("sub", ctx.load(rest, *point[:-1], right), make_op("mul", factor, at(matrix, place, right)))
    return ctx.emit(axes, value, dtype=working, into="matrix")


def _load_row(load: Expr, row: Expr) -> Expr:
    """Return a load of a matrix's element at another row."""
    if isinstance(load, Cast):
        return Cast(load.dtype, _load_row(load.arg, row))
    assert isinstance(load, Load)
    return Load(load.tensor, (*load.indices[:-2], row, load.indices[-1]), 0.0)
