"""Recognition of attention: a product, maps and reductions along its rows, and a product of those rows.

``S[.., m, n] = sum[k] Q[.., m, k] * K[.., k, n]``, then row-wise Computes that end in ``P[.., m, n]``, then ``C[.., m, j] =
sum[n] P[.., m, n] * V[.., n, j]`` followed by element-wise maps. The leading axes are heads; a task has one head, some rows
``m``, and all keys ``n`` and columns ``j``. The key axis and the column axis have the same position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rammer.codegen import Operand, Unsuited, canonicalise_sum, check_followers, operand_of
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, contraction_operands
from rammer.ir.expr import Expr, Load, Ref, integer
from rammer.ir.operator import ROperator

#: Longest rows: a task's scores must fit its threads' registers.
MOST_KEYS = 1024
FLOATS = frozenset(("float32", "float16"))


@dataclass(frozen=True)
class Attention:
    """The two products and the Computes between and after them; ``row`` and ``column`` are positions among their axes."""

    operator: ROperator
    scores: Compute
    context: Compute
    q: Operand
    k: Operand
    v: Operand
    row: int
    column: int
    between: tuple[Compute, ...]
    after: tuple[Compute, ...]
    half: bool

    @property
    def depth(self) -> Axis:
        """The reduced axis of the first product."""
        return live_axes(self.scores.reduce)[0]

    @property
    def keys(self) -> int:
        """The elements of a row of scores."""
        return self.scores.axes[self.column].extent

    @property
    def width(self) -> int:
        """The columns of the result."""
        return self.context.axes[self.column].extent

    @property
    def rows(self) -> int:
        """The rows of a head."""
        return self.scores.axes[self.row].extent

    @property
    def held(self) -> tuple[str, ...]:
        """The row matrices that a task connects on chip; each overwrites the previous one."""
        names = {e.producer for e in self.operator.connections if e.layer == "veu"}
        return tuple(c.name for c in self.between if c.name in names and c.shape == self.scores.shape)

    @property
    def reductions(self) -> tuple[Compute, ...]:
        """The reductions along rows."""
        return tuple(c for c in self.between if c.reduce)

    def point(self, row: Expr, last: Expr) -> tuple[Expr, ...]:
        """Return the indices of an element of either product, in the task's head ``o0, o1, ...``."""
        heads: list[Expr] = [Ref(f"o{d}") if a.extent > 1 else integer(0) for d, a in enumerate(self.scores.axes)]
        heads[self.row], heads[self.column] = row if self.rows > 1 else integer(0), last
        return tuple(heads)

    def tile(self, rows: int) -> tuple[int, ...]:
        """Return the tile of one head, ``rows`` rows and all columns."""
        return tuple(
            min(rows, a.extent) if d == self.row else a.extent if d == self.column else 1 for d, a in enumerate(self.context.axes)
        )

    def along(self, c: Compute, row: Expr, key: Expr) -> dict[str, Expr]:
        """Return the axes of the reduction ``c`` at an element of its row. Raise Unsuited if it is not along rows."""
        point, shape = self.point(row, key), self.scores.shape
        matrices = {m.name for m in (self.scores, *self.between) if m.shape == shape and not (m.reduce and m is not self.scores)}
        load = next((ld for ld in c.loads if ld.tensor in matrices), None)
        if load is None:
            raise Unsuited(f"{c.name} reduces no scores")
        values: dict[str, Expr] = {i.axis: p for i, p in zip(load.indices, point, strict=True) if isinstance(i, Ref)}
        values |= {a.name: integer(0) for a in (*c.axes, *c.reduce) if a.extent == 1}
        over = [values.get(r.name) for r in live_axes(c.reduce)]
        if over != [key] or any(a.name not in values for a in c.axes) or key in [values[a.name] for a in c.axes]:
            raise Unsuited(f"{c.name} does not reduce rows of scores")
        return {n: canonicalise_sum(e) for n, e in values.items()}


