"""Traversal of all trees at once: a level is an expression, and one kernel walks all levels in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rammer.device.custom_operators import CustomOperator, CustomOperators
from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import make_literal, make_op
from rammer.frontend.lower.operators.stored import DOMAIN
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Const, Expr, as_index
from rammer.ir.operator_use import Use
from rammer.ir.types import TensorType


def _int32_literal(value: int) -> Const:
    return Const(value, "int32")


@lowering("Walk", domain=DOMAIN)
def lower_walk(ctx: Lowering) -> None:
    """Return the leaf that each row of ``x [rows, features]`` reaches in each tree, ``[rows, trees]``.

    Inputs: x, feature, high, and optionally low and tracks (True if a NaN continues with the true child). With attribute
    ``padded``, tables are ``[trees, nodes]``, level by level, and leaves are counted along the last level. Otherwise they are
    ``[nodes]``, followed by the true and false children of each node and the roots. A leaf is then a node that is a child of
    itself, numbered ``~leaf``.
    """
    padded, depth = bool(ctx.attr("padded")), int(ctx.attr("depth"))
    rows, trees = (Axis(n, e) for n, e in zip(("b", "t"), ctx.out().shape, strict=True))
    place = [as_index(rows.name), as_index(trees.name)]
    at: Expr = _int32_literal(0) if padded else ctx.load(ctx.input(7), trees.name)
    for level in range(depth):
        node = make_op("add", at, _int32_literal((1 << level) - 1)) if padded else at
        index = [as_index(trees.name), node] if padded else [node]
        passed = _node_condition(ctx, place[0], index)
        if padded:
            # The true child comes first.
            after = make_op("add", make_op("mul", at, _int32_literal(2)), Cast("int32", make_op("not_", passed)))
        else:
            after = make_op("where", passed, ctx.load(ctx.input(5), *index), ctx.load(ctx.input(6), *index))
        last = level == depth - 1
        name = ctx.emit((rows, trees), after, into=0 if last else "level")
        at = ctx.load(name, *place)


def _node_condition(ctx: Lowering, row: Expr, index: list[Expr]) -> Expr:
    """Return True where a node's test passes."""
    x = ctx.load(ctx.input(0), row, ctx.load(ctx.input(1), *index))
    passed: Expr = make_op("le", x, ctx.load(ctx.input(2), *index))
    if ctx.has(3):
        passed = make_op("and_", passed, make_op("le", ctx.load(ctx.input(3), *index), x))
    if ctx.has(4):
        passed = make_op("or_", passed, make_op("and_", make_op("isnan", x), ctx.load(ctx.input(4), *index)))
    return passed


@lowering("Gathered", domain=DOMAIN)
def lower_gathered(ctx: Lowering) -> None:
    """Lower Gathered: ``y[b, c] = sum[t] weights[t, leaf[b, t], c]`` over all trees, by the combiner of attribute ``how``.

    With attribute ``groups``, every target has equally many consecutive trees, and weights are ``[trees, leaves]``. With
    ``padded``, leaves are counted per tree. Otherwise they are counted over the whole forest, and weights have no axis for trees.
    """
    padded, groups = bool(ctx.attr("padded")), bool(ctx.attr("groups"))
    rows, targets = (Axis(n, e) for n, e in zip(("b", "c"), ctx.out().shape, strict=True))
    count = ctx.shape(ctx.input(0))[1]
    each = count // targets.extent if groups else count
    tree: Expr = as_index("t")
    if groups and targets.extent > 1:
        tree = make_op("add", make_op("mul", as_index("c"), make_literal(each, "int64")), tree)
    leaf = ctx.load(ctx.input(0), rows.name, tree)
    index = [*([tree] if padded else []), leaf, *([] if groups else [as_index("c")])]
    ctx.emit((rows, targets), ctx.load(ctx.input(1), *index), [Axis("t", each)], ctx.attr("how"), into=0)


def _walked(use: Use) -> Sequence[TensorType]:
    return [TensorType("int32", (use.shape(0)[0], use.attr("trees")))]


def _gathered_types(use: Use) -> Sequence[TensorType]:
    return [TensorType(use.dtype(1), (use.shape(0)[0], use.attr("targets")))]


_FLAG = {"padded": 0, "groups": 0}
#: Internal operators by domain and name, like a plugin's; models cannot name them, since their operators are checked first.
INTERNAL: Final[CustomOperators] = {
    (o.domain, o.name): o
    for o in (
        CustomOperator(DOMAIN, "Walk", _walked, inputs=(3, 8), attributes={"padded": 0, "depth": int, "trees": int}),
        CustomOperator(DOMAIN, "Gathered", _gathered_types, inputs=2, attributes={**_FLAG, "targets": int, "how": "sum"}),
    )
}
