"""The matrix-product form of an operator: the axes that are rows and columns, and the addresses of its operands.

``C[rows, columns] = sum over the reduction axes of A[rows, k] * B[k, columns]`` for every value of the remaining axes, which a
task holds fixed. Both operands must be affine in the axes. The exception is ``m // d`` with ``d`` a multiple of the row tile
(grouped convolution), which is fixed within a task.

A *prologue* is element-wise maps over one operand, with constants that depend on the reduction alone (batch normalisation and
ReLU before a convolution: a scale and a shift for each channel). Kernels that stage an operand compute it once for every staged
element. Padding comes after the maps: elements outside the tensor are 0, whatever the maps compute for 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, contraction_operands, identity_load
from rammer.ir.expr import Const, Expr, Interval, Load, Op, Ref
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize

#: Suffix of the pseudo-axis that replaces ``axis // d``.
QUOTIENT: Final = "__over__"
#: The element type of products of bytes, and those of their operands, whose signs may differ. They are summed in int32.
BYTE: Final = "int8"
BYTES: Final = ("uint8", "int8")
#: Maximum element offset within a tensor: offsets have 32 bits.
MAX_SPAN = 2**31 - 2**20


@dataclass(frozen=True)
class Prologue:
    """The ``maps`` over the tensor ``source``, outermost last. ``load`` is the contraction's load of the last map, and
    ``constants`` are the other tensors that the maps read."""

    maps: tuple[Compute, ...]
    source: str
    load: Load
    constants: tuple[str, ...]

    @property
    def read(self) -> Load:
        """The contraction's load of ``source`` in place of ``load``."""
        return Load(self.source, self.load.indices, self.load.fill)

    @cached_property
    def dimensions(self) -> tuple[int, ...]:
        """Dimensions of ``source`` whose positions the maps use."""
        inside = {self.source, *(c.name for c in self.maps)}
        return tuple(d for d in range(len(self.load.indices)) if any(_is_axis_dependent(c, d, inside) for c in self.maps))


@dataclass(frozen=True)
class Parts:
    """The stored ``operands`` of the contraction ``main``, the maps ``after`` it, and its ``prologue``. The prologue belongs to
    operand number ``changed`` (None and -1 without a prologue)."""

    main: Compute
    operands: tuple[Load, Load]
    after: tuple[Compute, ...]
    prologue: Prologue | None = None
    changed: int = -1


@dataclass(frozen=True, slots=True)
class PaddedAxis:
    """A padded dimension: ``0 <= constant + sum(steps[axis] * axis) < extent`` or the element is 0."""

    steps: Mapping[str, int]
    constant: int
    extent: int


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand's element address ``constant + sum(steps[axis] * axis)`` from the tensor's first element, and guards.

    ``aligned``: the tensor's first element is at a multiple of 16 bytes. ``prologue`` computes the operand from the elements.
    ``fill`` is the operand where a guard fails (bytes; 0 for other types). ``signed``: the bytes are signed."""

    load: Load
    steps: Mapping[str, int]
    constant: int
    guards: tuple[PaddedAxis, ...]
    packable: bool
    aligned: bool
    prologue: Prologue | None = None
    fill: int = 0
    signed: bool = False

    @property
    def tensor(self) -> str:
        """The tensor that is read."""
        return self.load.tensor


@dataclass(frozen=True)
class Roles:
    """The axes of an untiled contraction by role, as positions in ``main.axes``.

    ``groups`` are divisors that a row tile must divide. ``a`` reads the rows, ``b`` the columns. ``prologue`` belongs to the
    operand ``changed``, "a" or "b"; ``after`` are the maps that follow."""

    main: Compute
    a: Load
    b: Load
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    groups: frozenset[int]
    after: tuple[Compute, ...] = ()
    prologue: Prologue | None = None
    changed: str = ""


@dataclass(frozen=True)
class Product:
    """A tiled operator in matrix-product form; rows and columns are positions of main's axes, outermost first."""

    operator: ROperator
    main: Compute
    a: Operand
    b: Operand
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    after: tuple[Compute, ...]

    @cached_property
    def row_count(self) -> int:
        """Number of rows of a full tile."""
        return math.prod(self.operator.tile[d] for d in self.rows)

    @cached_property
    def width(self) -> int:
        """Number of columns of a full tile."""
        return math.prod(self.operator.tile[d] for d in self.columns)

    def axis(self, d: int) -> Axis:
        """Return axis number ``d``."""
        return self.main.axes[d]


