"""Seeing an operator as a matrix product: which axes are rows, which columns, and who reads them how.

``C[rows, columns] = sum over the reduction axes of A[rows, k] * B[k, columns]`` for every value of the
remaining axes, which a task holds fixed. Everything a panel kernel reads must be affine in the axes,
apart from ``m // d`` with ``d`` a multiple of the row tile (grouped convolution), fixed within a task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, contraction_operands, identity_load
from rammer.ir.expr import Const, Expr, Load, Op, Ref
from rammer.ir.operator import ROperator
from rammer.ir.types import row_major

from rammer_rocm.kernels.task import Unsuited

#: Suffix of the pseudo-axis that stands for ``axis // d``.
QUOTIENT = "__over__"


@dataclass(frozen=True, slots=True)
class Access:
    """An affine read or write: element address ``constant + sum(steps[axis] * axis)`` from the tensor's first."""

    tensor: str
    steps: Mapping[str, int]
    constant: int

    def step(self, axis: str) -> int:
        """Elements between neighbours along ``axis``."""
        return self.steps.get(axis, 0)


@dataclass(frozen=True)
class Product:
    """A tiled operator in matrix-product form. Axis names are those of the contraction.

    ``row`` is the axis that runs over A's rows ("" for a single row), ``columns`` the axes that are flattened
    into columns (outermost first), ``a`` and ``b`` the operand loads (``b`` with quotients as pseudo-axes).
    ``before`` are maps that a load may read, ``after`` the maps that follow.
    """

    operator: ROperator
    main: Compute
    a: Load
    b: Load
    row: str
    columns: tuple[str, ...]
    before: Mapping[str, Compute]
    after: tuple[Compute, ...]

    @cached_property
    def tile(self) -> dict[str, int]:
        """Tile size by axis of the contraction."""
        return {a.name: t for a, t in zip(self.main.axes, self.operator.tile, strict=True)}

    @cached_property
    def extent(self) -> dict[str, int]:
        """Extent by axis, reduction axes included."""
        return {a.name: a.extent for a in (*self.main.axes, *self.main.reduce)}

    @cached_property
    def depth(self) -> int:
        """Products summed for one element."""
        return math.prod(r.extent for r in self.main.reduce)

    @cached_property
    def rows(self) -> int:
        """Rows of a full tile."""
        return self.tile[self.row] if self.row else 1

    @cached_property
    def width(self) -> int:
        """Columns of a full tile."""
        return math.prod(self.tile[c] for c in self.columns)


def check_operator(operator: ROperator, binding: Binding) -> Compute:
    """The contraction of an operator that panels can compute; Unsuited says why it is none."""
    main = operator.main
    if main.kind != "contraction" or 0 in main.shape or not main.reduce:
        raise Unsuited("no contraction")
    if sum(c.kind != "map" for c in operator.computes) != 1:
        raise Unsuited("more than one reduction")
    names = (*operator.inputs, *(c.name for c in operator.computes))
    if operator.anchor.shape != main.shape:
        raise Unsuited(f"{operator.anchor.name} has another shape than {main.name}")
    if any(binding.types[n].dtype != "float32" for n in names):
        raise Unsuited("not float32")
    return main


def product_of(operator: ROperator, binding: Binding) -> Product:
    """The matrix product that a tiled operator is, the better of both operand orders. Raises Unsuited."""
    main = check_operator(operator, binding)
    place = operator.computes.index(main)
    before = {c.name: c for c in operator.computes[:place]}
    after = operator.computes[place + 1 :]
    _check_after(main, before, after, operator)
    operands = contraction_operands(main)
    if operands is None:
        raise Unsuited("no contraction")
    choices, reason = list[Product](), "no operand order fits"
    for a, b in (operands, operands[::-1]):
        try:
            _check_rows(a, binding, before)
            choices.append(_ordered(operator, main, a, b, before, after))
        except Unsuited as problem:
            reason = str(problem)
    if not choices:
        raise Unsuited(reason)
    return max(choices, key=lambda p: (_last_live(p) in p.columns, p.width))


def _last_live(p: Product) -> str:
    live = [a.name for a in p.main.axes if p.tile[a.name] > 1]
    return live[-1] if live else p.main.axes[-1].name


