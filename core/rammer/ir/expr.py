"""Scalar expressions: the body of a Compute and the index language of its loads.

One small language serves both. Index expressions use only integer operations; ``interval`` bounds them, which suffices for tile
propagation (Welder, section 4.2). Every expression prints as a Python expression, and ``parse`` reads it back, so programs need
no separate grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, is_
from typing import Any, ClassVar, TypeAlias


class Hashed:
    """A mixin that caches the hash of the fields selected by ``KEY``. A derived dataclass sets ``__hash__ = Hashed.__hash__`` or
    defines a hash. The cached hash is not a field: copies and pickles omit it, since another process hashes names differently."""

    __slots__ = ("_hash",)
    KEY: ClassVar[attrgetter[Any]]
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", made := hash(self.KEY(self)))
            return made


__all__ = ["OPS", "Cast", "Const", "Expr", "Interval", "Load", "Number", "Op", "Ref", "Table", "affine_form", "as_index"]
__all__ += ["axes_of", "children", "count_flops", "dtype_of", "integer", "interval", "loads", "make_add", "make_mul"]
__all__ += ["rename_tensors", "substitute", "transform", "walk"]

Number: TypeAlias = "int | float | bool"
Interval: TypeAlias = "tuple[int, int]"  # inclusive bounds


@dataclass(frozen=True, slots=True)
class Const:
    """A literal; ``dtype`` float32, int64 and bool print bare, others through ``const``."""

    value: Number
    dtype: str = "float32"

    def __post_init__(self) -> None:
        kind: Callable[[Number], Number] = bool if self.dtype == "bool" else float if self.dtype.startswith("float") else int
        object.__setattr__(self, "value", kind(self.value))

    def __str__(self) -> str:
        text = str(self.value) if isinstance(self.value, bool) else repr(self.value)
        return text if self.dtype in ("float32", "int64", "bool") else f"const({self.dtype}, {text})"


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an axis (int64)."""

    axis: str

    def __str__(self) -> str:
        return self.axis


@dataclass(frozen=True, slots=True)
class Load(Hashed):
    """An element of ``tensor``. With ``fill``, indices outside the tensor give ``fill`` (padding)."""

    tensor: str
    indices: tuple[Expr, ...]
    fill: Number | None = None

    KEY = attrgetter("tensor", "indices", "fill")
    __hash__ = Hashed.__hash__

    def __str__(self) -> str:
        text = f"{self.tensor}[{', '.join(map(str, self.indices)) or '()'}]"
        return text if self.fill is None else f"pad({text}, {self.fill!r})"


@dataclass(frozen=True, slots=True)
class Table(Hashed):
    """``values[index]``: a constant table, such as the source rows of a Resize."""

    values: tuple[Number, ...]
    index: Expr
    dtype: str = "int64"

    KEY = attrgetter("values", "index", "dtype")
    __hash__ = Hashed.__hash__

    def __str__(self) -> str:
        return f"table({self.dtype}, [{', '.join(map(repr, self.values))}], {self.index})"


@dataclass(frozen=True, slots=True)
class Cast:
    """A conversion to ``dtype`` (C rules: towards zero for float to integer)."""

    dtype: str
    arg: Expr

    def __str__(self) -> str:
        return f"cast({self.dtype}, {self.arg})"


@dataclass(frozen=True, slots=True)
class Op(Hashed):
    """A scalar operation named in ``OPS``."""

    fn: str
    args: tuple[Expr, ...]

    def __post_init__(self) -> None:
        if self.fn not in OPS:
            raise ValueError(f"unknown scalar operation {self.fn!r}")
        if len(self.args) != OPS[self.fn].arity:
            raise ValueError(f"{self.fn} takes {OPS[self.fn].arity} arguments, got {len(self.args)}")

    KEY = attrgetter("fn", "args")
    __hash__ = Hashed.__hash__

    def __str__(self) -> str:
        infix = INFIX.get(self.fn)
        if infix is None:
            return f"{self.fn}({', '.join(map(str, self.args))})"
        left, right = (f"({a})" if isinstance(a, Op) and a.fn in INFIX else str(a) for a in self.args)
        return f"{left} {infix} {right}"


Expr: TypeAlias = "Const | Ref | Load | Table | Cast | Op"


@dataclass(frozen=True, slots=True)
class OpInfo:
    """The arity, result type (``same`` as the arguments, or a fixed one) and cost in FLOP of an operation."""

    arity: int
    result: str = "same"
    flops: int = 1