def roles_of(operator: ROperator, binding: Binding, dtype: str = "float32", prologue: bool = False) -> Roles:
    """Return the roles of a contraction of ``dtype`` operands with element-wise followers.

    Followers of float32 are float32, those of float16 have either type. Bytes are summed in int32, with followers of any type.
    ``prologue`` also accepts maps before one operand. Raises Unsuited with the reason for any other operator."""
    parts = parts_of(operator, binding)
    main, operands = parts.main, parts.operands
    if not main.reduce or 0 in main.shape or any(r.extent == 0 for r in main.reduce):
        raise Unsuited("no contraction")
    if parts.prologue is not None and not prologue:
        raise Unsuited("maps before the contraction")
    if operand_type(operands, binding) != dtype:
        raise Unsuited(f"operands are not {dtype}")
    kinds = {
        binding.types[n].dtype for n in (*operator.inputs, *(c.name for c in operator.computes)) if not is_length(n, binding)
    }
    if main.dtype != "int32" if dtype == BYTE else not kinds <= {dtype, "float32"}:
        raise Unsuited(f"a mixture of {', '.join(sorted(kinds))}")
    check_followers(main, parts.after)
    live = [d for d, a in enumerate(main.axes) if a.extent > 1]
    choices = list[Roles]()
    for first, second in ((0, 1), (1, 0)):
        changed = {first: "a", second: "b"}.get(parts.changed, "")
        found = _assign_roles(main, operands[first], operands[second], live)
        choices.append(replace(found, after=parts.after, prologue=parts.prologue, changed=changed))
    last = live[-1:] if dtype == "float32" else _innermost_axis(operator, binding, live)
    return max(choices, key=lambda r: (bool(last) and last[0] in r.columns, math.prod(main.axes[d].extent for d in r.columns)))


def _innermost_axis(operator: ROperator, binding: Binding, live: list[int]) -> list[int]:
    """Return the axis of ``live`` whose neighbours are adjacent in the result."""
    storage = binding.storages.get(operator.outputs[-1])
    return sorted(live, key=lambda d: (abs(storage.strides[d]), -d))[:1] if storage else live[-1:]


def operand_type(operands: tuple[Load, Load], binding: Binding) -> str:
    """Return the element type of both operands: ``BYTE`` for bytes of either sign, "" if they differ."""
    a, b = (binding.types[load.tensor].dtype for load in operands)
    return BYTE if a in BYTES and b in BYTES else a if a == b else ""


def _assign_roles(main: Compute, a: Load, b: Load, live: list[int]) -> Roles:
    rows, columns, groups = list[int](), list[int](), set[int]()
    for d in live:
        name = main.axes[d].name
        in_a, in_b = name in ex.axes_of(a), name in ex.axes_of(b)
        if in_a and not in_b:
            rows.append(d)
        elif in_b and not in_a:
            columns.append(d)
        elif in_a and in_b and (found := quotient_divisors(b, name)):
            rows.append(d)
            groups |= found
    return Roles(main, a, b, tuple(rows), tuple(columns), frozenset(groups))


def quotient_divisors(load: Load, axis: str) -> set[int]:
    """Return the divisors ``d`` if ``load`` uses ``axis`` only as ``axis // d``, else an empty set."""
    found, bare = set[int](), 0
    for e in (e for index in load.indices for e in ex.walk(index)):
        if isinstance(e, Op) and e.fn == "floordiv" and e.args[0] == Ref(axis) and isinstance(e.args[1], Const):
            found.add(int(e.args[1].value))
            bare -= 1
        bare += e == Ref(axis)
    return found if not bare else set()


def is_length(tensor: str, binding: Binding) -> bool:
    """Return True if a tensor is one integer, for example a length."""
    return binding.types[tensor].dtype == "int64" and not binding.types[tensor].shape