def _check_after(main: Compute, before: Mapping[str, Compute], after: Sequence[Compute], operator: ROperator) -> None:
    known = {main.name}
    for c in after:
        if c.shape != main.shape:
            raise Unsuited(f"{c.name} has another shape than {main.name}")
        for load in c.loads:
            if load.tensor in before or (load.tensor in known and not identity_load(load, c)):
                raise Unsuited(f"{c.name} does not read {load.tensor} element by element")
        known.add(c.name)
    if any(name in before for name in operator.outputs):
        raise Unsuited("a map before the contraction is an output")


def _check_rows(a: Load, binding: Binding, before: Mapping[str, Compute]) -> None:
    """Rows are packed constants, or read in place."""
    if a.tensor in before:
        raise Unsuited("the row operand is computed")
    if a.tensor not in binding.constants:
        if a.fill is not None:
            raise Unsuited("the row operand is padded")
        access(a, binding)


def _ordered(operator: ROperator, main: Compute, a: Load, b: Load, before: Mapping[str, Compute],
             after: Sequence[Compute]) -> Product:  # fmt: skip
    tile = {x.name: t for x, t in zip(main.axes, operator.tile, strict=True)}
    b = with_quotients(b, tile)
    in_a, in_b = ex.axes_of(a), ex.axes_of(b)
    row, columns = list[str](), list[str]()
    for name in (x.name for x in main.axes if tile[x.name] > 1):
        if name in in_a and name in in_b:
            raise Unsuited(f"axis {name} runs through both operands")
        (row if name in in_a else columns).append(name)
    if len(row) > 1:
        raise Unsuited("several row axes")
    if not columns:
        # One column: the innermost free axis stands for it.
        free = [x.name for x in main.axes if x.name not in in_a]
        if not free:
            raise Unsuited("no column axis")
        columns = free[-1:]
    return Product(operator, main, a, b, row[0] if row else "", tuple(columns), before, tuple(after))


def with_quotients(load: Load, tile: Mapping[str, int]) -> Load:
    """``load`` with every ``axis // d`` that a task holds fixed replaced by a pseudo-axis."""

    def rule(e: Expr) -> Expr | None:
        if isinstance(e, Op) and e.fn == "floordiv" and isinstance(e.args[0], Ref) and isinstance(e.args[1], Const):
            axis, divisor = e.args[0].axis, int(e.args[1].value)
            if axis in tile and divisor % tile[axis] == 0:
                return Ref(f"{axis}{QUOTIENT}{divisor}")
        return None

    return Load(load.tensor, tuple(ex.transform(i, rule) for i in load.indices), load.fill)


def access(load: Load, binding: Binding) -> Access:
    """Element address of a load from its storage's strides; Unsuited unless affine."""
    strides = binding.storages[load.tensor].strides
    return _access(load, strides)


def _access(load: Load, strides: Sequence[int]) -> Access:
    steps, constant = dict[str, int](), 0
    for index, stride in zip(load.indices, strides, strict=True):
        form = ex.affine(index)
        if form is None:
            raise Unsuited(f"{load} is not affine")
        constant += form[1] * stride
        for axis, coefficient in form[0].items():
            steps[axis] = steps.get(axis, 0) + coefficient * stride
    return Access(load.tensor, {a: s for a, s in steps.items() if s}, constant)


def whole(compute: Compute, binding: Binding) -> Access:
    """Element address of the point that ``compute`` writes, in its own axes."""
    indices = tuple(Ref(a.name) for a in compute.axes)
    return access(Load(compute.name, indices), binding)


def contiguous(steps: Access, p: Product) -> bool:
    """Whether consecutive columns of any task are consecutive elements."""
    expected, tile, extent = 1, p.tile, p.extent
    for axis in reversed(p.columns):
        if tile[axis] > 1 and steps.step(axis) != expected:
            return False
        if axis != p.columns[0] and extent[axis] % tile[axis]:
            return False
        expected *= tile[axis]
    return True


def dense_axes(axes: Sequence[Axis]) -> dict[str, int]:
    """Row-major steps of the given axes."""
    return dict(zip((a.name for a in axes), row_major(tuple(a.extent for a in axes)), strict=True))
