"""Compute: one tensor expression, the central data structure of the compiler.

A Compute defines every element of one output tensor: output axes, reduction axes, a combiner and a scalar body over loads. The
NumPy result (``evaluate``), FLOP and byte counts, tile propagation, classification and C text are all derived from it."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.dequantized_product import Decoded, decoded_of
from rammer.ir.expr import Cast, Const, Expr, Interval, Load, Op, Ref
from rammer.ir.names import SHOWN, check_identifier, quote_text, unquote_text
from rammer.ir.parse import TENSOR, Form, Pattern, form_of, pattern_of
from rammer.ir.types import LONG, SHORT, TensorType, is_float

__all__ = ["Axis", "Combiner", "Compute", "ComputeGraph", "Decoded", "contraction_operands", "identity_load"]

Combiner: TypeAlias = Literal["sum", "max", "min", "prod"]
Kind: TypeAlias = Literal["contraction", "window", "reduction", "map"]
#: One half-open range per axis.
Box: TypeAlias = "tuple[tuple[int, int], ...]"

IDENTITY: dict[Combiner, float] = {"sum": 0.0, "max": -math.inf, "min": math.inf, "prod": 1.0}


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis with its extent (elements)."""

    name: str
    extent: int

    def __post_init__(self) -> None:
        check_identifier("an axis", self.name)

    def __str__(self) -> str:
        return f"{self.name}:{self.extent}"


