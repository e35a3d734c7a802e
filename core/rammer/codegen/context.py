"""A C function under construction: its tensors, tables, names, and integer arithmetic on axes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rammer.codegen import operations as ops
from rammer.codegen.c_target import CTarget
from rammer.codegen.hoist_shared import Needs
from rammer.codegen.operations import Val
from rammer.codegen.symbolic_bounds import canonicalise_sum, interval_within, to_linear_form
from rammer.codegen.vector_text import CODES, STORED
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Const, Expr, Interval, Op, Ref, Table
from rammer.ir.types import TensorType

INT32 = 2**31 - 1
_INDEX = frozenset(("add", "sub", "mul", "neg", "min", "max", "floordiv", "mod"))


@dataclass(frozen=True, slots=True)
class Place:
    """A stored tensor: C pointer, element strides, the index of its first element, and its shape."""

    pointer: str
    dtype: str
    strides: tuple[int, ...]
    origin: tuple[Expr, ...]
    shape: tuple[int, ...]

    @property
    def reach(self) -> int | None:
        """Elements from the first to the last address, or None if a stride is negative."""
        if any(s < 0 for s in self.strides):
            return None
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Column:
    """A reduction whose axis ``axis`` is walked ``width`` elements at a time."""

    axis: str
    width: int


class _Of(dict[str, Any]):
    """Lazy map from tensors to one attribute of their types: a program may have thousands, a function reads a few."""

    def __init__(self, types: Mapping[str, TensorType], attribute: str) -> None:
        super().__init__()
        self._types, self._attribute = types, attribute

    def __missing__(self, tensor: str) -> Any:
        found = self[tensor] = getattr(self._types[tensor], self._attribute)
        return found


@dataclass
class FunctionContext:
    """The state of a C function under construction."""

    target: CTarget
    types: Mapping[str, TensorType]
    inlined: dict[str, Compute]
    places: Mapping[str, Place]
    ranges: dict[str, Interval]
    tables: dict[str, str] = field(default_factory=dict)
    count: int = 0
    columns: dict[str, Column] = field(default_factory=dict)
    unrolled: frozenset[str] = frozenset()  # reductions written out point by point
    wide: dict[str, int] = field(default_factory=dict)  # lanes of vector accumulators, by name
    ends: Mapping[tuple[str, str], str] = field(default_factory=dict)  # reduction bounds: variables by compute and axis
    open_ends: Collection[Expr] = ()  # of the task's box, see ``Layout``

    def __post_init__(self) -> None:
        self.shapes: Mapping[str, tuple[int, ...]] = _Of(self.types, "shape")
        self.dtypes: Mapping[str, str] = _Of(self.types, "dtype")

    @cached_property
    def lanes(self) -> Mapping[str, str]:
        """The types of vectors in memory here, by letter: floats, and integers if byte tensors occur."""
        kinds = {self.dtypes[n] for n in (*self.places, *self.inlined)}
        return {**STORED, **CODES} if kinds & {"uint8", "int8"} else STORED

    @cached_property
    def needs(self) -> Needs:
        """The loads of in-place producers that expressions of this function need."""
        return Needs(self.inlined)

    def fresh(self, letter: str) -> str:
        """Return a new variable name."""
        self.count += 1
        return f"{letter}{self.count}"

    def table(self, values: tuple[ex.Number, ...], dtype: str) -> str:
        """Return the name of the file-scope table with these values. float16 tables are stored as float32."""
        dtype = ops.compute_type(dtype)
        spelling = ops.spell_type(self.target, dtype)
        body = ", ".join(ops.spell_literal(self.target, v, dtype) for v in values)
        name = "rm_t" + hashlib.sha256(f"{spelling}:{body}".encode()).hexdigest()[:16]
        text = f"{self.target.constant} {spelling} {name}[{len(values)}] = {{{body}}};"
        # The guard lets functions that share a table be in one translation unit.
        self.tables[name] = f"#ifndef {name.upper()}\n#define {name.upper()}\n{text}\n#endif\n"
        return name

    def axis_type(self, extent: int) -> str:
        """Return the C type of a loop variable."""
        return self.target.types["int32" if extent <= INT32 else "int64"]

    def end(self, c: Compute, axis: Axis) -> str:
        """Return the bound of a loop over a reduction axis."""
        return self.ends.get((c.name, axis.name), str(axis.extent))

    # --- index arithmetic ---------------------------------------------------------------------

    def is_index(self, e: Expr) -> bool:
        """Return True if ``e`` is integer arithmetic over axes with known bounds."""
        if isinstance(e, Ref):
            return True
        if isinstance(e, Const):
            return e.dtype == "int64"
        if isinstance(e, Table):
            return e.dtype == "int64" and not isinstance(e.index, Const) and self.is_index(e.index)
        return isinstance(e, Op) and e.fn in _INDEX and all(self.is_index(a) for a in e.args) and bool(ex.axes_of(e))

    def fits(self, e: Expr) -> bool:
        """Return True if every sub-expression fits 32 bits."""
        return interval_within(e, self.ranges, -INT32, INT32) is not None

    def index(self, e: Expr) -> Val:
        """Return integer arithmetic over axes as C text, in 32 bits if all of it fits."""
        e = canonicalise_sum(e)
        small = self.fits(e)
        return Val(self._index(e, small), "int64", small, isinstance(e, Const | Ref))

    def _index(self, e: Expr, small: bool) -> str:
        target = self.target
        if isinstance(e, Const):
            return ops.spell_literal(target, e.value, "int32" if small else "int64")
        if isinstance(e, Ref):
            return e.axis if small else f"({target.types['int64']}){e.axis}"
        if isinstance(e, Table):
            return f"{self.table(e.values, 'int32' if small else 'int64')}[{self.index(e.index).text}]"
        if not isinstance(e, Op):
            raise TypeError(f"not index arithmetic: {e}")
        if e.fn in ("add", "sub", "mul"):
            return self._sum(e, small)
        args = [self._index(a, small) for a in e.args]
        if e.fn in ("floordiv", "mod") and self._plain_division(e):
            return f"({args[0]} {'/' if e.fn == 'floordiv' else '%'} {args[1]})"
        if e.fn == "neg":
            return f"(-{args[0]})"
        return f"rm_{e.fn}_{'i32' if small else 'i64'}({', '.join(args)})"

    def _sum(self, e: Op, small: bool) -> str:
        """Format a sum of terms without inner parentheses."""
        terms, constant = to_linear_form(e)
        if len(terms) == 1 and e.fn == "mul" and next(iter(terms)) == e:
            return f"({self._index(e.args[0], small)} * {self._index(e.args[1], small)})"
        text = ""
        for term in sorted(terms, key=str):
            factor = terms[term]
            part = self._index(term, small)
            part = part if abs(factor) == 1 else f"{abs(factor)} * {part}"
            text += f" {'-' if factor < 0 else '+'} {part}" if text else f"{'-' if factor < 0 else ''}{part}"
        if constant:
            text += f" {'-' if constant < 0 else '+'} {abs(constant)}"
        return f"({text})"

    def _plain_division(self, e: Op) -> bool:
        """Return True if C's division equals Python's: the dividend is not negative and the divisor is positive."""
        spans = [ex.interval(a, self.ranges) for a in e.args]
        return spans[0] is not None and spans[1] is not None and spans[0][0] >= 0 and spans[1][0] > 0