def check_followers(main: Compute, after: Sequence[Compute]) -> None:
    """Raise Unsuited unless ``after`` are maps over the shape of ``main`` that read it, and each other, in place."""
    known = {main.name}
    for c in after:
        if c.reduce or c.shape != main.shape:
            raise Unsuited(f"{c.name} is not a map over the shape of {main.name}")
        if any(ld.tensor in known and not identity_load(ld, c) for ld in c.loads):
            raise Unsuited(f"{c.name} does not read element by element")
        known.add(c.name)


def product_of(operator: ROperator, binding: Binding, dtype: str = "float32", prologue: bool = False) -> Product:
    """Return a tiled operator as a matrix product of ``dtype`` operands. Raises Unsuited for other operators. Maps before the
    contraction need ``prologue``."""
    roles = roles_of(operator, binding, dtype, prologue)
    main, tile = roles.main, {a.name: t for a, t in zip(roles.main.axes, operator.tile, strict=True)}
    a, b = (operand_of(with_quotients(ld, tile), main, binding) for ld in (roles.a, roles.b))
    a, b = (replace(o, prologue=roles.prologue) if roles.changed == n else o for n, o in (("a", a), ("b", b)))
    rows, columns, others = roles_of_axes(main, a.load, b.load, tile)
    if others:
        raise Unsuited(f"axis {main.axes[others[0]].name} runs through no operands")
    return Product(operator, main, a, b, rows, columns, roles.after)