@dataclass(frozen=True)
class Compute:
    """A tensor expression ``name[axes] = combiner[reduce] body``; ``origin`` names its ONNX node."""

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    body: Expr
    reduce: tuple[Axis, ...] = ()
    combiner: Combiner | None = None
    origin: str = ""
    used: InitVar[frozenset[str] | None] = None  #: Axes of the body, if already computed.

    def __post_init__(self, used: frozenset[str] | None) -> None:
        check_identifier("a compute", self.name)
        names = [a.name for a in (*self.axes, *self.reduce)]
        if len(set(names)) != len(names):
            raise ValueError(f"compute {self.name}: an axis name occurs twice in {names}")
        if bool(self.reduce) and self.combiner is None:
            raise ValueError(f"compute {self.name}: reduction axes need a combiner")
        unknown = (ex.axes_of(self.body) if used is None else used) - set(names)
        if unknown:
            raise ValueError(f"compute {self.name}: the body uses undeclared axes {sorted(unknown)}")

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without cached values, which contain functions and cannot be pickled."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __str__(self) -> str:
        return self._format_line(self.name, self.body_text) + self.remark

    @property
    def remark(self) -> str:
        """The comment at the end of its line: the ONNX node."""
        return f"{_REMARK}{quote_text(self.origin)}" if self.origin else ""

    def _format_line(self, name: str, body: str) -> str:
        return f"{name}{self._header_text}{body}"

    @cached_property
    def _header_text(self) -> str:
        """The text between the name and the body."""
        over = f"{self.combiner}[{', '.join(map(str, self.reduce))}] " if self.combiner else ""
        return f": {SHORT[self.dtype]}[{', '.join(map(str, self.axes))}] = {over}"

    def text_with(self, names: Mapping[str, str]) -> str:
        """Return ``str`` without the origin, with tensors (itself included) renamed by ``names``. Much faster than printing a
        renamed Compute: the names of loaded tensors precede a bracket in the body's text."""
        parts = [*self._pieces]
        parts[1::2] = [names.get(n, n) for n in parts[1::2]]
        return self._format_line(names.get(self.name, self.name), "".join(parts))

    @cached_property
    def _pieces(self) -> tuple[str, ...]:
        """The body's text, split before and after the name of each tensor that it reads."""
        return tuple(TENSOR.split(self.body_text))

    @cached_property
    def body_text(self) -> str:
        """The body's text (``str``)."""
        return str(self.body)

    @cached_property
    def form(self) -> Form:
        """The body without tensor names: equal for bodies that differ only in these."""
        return form_of(self.body_text)[0]

    @property
    def type(self) -> TensorType:
        """Type of the output tensor."""
        return TensorType(self.dtype, self.shape)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Extents of the output axes."""
        return tuple([a.extent for a in self.axes])

    @cached_property
    def place(self) -> tuple[Expr, ...]:
        """The indices of the element that each evaluation writes."""
        return tuple([Ref(a.name) for a in self.axes])

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Every load of the body, outer before inner."""
        return tuple(ex.loads(self.body))

    @cached_property
    def operands(self) -> tuple[Load, Load] | None:
        """The two operands of a contraction, see ``contraction_operands``."""
        return _find_operands(self)

    @cached_property
    def decoded(self) -> Decoded | None:
        """The operands of a product with quantised weights; None for any other Compute."""
        if self.combiner != "sum" or len(self.reduce) != 1 or not isinstance(self.body, Op) or self.body.fn != "mul":
            return None
        return decoded_of(self.body, self.reduce[0].name, self.reduce[0].extent)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Distinct tensors read, in order of first use."""
        return tuple(dict.fromkeys(load.tensor for load in self.loads))

    @property
    def points(self) -> int:
        """Number of body evaluations for the whole output."""
        return math.prod(a.extent for a in (*self.axes, *self.reduce))

    @cached_property
    def flops_per_point(self) -> int:
        """Floating-point operations of one body evaluation (a combine step counts as one)."""
        return ex.count_flops(self.body) + (1 if self.reduce else 0)

    @property
    def flops(self) -> int:
        """Floating-point operations for the whole output."""
        return self.points * self.flops_per_point

    @cached_property
    def kind(self) -> Kind:
        """The class: contraction (sum of products of two loads, one possibly quantised), window, reduction or map."""
        if self.combiner is None:
            return "map"
        if contraction_operands(self) is not None or self.decoded is not None:
            return "contraction"
        return "window" if any(_is_sliding(i, self) for ld in self.loads for i in ld.indices) else "reduction"

    @cached_property
    def kin(self) -> object:
        """A key that is equal for Computes that differ only in tensor names."""
        return self.form, self.axes, self.reduce, self.combiner, self.dtype

    @staticmethod
    def parse(text: str) -> Compute:
        """Parse a Compute from the text of ``str``. Raises ValueError with the offending text."""
        line, _, origin = text.partition(_REMARK)
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"not a compute: {text[:SHOWN]!r}")
        name, short, axes, over, reduce, body = match.groups()
        pattern, tensors = pattern_of(body)
        kin = _make_kin(short, axes, over, reduce or "", pattern)
        made = object.__new__(Compute)  # all checks of Compute except the name ran for its kin
        made.__dict__.update(
            kin.parts, name=check_identifier("a compute", name), reads=tensors, origin=unquote_text(origin) if origin else ""
        )
        if pattern.canonical:
            made.__dict__["body_text"] = body
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Copy the body of a parsed Compute on first access: most Computes of a program share one pattern."""
            kin = self.__dict__.get("kin")
            if name != "body" or not isinstance(kin, _Kin):
                raise AttributeError(name)
            body = self.__dict__["body"] = kin.pattern.copy(self.reads)
            return body


@dataclass(frozen=True, slots=True, eq=False)
class _Kin:
    """The common part of parsed Computes that differ only in tensor names: the body's pattern, and attributes."""

    pattern: Pattern
    parts: dict[str, Any]


@lru_cache(4096)
def _make_kin(short: str, axes: str, over: Combiner | None, reduce: str, pattern: Pattern) -> _Kin:
    """Return the shared part of equal Computes. Raises ValueError for an invalid Compute."""
    if short not in LONG:
        raise ValueError(f"unknown element type {short}")
    body = pattern.copy([f"t{i}" for i in range(1 + max(pattern.form[1], default=0))])
    first = Compute("this", LONG[short], _parse_axes(axes), body, _parse_axes(reduce), over, "", pattern.axes)
    parts = {n: getattr(first, n) for n in ("dtype", "axes", "reduce", "combiner", "shape")}
    kin = _Kin(pattern, parts)
    parts.update(form=pattern.form, kin=kin)
    return kin


