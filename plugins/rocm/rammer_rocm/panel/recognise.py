"""The panel form of a contraction: one row axis, and a column operand that prologue maps may compute.

Otherwise the form equals ``rammer.codegen.contraction_form``. All reads of a panel kernel must be affine in the axes. The
exception is ``m // d`` with ``d`` a multiple of the row tile (grouped convolution). It is fixed within a task. Constant rows are
packed, so any index is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from rammer.codegen import Unsuited, affine_address, check_followers, is_consecutive, is_length, roles_of_axes, with_quotients
from rammer.codegen.vector_text import STORED
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, contraction_operands
from rammer.ir.expr import Expr, Load, Ref
from rammer.ir.extent import AffineExtent
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize, row_major

from rammer_rocm.dialect import CPU_DIALECT

#: Ways of the first-level cache, and bytes per way, after which set indices repeat (x86 cores with 32 to 48 KiB).
WAYS, WAY = 8, 4096


@dataclass(frozen=True, slots=True)
class Access:
    """An affine read or write: element address ``constant + sum(steps[axis] * axis)`` relative to the tensor's first element."""

    tensor: str
    steps: Mapping[str, int]
    constant: int

    def step(self, axis: str) -> int:
        """Return the elements between neighbours along ``axis``."""
        return self.steps.get(axis, 0)


@dataclass(frozen=True, slots=True)
class FourBytes:
    """Groups of four bytes along a reduction axis of a product of bytes. The product's ``axis`` counts groups, and the last group
    may be partial (``extent`` bytes in all). ``a`` and ``b`` are the operands' bytewise loads, ``types`` their types."""

    axis: str
    extent: int
    a: Load
    b: Load
    types: tuple[str, str]


@dataclass(frozen=True)
class PanelProduct:
    """A tiled operator in matrix-product form, with the contraction's axis names.

    ``row`` is the axis of A's rows ("" for a single row). Rows continue along ``outer_rows`` (outermost first): every address has
    the same step from the last ``row`` to the next one. ``columns`` are the axes that are flattened into columns (outermost
    first). ``a`` and ``b`` are the operand loads (``b`` with quotients as pseudo-axes). ``before`` are the prologue maps that a
    load may read, ``after`` the epilogue maps. A product of bytes has ``quads``.
    """

    operator: ROperator
    main: Compute
    a: Load
    b: Load
    row: str
    columns: tuple[str, ...]
    before: Mapping[str, Compute]
    after: tuple[Compute, ...]
    outer_rows: tuple[str, ...] = ()
    quads: FourBytes | None = None

    @cached_property
    def tile(self) -> dict[str, int]:
        """Tile size by contraction axis."""
        return {a.name: t for a, t in zip(self.main.axes, self.operator.tile, strict=True)}

    @cached_property
    def extent(self) -> dict[str, int]:
        """Extent by axis, including reduction axes."""
        return {a.name: a.extent for a in (*self.main.axes, *self.main.reduce)}

    @cached_property
    def depth(self) -> int:
        """Number of products that are summed per element."""
        return math.prod(r.extent for r in self.main.reduce)

    @cached_property
    def rows(self) -> int:
        """Number of rows of a full tile."""
        return math.prod(self.tile[r] for r in self.row_axes)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes that rows run through, outermost first."""
        return (*self.outer_rows, self.row) if self.row else ()

    @cached_property
    def width(self) -> int:
        """Number of columns of a full tile."""
        return math.prod(self.tile[c] for c in self.columns)


@dataclass(frozen=True)
class PanelOperand:
    """The microkernel's access to an operand: start, and elements per step of each reduction axis. Unpacked rows also have a step
    from row to row. ``packed`` operands are stored in blocks of the register tile. ``dtype`` is the element type in memory."""

    pointer: str
    steps: Mapping[str, int]
    packed: bool = False
    row_step: int = 0
    dtype: str = "float32"

    @property
    def spelling(self) -> str:
        """The C type of the operand's elements."""
        return CPU_DIALECT.types[self.dtype]


def check_operator(operator: ROperator, binding: Binding) -> Compute:
    """Return the contraction of an operator that float32 panels can compute. Raises Unsuited with the reason."""
    main = check_form(operator)
    names = (*operator.inputs, *(c.name for c in operator.computes))
    kinds = {binding.types[n].dtype for n in names if not is_length(n, binding)}
    if not kinds <= STORED.keys():
        raise Unsuited(f"{', '.join(sorted(kinds - STORED.keys()))} among its tensors")
    return main


def check_form(operator: ROperator) -> Compute:
    """Return the contraction of an operator whose maps have the contraction's shape. Raises Unsuited with the reason."""
    main = operator.main
    if main.kind != "contraction" or 0 in main.shape or not main.reduce:
        raise Unsuited("no contraction")
    if sum(c.kind != "map" for c in operator.computes) != 1:
        raise Unsuited("more than one reduction")
    if operator.anchor.shape != main.shape:
        raise Unsuited(f"{operator.anchor.name} has another shape than {main.name}")
    return main


def panel_product(operator: ROperator, binding: Binding) -> PanelProduct:
    """Return a tiled operator as a float32 matrix product, in the better operand order. Raises Unsuited."""
    check_operator(operator, binding)
    return product_of(operator, binding)