#: Functions of one number without an exact instruction on any device.
TRANSCENDENTAL = (
    *("exp", "log", "expm1", "log1p", "erf"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)
#: Transcendentals count as 8 FLOP, the usual convention of roofline tables.
OPS: dict[str, OpInfo] = {
    **{n: OpInfo(2) for n in ("add", "sub", "mul", "div", "min", "max", "mod", "fmod", "and_", "or_", "xor", "shl", "shr")},
    **{n: OpInfo(1) for n in ("neg", "abs", "sign", "floor", "ceil", "round", "sqrt")},
    **{n: OpInfo(1, flops=8) for n in TRANSCENDENTAL},
    **{"floordiv": OpInfo(2), "where": OpInfo(3), "pow": OpInfo(2, flops=8)},
    **{n: OpInfo(2, "bool") for n in ("eq", "lt", "le")},
    **{n: OpInfo(1, "bool") for n in ("not_", "isnan", "isinf")},
    **{f"as_{n}": OpInfo(1, n, flops=0) for n in ("uint32", "float32", "uint64", "float64")},  # bit casts
}
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}


# --- construction -----------------------------------------------------------------------------


@lru_cache(1 << 12)
def integer(value: int) -> Const:
    """Return an int64 literal."""
    return Const(value, "int64")


def as_index(value: Expr | int | str) -> Expr:
    """Convert ``3`` to a literal and ``"h"`` to an axis reference; expressions stay unchanged."""
    if isinstance(value, int):
        return integer(value)
    return Ref(value) if isinstance(value, str) else value


def make_add(a: Expr | int | str, b: Expr | int | str) -> Expr:
    """Return integer ``a + b``, folded if both are literals or one is zero."""
    x, y = as_index(a), as_index(b)
    if isinstance(x, Const) and isinstance(y, Const):
        return integer(int(x.value) + int(y.value))
    if x == integer(0):
        return y
    return x if y == integer(0) else Op("add", (x, y))


def make_mul(a: Expr | int | str, b: int) -> Expr:
    """Return integer ``a * b`` with a literal factor, folded."""
    x = as_index(a)
    if isinstance(x, Const):
        return integer(int(x.value) * b)
    if b == 0:
        return integer(0)
    return x if b == 1 else Op("mul", (x, integer(b)))