def live_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the axes of more than one element."""
    return tuple(a for a in axes if a.extent > 1)


def attention_of(operator: ROperator, binding: Binding) -> Attention:
    """Return the attention of an operator, tiled or not. Raise Unsuited with the reason if it has another form."""
    products = [i for i, c in enumerate(operator.computes) if c.kind == "contraction"]
    if len(products) != 2 or products[0] != 0 or operator.outputs != (operator.anchor.name,):
        raise Unsuited("not two products, the first one first, with one result")
    scores, context = operator.computes[0], operator.computes[products[1]]
    between, after = operator.computes[1 : products[1]], operator.computes[products[1] + 1 :]
    if any(0 in (*c.shape, *(r.extent for r in c.reduce)) for c in operator.computes):
        raise Unsuited("nothing to compute")
    last = (between or (scores,))[-1]
    p, v = _split_operands(context, last.name)
    column = _column_position(context, p, v)
    if last.shape != scores.shape or scores.shape[:column] + scores.shape[column + 1 :] != (
        context.shape[:column] + context.shape[column + 1 :]
    ):
        raise Unsuited("the products have different rows")
    q, k, row = _score_operands(scores, column)
    dtypes = {binding.types[ld.tensor].dtype for ld in (q, k, v)}
    kept = {c.dtype for c in (scores, context, *between)}
    if len(dtypes) != 1 or not dtypes | kept <= FLOATS:
        raise Unsuited(f"a mixture of {', '.join(sorted(dtypes | kept))}")
    if len(live_axes(scores.reduce)) != 1 or scores.shape[column] > MOST_KEYS or scores.shape[column] < 2:
        raise Unsuited("the rows are too long or missing")
    _check_after(after, context, {c.name for c in (scores, *between)})
    first, second, third = (_unpadded_operand(ld, c, binding) for ld, c in ((q, scores), (k, scores), (v, context)))
    found = Attention(operator, scores, context, first, second, third, row, column, between, after, dtypes == {"float16"})
    for c in found.reductions:
        found.along(c, Ref("row"), Ref("key"))
    if operator.tile and any(t != found.tile(1)[d] for d, t in enumerate(operator.tile) if d != row):
        raise Unsuited("a task has one head and whole rows")
    return found


def _split_operands(context: Compute, rows: str) -> tuple[Load, Load]:
    """Return the operand with the rows, then the other operand."""
    operands = contraction_operands(context)
    if operands is None:
        raise Unsuited(f"{context.name} multiplies by dequantised values")
    own = [ld.tensor == rows for ld in operands]
    if sum(own) != 1:
        raise Unsuited("the second product does not read the rows of the first")
    return operands if own[0] else (operands[1], operands[0])


def _column_position(context: Compute, p: Load, v: Load) -> int:
    """Return the position of the second product's columns."""
    reduce = live_axes(context.reduce)
    places = [d for d, i in enumerate(p.indices) if len(reduce) == 1 and i == Ref(reduce[0].name)]
    if len(places) != 1 or len(p.indices) != len(context.axes) or p.fill is not None:
        raise Unsuited("the second product does not sum over one axis of the rows")
    column = places[0]
    for d, (axis, index) in enumerate(zip(context.axes, p.indices, strict=True)):
        if d != column and axis.extent > 1 and index != Ref(axis.name):
            raise Unsuited("the second product does not read row by row")
    if context.axes[column].name in ex.axes_of(p):
        raise Unsuited("the rows depend on the column")
    return column


def _score_operands(scores: Compute, column: int) -> tuple[Load, Load, int]:
    """Return the operands of the scores, rows first, and the position of the row axis."""
    operands = contraction_operands(scores)
    if operands is None:
        raise Unsuited(f"{scores.name} multiplies by dequantised values")
    key, single = scores.axes[column].name, [d for d, a in enumerate(scores.axes) if a.extent == 1]
    for q, k in (operands, operands[::-1]):
        own = [d for d, a in enumerate(scores.axes) if a.extent > 1 and a.name in ex.axes_of(q) and a.name not in ex.axes_of(k)]
        own = own or single[-1:]  # one query
        if key in ex.axes_of(k) and key not in ex.axes_of(q) and len(own) == 1:
            return q, k, own[0]
    raise Unsuited("the scores do not have one axis of rows and one of keys")


def _check_after(after: tuple[Compute, ...], context: Compute, interior: set[str]) -> None:
    check_followers(context, after)
    if any(t in interior for c in after for t in c.reads):
        raise Unsuited("a map after the second product reads the first")


def _unpadded_operand(load: Load, product: Compute, binding: Binding) -> Operand:
    operand = operand_of(load, product, binding)
    if operand.guards:
        raise Unsuited("padded operands")
    return operand


def tile_attention(attention: Attention, rows: int, config: Mapping[str, int]) -> ROperator:
    """Return the operator with tasks of one head and ``rows`` rows."""
    return replace(attention.operator, tile=attention.tile(rows), family="attention", config=tuple(config.items()))