def product_of(operator: ROperator, binding: Binding) -> PanelProduct:
    """Return a tiled operator as a matrix product of any type. Raises Unsuited."""
    main = check_form(operator)
    place = operator.computes.index(main)
    before = {c.name: c for c in operator.computes[:place]}
    after = operator.computes[place + 1 :]
    _check_after(main, before, after, operator)
    operands = contraction_operands(main)
    if operands is None:
        raise Unsuited("no contraction")
    choices, reason = list[PanelProduct](), "no operand order fits"
    for a, b in (operands, operands[::-1]):
        try:
            _check_rows(a, binding, before)
            made = _make_product(operator, main, a, b, before, after)
            _check_outer_rows(made, binding)
            choices.append(made)
        except Unsuited as problem:
            reason = str(problem)
    if not choices:
        raise Unsuited(reason)
    return max(choices, key=lambda p: (_last_live(p) in p.columns, p.width))


def _last_live(p: PanelProduct) -> str:
    live = [a.name for a in p.main.axes if p.tile[a.name] > 1]
    return live[-1] if live else p.main.axes[-1].name


def _check_after(main: Compute, before: Mapping[str, Compute], after: Sequence[Compute], operator: ROperator) -> None:
    check_followers(main, after)
    for c in after:
        for load in c.loads:
            if load.tensor in before:
                raise Unsuited(f"{c.name} does not read {load.tensor} element by element")
    if any(name in before for name in operator.outputs):
        raise Unsuited("a map before the contraction is an output")


def _check_rows(a: Load, binding: Binding, before: Mapping[str, Compute]) -> None:
    """Check that the rows are packed constants or can be read in place."""
    if a.tensor in before:
        raise Unsuited("the row operand is computed")
    if a.tensor not in binding.constants:
        if a.fill is not None:
            raise Unsuited("the row operand is padded")
        load_access(a, binding)


def _make_product(
    operator: ROperator, main: Compute, a: Load, b: Load, before: Mapping[str, Compute], after: Sequence[Compute]
) -> PanelProduct:
    tile = {x.name: t for x, t in zip(main.axes, operator.tile, strict=True)}
    b = with_quotients(b, tile)
    rows, through, others = roles_of_axes(main, a, b, tile)
    columns = [main.axes[d].name for d in sorted(through + others)]
    if not columns:
        # One column: the innermost free axis represents it.
        columns = [x.name for x in main.axes if x.name not in ex.axes_of(a)][-1:]
        if not columns:
            raise Unsuited("no column axis")
    *outer, row = [main.axes[d].name for d in rows] or [""]
    return PanelProduct(operator, main, a, b, row, tuple(columns), before, tuple(after), tuple(outer))


def _check_outer_rows(p: PanelProduct, binding: Binding) -> None:
    """Check that all rows are equally spaced in the row operand and wherever the epilogue accesses."""
    if not p.outer_rows:
        return
    if p.a.tensor in binding.constants or ended_axes(p.operator).keys() & {*p.row_axes}:
        raise Unsuited("several row axes")
    for access in (load_access(load, binding) for load in (p.a, *(load for load, _ in epilogue_accesses(p)))):
        for outer, inner in pairwise(p.row_axes):
            if p.tile[inner] != p.extent[inner] or access.step(outer) != p.extent[inner] * access.step(inner):
                raise Unsuited("several row axes")


def load_access(load: Load, binding: Binding) -> Access:
    """Return the element address of a load from its storage's strides. Raises Unsuited unless it is affine."""
    return Access(load.tensor, *affine_address(load, binding.storages[load.tensor].strides))


def ended_axes(operator: ROperator) -> dict[str, AffineExtent]:
    """Return the dynamic extents of the contraction's axes, by axis name."""
    names = dict(zip((a.name for a in operator.anchor.axes), (a.name for a in operator.main.axes), strict=True))
    return {names[e.axis]: e.extent for e in operator.skips if not e.before}


def has_contiguous_columns(steps: Access, p: PanelProduct) -> bool:
    """Return True if consecutive columns of every task are consecutive elements. An inner axis with a dynamic extent leaves gaps
    after its end; window axes never do."""
    ends = {} if dict(p.operator.config).get("window") else ended_axes(p.operator)
    if any(inner in ends and any(p.tile[c] > 1 for c in p.columns[:d]) for d, inner in enumerate(p.columns)):
        return False
    return is_consecutive(steps.steps, [Axis(c, p.extent[c]) for c in p.columns], p.tile)


def dense_axes(axes: Sequence[Axis]) -> dict[str, int]:
    """Return the row-major steps of ``axes``."""
    return dict(zip((a.name for a in axes), row_major(tuple(a.extent for a in axes)), strict=True))


def rows_together(p: PanelProduct, binding: Binding) -> float:
    """Return the number of rows read in place of which the first-level cache can hold one line each. Rows at multiples of a page
    map to the same set."""
    if not p.row or p.a.tensor in binding.constants:
        return math.inf
    stride = load_access(p.a, binding).step(p.row) * itemsize(binding.types[p.a.tensor].dtype)
    return WAYS * (WAY // math.gcd(stride, WAY))


def epilogue_accesses(p: PanelProduct) -> Iterator[tuple[Load, bool]]:
    """Yield the stores (True) and the other loads (False) of the epilogue, in the contraction's axes."""
    inside = {c.name for c in (p.main, *p.after)}
    for c in (p.main, *p.after):
        axes: dict[str, Expr] = {a.name: Ref(m.name) for a, m in zip(c.axes, p.main.axes, strict=True)}
        if c.name in p.operator.outputs:
            yield Load(c.name, tuple(Ref(m.name) for m in p.main.axes)), True
        for load in () if c is p.main else c.loads:
            if load.tensor not in inside:
                yield Load(load.tensor, tuple(ex.substitute(i, axes) for i in load.indices)), False