def make_floordiv(a: Expr | int | str, b: int) -> Expr:
    """Return integer floor division by a positive literal, folded."""
    x = as_index(a)
    if isinstance(x, Const):
        return integer(int(x.value) // b)
    return x if b == 1 else Op("floordiv", (x, integer(b)))


def make_mod(a: Expr | int | str, b: int) -> Expr:
    """Return integer modulo (result in ``[0, b)``) by a positive literal, folded."""
    x = as_index(a)
    if isinstance(x, Const):
        return integer(int(x.value) % b)
    return integer(0) if b == 1 else Op("mod", (x, integer(b)))


# --- traversal --------------------------------------------------------------------------------


def children(e: Expr) -> tuple[Expr, ...]:
    """Return the direct sub-expressions in evaluation order."""
    if isinstance(e, Load):
        return e.indices
    if isinstance(e, Op):
        return e.args
    if isinstance(e, Table):
        return (e.index,)
    return (e.arg,) if isinstance(e, Cast) else ()


def rebuild_expr(e: Expr, kids: tuple[Expr, ...]) -> Expr:
    """Return ``e`` with its children replaced by ``kids``."""
    if isinstance(e, Op):
        made = object.__new__(Op)  # the checks of Op ran for ``e``
        _SET_FN(made, e.fn)
        _SET_ARGS(made, kids)
        return made
    if isinstance(e, Load):
        return Load(e.tensor, kids, e.fill)
    if isinstance(e, Table):
        return Table(e.values, kids[0], e.dtype)
    return Cast(e.dtype, kids[0]) if isinstance(e, Cast) else e


_SET_FN, _SET_ARGS = (Op.__dict__[field].__set__ for field in ("fn", "args"))


def transform(e: Expr, fn: Callable[[Expr], Expr | None]) -> Expr:
    """Rewrite top-down: an expression that ``fn`` returns replaces the node (not revisited)."""
    new = fn(e)
    if new is not None:
        return new
    kids = children(e)
    if not kids:
        return e
    made = tuple([transform(k, fn) for k in kids])
    return e if all(map(is_, made, kids)) else rebuild_expr(e, made)


def walk(e: Expr) -> list[Expr]:
    """Return all nodes, parents first, children from left to right."""
    found, rest = list[Expr](), [e]
    while rest:
        node = rest.pop()
        found.append(node)
        if isinstance(node, Op):
            rest += node.args[::-1]
        elif not isinstance(node, ATOMS):
            rest += children(node)[::-1]
    return found


#: Expressions without sub-expressions; a tuple, since ``Ref | Const`` would be built at each check.
ATOMS = (Ref, Const)


def loads(e: Expr) -> list[Load]:
    """Return every load, outer before inner (an index may itself be a load: Gather)."""
    return [n for n in walk(e) if isinstance(n, Load)]


def has_loads(e: Expr) -> bool:
    """Return True if ``e`` reads a tensor."""
    return isinstance(e, Load) or (not isinstance(e, ATOMS) and any(map(has_loads, children(e))))


def axes_of(e: Expr) -> set[str]:
    """Return the names of the axes that ``e`` refers to."""
    return {n.axis for n in walk(e) if isinstance(n, Ref)}


def substitute(e: Expr, axes: Mapping[str, Expr]) -> Expr:
    """Replace axis references by expressions."""
    if isinstance(e, Ref):
        return axes.get(e.axis, e)
    if isinstance(e, Const):
        return e
    kids = children(e)
    made = tuple([substitute(k, axes) for k in kids])
    return e if all(map(is_, made, kids)) else rebuild_expr(e, made)


def rename_tensors(e: Expr, names: Mapping[str, str]) -> Expr:
    """Replace tensor names in loads (index expressions included)."""

    def rule(n: Expr) -> Expr | None:
        if isinstance(n, Load) and n.tensor in names:
            return Load(names[n.tensor], tuple(rename_tensors(i, names) for i in n.indices), n.fill)
        return None

    return transform(e, rule)


def affine_form(e: Expr) -> tuple[dict[str, int], int] | None:
    """Return ``(coefficients, constant)`` if ``e`` is affine in the axes, else None."""
    if isinstance(e, Const):
        return ({}, int(e.value)) if not isinstance(e.value, float) else None
    if isinstance(e, Ref):
        return {e.axis: 1}, 0
    if not isinstance(e, Op) or e.fn not in ("add", "sub", "mul", "neg"):
        return None
    parts = [affine_form(a) for a in e.args]
    if any(p is None for p in parts):
        return None
    known = [p for p in parts if p is not None]
    if e.fn == "neg":
        return _scale_affine(known[0], -1)
    left, right = known
    if e.fn == "mul":
        if right[0] and left[0]:
            return None
        return _scale_affine(left, right[1]) if not right[0] else _scale_affine(right, left[1])
    right = right if e.fn == "add" else _scale_affine(right, -1)
    names = {**left[0], **right[0]}
    coefficients = {a: left[0].get(a, 0) + right[0].get(a, 0) for a in names}
    return {a: c for a, c in coefficients.items() if c}, left[1] + right[1]


def _scale_affine(part: tuple[dict[str, int], int], factor: int) -> tuple[dict[str, int], int]:
    return ({a: c * factor for a, c in part[0].items() if c * factor}, part[1] * factor)


def interval(e: Expr, box: Mapping[str, Interval]) -> Interval | None:
    """Return inclusive bounds of an integer expression over a box of axes; None if it depends on data."""
    if isinstance(e, Const):
        return (int(e.value), int(e.value)) if not isinstance(e.value, float) else None
    if isinstance(e, Ref):
        return box[e.axis]
    if isinstance(e, Table):
        inner = interval(e.index, box)
        span = e.values if inner is None else e.values[max(inner[0], 0) : inner[1] + 1]
        return (int(min(span)), int(max(span))) if span else None
    if isinstance(e, Cast):
        return interval(e.arg, box)
    if isinstance(e, Load):
        return None
    parts = list[Interval]()
    for arg in e.args:
        part = box[arg.axis] if isinstance(arg, Ref) else interval(arg, box)
        if part is None:
            return None
        parts.append(part)
    return combine_intervals(e.fn, parts)


def combine_intervals(fn: str, p: list[Interval]) -> Interval | None:
    """Apply an integer operation of the index language to intervals. Returns None if it is unsupported."""
    if fn == "neg":
        return -p[0][1], -p[0][0]
    if fn == "where":
        return min(p[1][0], p[2][0]), max(p[1][1], p[2][1])
    if fn not in ("add", "sub", "mul", "min", "max", "floordiv", "mod"):
        return None
    (a, b), (c, d) = p
    if fn == "add":
        return a + c, b + d
    if fn == "sub":
        return a - d, b - c
    if fn == "mul":
        corners = (a * c, a * d, b * c, b * d)
        return min(corners), max(corners)
    if fn in ("min", "max"):
        pick = min if fn == "min" else max
        return pick(a, c), pick(b, d)
    if c != d or c <= 0:
        return None
    if fn == "floordiv":
        return a // c, b // c
    return (a % c, b % c) if a // c == b // c else (0, c - 1)


def count_flops(e: Expr) -> int:
    """Return the floating-point operations of one evaluation, index arithmetic excluded."""
    if isinstance(e, Load | Const | Ref | Table):
        return 0
    own = OPS[e.fn].flops if isinstance(e, Op) else 0
    return own + sum(count_flops(k) for k in children(e))


def dtype_of(e: Expr, tensors: Mapping[str, str]) -> str:
    """Return the element type of ``e`` for loaded tensors of these element types."""
    if isinstance(e, Const | Table | Cast):
        return e.dtype
    if isinstance(e, Ref):
        return "int64"
    if isinstance(e, Load):
        return tensors[e.tensor]
    if OPS[e.fn].result != "same":
        return OPS[e.fn].result
    args = e.args[1:] if e.fn == "where" else e.args
    kinds = [dtype_of(a, tensors) for a in args]
    typed = [k for a, k in zip(args, kinds, strict=True) if not isinstance(a, Const)]
    return (typed or kinds)[0]