def roles_of_axes(
    main: Compute, a: Load, b: Load, tile: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the axes with more than one element in a tile, as positions. They are the axes of ``a`` (rows), of ``b`` (columns),
    and of neither. Raises Unsuited if an axis is in both."""
    rows, columns, others = list[int](), list[int](), list[int]()
    in_a, in_b = ex.axes_of(a), ex.axes_of(b)
    for d, axis in enumerate(main.axes):
        if tile[axis.name] > 1:
            if axis.name in in_a and axis.name in in_b:
                raise Unsuited(f"axis {axis.name} runs through both operands")
            (rows if axis.name in in_a else columns if axis.name in in_b else others).append(d)
    return tuple(rows), tuple(columns), tuple(others)


def is_consecutive(steps: Mapping[str, int], axes: Sequence[Axis], tile: Mapping[str, int]) -> bool:
    """Return True if the elements of a tile, counted along ``axes`` with the last one fastest, are contiguous. ``steps`` are the
    steps of their addresses. All axes but the first one must be whole."""
    expected = 1
    for axis in reversed(axes):
        if tile[axis.name] > 1 and steps.get(axis.name, 0) != expected:
            return False
        if axis is not axes[0] and tile[axis.name] != axis.extent:
            return False
        expected *= axis.extent
    return True


def with_quotients(load: Load, tile: Mapping[str, int]) -> Load:
    """Return ``load`` with every ``axis // d`` that a task holds fixed replaced by a pseudo-axis."""

    def rule(e: Expr) -> Expr | None:
        if isinstance(e, Op) and e.fn == "floordiv" and isinstance(e.args[0], Ref) and isinstance(e.args[1], Const):
            axis, divisor = e.args[0].axis, int(e.args[1].value)
            if axis in tile and divisor % tile[axis] == 0:
                return Ref(f"{axis}{QUOTIENT}{divisor}")
        return None

    return Load(load.tensor, tuple(ex.transform(i, rule) for i in load.indices), load.fill)


def affine_address(load: Load, strides: Sequence[int]) -> tuple[dict[str, int], int]:
    """Return ``(steps, constant)`` of a load's element address ``constant + sum(steps[axis] * axis)``. Axes with step 0 are left
    out. Raises Unsuited if the address is not affine."""
    steps, constant = dict[str, int](), 0
    for index, stride in zip(load.indices, strides, strict=True):
        form = ex.affine_form(index)
        if form is None:
            raise Unsuited(f"{load} is not affine")
        constant += form[1] * stride
        for axis, coefficient in form[0].items():
            steps[axis] = steps.get(axis, 0) + coefficient * stride
    return {a: s for a, s in steps.items() if s}, constant


def operand_of(load: Load, main: Compute, binding: Binding) -> Operand:
    """Return the addressing of ``load`` in a task of ``main``. Raises Unsuited if it is not affine or too far."""
    dtype = binding.types[load.tensor].dtype
    if load.fill not in (None, 0, 0.0) and dtype not in BYTES:
        raise Unsuited("padding with a value other than 0")
    storage, shape = binding.storages[load.tensor], binding.types[load.tensor].shape
    low, high = storage.span()
    if high - low > MAX_SPAN:
        raise Unsuited("the tensor is too large for 32-bit offsets")
    ranges: dict[str, Interval] = {a.name: (0, a.extent - 1) for a in (*main.axes, *main.reduce)}
    for name in ex.axes_of(load):
        base, _, divisor = name.partition(QUOTIENT)
        if divisor:
            ranges[name] = (0, ranges[base][1] // int(divisor))
    steps, constant = affine_address(load, storage.strides)
    guards = list[PaddedAxis]()
    for index, extent in zip(load.indices, shape, strict=True):
        form, reach = ex.affine_form(index), ex.interval(index, ranges)
        if form is None or reach is None:
            raise Unsuited(f"{load} is not affine")
        if load.fill is not None and (reach[0] < 0 or reach[1] >= extent):
            guards.append(PaddedAxis(form[0], form[1], extent))
    packable = load.tensor in binding.constants and not any(QUOTIENT in n for n in ex.axes_of(load))
    aligned = storage.offset % (16 // itemsize(dtype)) == 0
    fill = int(load.fill or 0) if dtype in BYTES else 0
    return Operand(load, steps, constant, tuple(guards), packable, aligned, fill=fill, signed=dtype == "int8")


def parts_of(operator: ROperator, binding: Binding) -> Parts:
    """Return the parts of an operator with one contraction.

    Raises Unsuited without a contraction, or with other maps before it."""
    before = operator.prologue
    rest = operator.computes[len(before) :]
    main, after = rest[0], rest[1:]
    operands = contraction_operands(main)
    if operands is None:
        raise Unsuited("no contraction")
    if not before:
        return Parts(main, operands, after)
    last = [i for i, load in enumerate(operands) if load.tensor == before[-1].name]
    names = {c.name for c in before}
    if len(last) != 1 or names & {operands[1 - last[0]].tensor, *operator.outputs, *(t for c in after for t in c.reads)}:
        raise Unsuited(f"{before[-1].name} is not an operand of {main.name} only")
    found = _find_prologue(before, main, operands[last[0]], binding)
    first, second = operands
    return Parts(main, (found.read, second) if last[0] == 0 else (first, found.read), after, found, last[0])


def _find_prologue(maps: tuple[Compute, ...], main: Compute, load: Load, binding: Binding) -> Prologue:
    """Return the prologue that ``main`` reads by ``load``. Raises Unsuited if the maps do not form a prologue."""
    inside = {c.name for c in maps}
    outside = dict.fromkeys(t for c in maps for t in c.reads if t not in inside)
    sources = [t for t in outside if t not in binding.constants]
    if len(sources) != 1:
        raise Unsuited(f"maps over {len(sources)} tensors before {main.name}")
    for c in maps:
        whole = all(identity_load(ld, c) for ld in c.loads if ld.tensor in (*inside, *sources))
        if c.reduce or not whole or c.shape != binding.types[sources[0]].shape:
            raise Unsuited(f"{c.name} is not element by element over {sources[0]}")
    if any(binding.types[t].dtype != "float32" for t in (*outside, *inside)):
        raise Unsuited("the prologue is not float32")
    found = Prologue(maps, sources[0], load, tuple(t for t in outside if t != sources[0]))
    over = {r.name for r in main.reduce}
    for d in found.dimensions:
        if ex.affine_form(load.indices[d]) is None or not ex.axes_of(load.indices[d]) <= over:
            raise Unsuited(f"the maps before {main.name} depend on more than its reduction")
    return found


def _is_axis_dependent(c: Compute, d: int, inside: set[str]) -> bool:
    """Return True if the value of ``c`` depends on its index along axis ``d`` other than by its in-place reads."""

    def rule(e: Expr) -> Expr | None:
        return ex.Const(0.0, "float32") if isinstance(e, Load) and e.tensor in inside else None

    return c.axes[d].name in ex.axes_of(ex.transform(c.body, rule))