_REMARK = "  # "
_AXIS = re.compile(r"(\w+):(\d{1,18})", re.ASCII)
_LINE = re.compile(r"(\w+): (\w+)\[([^\]]*)\] = (?:(sum|max|min|prod)\[([^\]]*)\] )?(.*)", re.ASCII)


@lru_cache(4096)
def _parse_axes(text: str) -> tuple[Axis, ...]:
    found = [_AXIS.fullmatch(item) for item in text.split(", ")] if text else []
    if not all(found):
        raise ValueError(f"not axes: {text[:SHOWN]}")
    return tuple(Axis(match[1], int(match[2])) for match in found if match)


def computed_at(c: Compute, indices: Iterable[Expr]) -> Expr:
    """Return the value of the map ``c`` at ``indices`` as an expression, rounded if the result is float16."""
    body = ex.substitute(c.body, dict(zip((a.name for a in c.axes), indices, strict=True)))
    return Cast(c.dtype, body) if c.dtype == "float16" and not isinstance(body, Cast | Load) else body


def combiner_identity(combiner: Combiner, dtype: str) -> Const:
    """Return the result of a reduction over no elements: 0, 1, or the type's least or greatest value."""
    if is_float(dtype) or combiner in ("sum", "prod"):
        return Const(IDENTITY[combiner], dtype)
    if dtype == "bool":
        return Const(combiner == "min", dtype)
    bounds = np.iinfo(dtype)
    return Const(int(bounds.min if combiner == "max" else bounds.max), dtype)


def _is_sliding(index: Expr, compute: Compute) -> bool:
    used = ex.axes_of(index)
    return bool(used & {a.name for a in compute.axes}) and bool(used & {a.name for a in compute.reduce})


def contraction_operands(compute: Compute) -> tuple[Load, Load] | None:
    """Return the two loads of ``sum[k] a[..] * b[..]``, or of the integer form ``sum[k] int32(a[..]) * int32(b[..])``. Returns
    None if ``compute`` has another form."""
    return compute.operands


def weight_sharing(compute: Compute, constants: Container[str]) -> int | None:
    """Return the least number of results that share an element of a constant operand of a product, None without one."""
    weights = [ex.axes_of(ld) for ld in contraction_operands(compute) or () if ld.tensor in constants]
    return min((math.prod(a.extent for a in compute.axes if a.name not in w) for w in weights), default=None)


def _find_operands(compute: Compute) -> tuple[Load, Load] | None:
    body = compute.body
    if compute.combiner != "sum" or not isinstance(body, Op) or body.fn != "mul":
        return None
    a, b = body.args
    if isinstance(a, Cast) and isinstance(b, Cast) and a.dtype == b.dtype == compute.dtype == "int32":
        a, b = a.arg, b.arg
    # A square is a reduction of one operand; kernels for products of two operands do not improve it.
    if not (isinstance(a, Load) and isinstance(b, Load)) or a == b:
        return None
    reduce = {r.name for r in compute.reduce}
    return (a, b) if ex.axes_of(a) & reduce and ex.axes_of(b) & reduce else None


def identity_load(load: Load, compute: Compute) -> bool:
    """Return True if ``load`` reads exactly the element that ``compute`` writes (same indices, in order)."""
    return load.fill is None and load.indices == compute.place


def read_boxes(compute: Compute, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[Load, Box]]:
    """Return, for each load, the box of its tensor that an output ``box`` reads (tile propagation).

    ``box`` bounds the output axes (half-open); reduction axes count whole. Boxes are clipped to the tensor. A data-dependent
    index reads its whole axis. Boxes of different loads are never merged (Welder 4.2)."""
    bounds: dict[str, Interval] = {a.name: (lo, hi - 1) for a, (lo, hi) in zip(compute.axes, box, strict=True)}
    bounds |= {r.name: (0, r.extent - 1) for r in compute.reduce}
    return [(load, load_box(load, bounds, shapes[load.tensor])) for load in compute.loads]


def load_box(load: Load, bounds: Mapping[str, Interval], shape: tuple[int, ...]) -> Box:
    """Return the clipped box of ``load``'s tensor that is read while the axes range over inclusive ``bounds``."""
    result = []
    # Tile search calls this a hundred thousand times, so comparisons replace function calls.
    for index, extent in zip(load.indices, shape, strict=True):
        first, last = bounds[index.axis] if isinstance(index, Ref) else ex.interval(index, bounds) or (0, extent - 1)
        low = 0 if first < 0 else first if first < extent else extent
        high = last + 1 if last < extent else extent
        result.append((low, high if high > low else low))
    return tuple(result)


@dataclass(frozen=True)
class ComputeGraph:
    """Computes in topological order, with the types of all tensors and the values of constants. ``constants`` maps a tensor to
    its value. ``aliases`` maps internal names of inputs and outputs to their names in the ONNX model."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    computes: tuple[Compute, ...]
    types: Mapping[str, TensorType]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        def ports(names: tuple[str, ...]) -> str:
            return ", ".join(f"{n}: {self.types[n]}" for n in names)

        lines = [f"computegraph {self.name}({ports(self.inputs)}) -> ({ports(self.outputs)})"]
        lines += [f"  constant {n}: {self.types[n]}" for n in self.constants]
        lines += [f"  compute {describe_compute(c)}" for c in self.computes]
        return "\n".join(lines)

    @property
    def producers(self) -> dict[str, Compute]:
        """The Computes by the tensor that they write."""
        return {c.name: c for c in self.computes}

    def consumers(self) -> dict[str, list[Compute]]:
        """Return, by tensor name, the Computes that read it, in program order."""
        result: dict[str, list[Compute]] = {n: [] for n in self.types}
        for c in self.computes:
            for name in c.reads:
                result[name].append(c)
        return result


def describe_compute(compute: Compute) -> str:
    """Return ``str(compute)`` with its classification and cost."""
    note = f"  [{compute.kind} {compute.flops / 1e6:.3g} MFLOP]"
    return compute._format_line(compute.name, compute.body_text) + note + compute.remark


def verify_compute_graph(graph: ComputeGraph) -> None:
    """Check definitions before uses, ranks, types and bounds. Raises ValueError naming the Compute."""
    defined = {*graph.inputs, *graph.constants}
    for c in graph.computes:
        for problem in _find_problems(c, graph.types, defined):
            raise ValueError(f"compute {c.name} (from {c.origin or 'a pass'}): {problem}\n  {c}")
        defined.add(c.name)
    missing = [n for n in graph.outputs if n not in defined and graph.types[n].size]  # tensors without elements are not computed
    if missing:
        raise ValueError(f"compute graph {graph.name}: outputs {missing} are never computed")


def _find_problems(c: Compute, types: Mapping[str, TensorType], defined: set[str]) -> Iterator[str]:
    if c.name in defined:
        yield "its output is defined twice"
    if types.get(c.name) != c.type:
        yield f"its output is declared {types.get(c.name)} but computes {c.type}"
    bounds: dict[str, Interval] = {a.name: (0, a.extent - 1) for a in (*c.axes, *c.reduce)}
    for load in c.loads:
        if load.tensor not in defined:
            yield f"{load.tensor} is used before it is defined"
            continue
        shape = types[load.tensor].shape
        if len(load.indices) != len(shape):
            yield f"{load} has {len(load.indices)} indices for rank {len(shape)}"
            continue
        for index, extent in zip(load.indices, shape, strict=True):
            span = ex.interval(index, bounds) if c.points else None
            if load.fill is None and span is not None and not 0 <= span[0] <= span[1] < extent:
                yield f"{load}: index {index} covers {span} outside [0, {extent})"
