"""Dynamic extents: affine functions of lengths, which a program reads from scalar inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from rammer.errors import BadInput

#: Minimum length at which a model is bound to find a ranged program. ONNX's operators may broadcast an axis of one element.
LEAST: Final = 2
#: A length for each dynamic dimension of a model (elements).
Point: TypeAlias = Mapping[str, int]
#: A user's range of a dimension, with or without a step, or a sum of lengths.
GivenLength: TypeAlias = "tuple[int, int] | tuple[int, int, int] | str"


class NoRange(BadInput):
    """Error for a model whose programs of several lengths cannot become one program."""

    def __init__(self, what: str, where: str = "", hint: str = "each shape is compiled on its own") -> None:
        super().__init__(what, where, hint)


@dataclass(frozen=True, slots=True)
class AffineExtent:
    """A sum of ``offset`` and ``factor * length`` over ``terms``, by dimension names (elements)."""

    terms: tuple[tuple[str, int], ...]
    offset: int

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.terms]
        return " + ".join([*parts, str(self.offset)] if self.offset else parts)

    def at(self, point: Point) -> int:
        """Return the value at the lengths in ``point``."""
        return self.offset + sum(factor * point[name] for name, factor in self.terms)

    @staticmethod
    def parse(text: str) -> AffineExtent:
        """Parse the text of ``str``. Raises ValueError for other text."""
        found = _EXTENT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:80]!r} is not a sum of lengths and a number")
        parts = (part.rpartition("*") for part in (found[1] or "").split(" + ") if part)
        return AffineExtent(tuple((name, int(factor or 1)) for factor, _, name in parts), int(found[2] or 0))


@dataclass(frozen=True, slots=True)
class Formula:
    """A derived length: the product of ``factors`` over ``divisor``, rounded down. The runtime computes it from other lengths."""

    factors: tuple[AffineExtent, ...]
    divisor: int = 1

    def __str__(self) -> str:
        product = " * ".join(f"({f})" if len(f.terms) > 1 or f.offset else str(f) for f in self.factors)
        return f"({product} // {self.divisor})" if self.divisor > 1 else f"({product})"

    def at(self, point: Point) -> int:
        """Return the value at the lengths in ``point``."""
        return math.prod(f.at(point) for f in self.factors) // self.divisor


_TERM: Final = r"(?:-?\d{1,18}\*)?[A-Za-z_]\w*"
_BESIDE: Final = re.compile(r"by ([A-Za-z_]\w*) for (\d{1,18})(?: of (\d{1,18}))?", re.ASCII)
_EXTENT: Final = re.compile(rf"({_TERM}(?: \+ {_TERM})*)(?: \+ (-?\d{{1,18}}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RowWindow:
    """A window of ``count`` positions along an axis. The window begins at an element of a tensor, selected by the position along
    axis ``by``. It wraps modulo ``of`` if that is not 0, else it is clipped at the start of the axis."""

    by: str
    count: int
    of: int = 0

    def __str__(self) -> str:
        return f"by {self.by} for {self.count}{f' of {self.of}' if self.of else ''}"

    @staticmethod
    def parse(text: str) -> RowWindow:
        """Parse the text of ``str``. Raises ValueError for other text."""
        found = _BESIDE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:80]!r} is not a row window")
        return RowWindow(found[1], int(found[2]), int(found[3] or 0))

    def holds(self, place: int, begin: int) -> bool:
        """Return True if ``place`` is in the window that begins at ``begin``."""
        step = (place - begin) % self.of if self.of else place - begin
        return 0 <= step < self.count


@dataclass(frozen=True, slots=True)
class SkipTasks:
    """A mask of tasks along ``axis``.

    Tasks whose first element is at or past ``extent`` are skipped. They store ``fills``, one per output, or nothing for None.
    ``extent`` is a function of one-element inputs (int64) and is read in each run.

    With ``before``, tasks that end at or before ``extent`` are skipped instead, since their results are already stored
    (``rammer.verify.in_place_state``). With ``window``, tasks of one position along both axes are skipped outside a row window.
    The window begins at ``extent``, then an input with one element per position along the other axis.

    A device may compute skipped tasks instead; they write the same values."""

    axis: str
    extent: AffineExtent
    fills: tuple[float | None, ...]
    before: bool = False
    window: RowWindow | None = None

    @property
    def writes(self) -> bool:
        """True if a skipped task stores a fill value."""
        return any(fill is not None for fill in self.fills)

    def __str__(self) -> str:
        fills = f" with {', '.join('none' if f is None else repr(f) for f in self.fills)}" if self.writes else ""
        if self.window is not None:
            return f"{self.axis} outside {self.extent} {self.window}"
        return f"{self.axis} {'before' if self.before else 'from'} {self.extent}{fills}"

    @staticmethod
    def parse(text: str, outputs: int) -> SkipTasks:
        """Parse the text of ``str`` for an operator with ``outputs`` outputs. Raises ValueError for other text."""
        axis, _, rest = text.partition(" ")
        side, _, rest = rest.partition(" ")
        if side == "outside":
            extent, _, places = rest.partition(" ")
            return SkipTasks(axis, AffineExtent.parse(extent), (None,) * outputs, True, RowWindow.parse(places))
        if side not in ("from", "before"):
            raise ValueError(f"{text[:80]!r} does not give the length at which tasks end")
        extent, filled, fills = rest.partition(" with ")
        made = tuple(None if f == "none" else float(f) for f in fills.split(", ")) if filled else (None,) * outputs
        return SkipTasks(axis, AffineExtent.parse(extent), made, side == "before")


@dataclass(frozen=True, slots=True)
class ReduceBound:
    """A dynamic bound of a reduction along its reduced ``axis``. Elements at or past ``extent`` that were written are the
    combiner's identity at all lengths. A device may stop its loop at the bound or continue."""

    compute: str
    axis: str
    extent: AffineExtent

    def __str__(self) -> str:
        return f"{self.compute}.{self.axis} at {self.extent}"

    @staticmethod
    def parse(text: str) -> ReduceBound:
        """Parse the text of ``str``. Raises ValueError for other text."""
        place, _, extent = text.partition(" at ")
        compute, _, axis = place.partition(".")
        return ReduceBound(compute, axis, AffineExtent.parse(extent))


#: No dependent dimensions.
NONE: Final[Mapping[str, AffineExtent]] = MappingProxyType({})
#: Lengths at a distance of 1.
NO_STEPS: Final[Mapping[str, int]] = MappingProxyType({})
#: A dimension of a tensor: a number of elements, or a function of lengths.
Dim: TypeAlias = "int | AffineExtent"


@dataclass(frozen=True)
class Ranged:
    """The lengths and shapes by which a program for the longest length serves all lengths of a range. ``lengths`` maps each
    dimension and derived length to its scalar input (int64). ``shapes`` maps the other inputs and the outputs to their shapes."""

    lengths: Mapping[str, str]
    shapes: Mapping[str, tuple[Dim, ...]]
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)  #: Least and greatest length by dimension.
    steps: Mapping[str, int] = field(default_factory=dict)  #: Distance of lengths, counted from the greatest, if not 1.
    formulas: Mapping[str, Formula] = field(default_factory=dict)  #: Derived lengths, each of earlier ones.
    #: Results of earlier calls by shapes of inputs, which repeat in most uses.
    seen: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def record(self) -> dict[str, Any]:
        """Return plain data to store in a file."""
        shapes = {n: [d if isinstance(d, int) else _plain(d) for d in s] for n, s in self.shapes.items()}
        formulas = {n: [[_plain(e) for e in f.factors], f.divisor] for n, f in self.formulas.items()}
        spans = {n: list(s) for n, s in self.spans.items()}
        return {"lengths": dict(self.lengths), "shapes": shapes, "spans": spans, "steps": dict(self.steps), "formulas": formulas}

    @staticmethod
    def restored(record: Any, tensors: Mapping[str, int]) -> Ranged:
        """Restore the data of ``record``. Raises ValueError or similar errors unless it matches ``tensors`` and their ranks."""
        lengths = {str(n): str(t) for n, t in record["lengths"].items()}
        spans = {str(n): (low, high) for n, (low, high) in record["spans"].items()}
        steps = {str(n): step for n, step in record.get("steps", {}).items()}
        formulas, known = dict[str, Formula](), {*spans}
        for name, (factors, divisor) in record.get("formulas", {}).items():
            if type(divisor) is not int or divisor < 1 or name in known:
                raise ValueError("a derived length has no divisor, or the name of another length")
            formulas[name] = Formula(tuple(_parse_extent(f, known) for f in factors), divisor)
            known.add(name)
        shapes = {str(n): tuple(d if type(d) is int else _parse_extent(d, known) for d in s) for n, s in record["shapes"].items()}
        if any(tensors.get(t) != 0 for t in lengths.values()) or {n: len(s) for n, s in shapes.items()} != {
            n: rank for n, rank in tensors.items() if n not in lengths.values()
        }:
            raise ValueError("lengths do not match the tensors")
        if {*lengths} != known or not all(type(n) is int and n >= 0 for s in spans.values() for n in s):
            raise ValueError("ranges do not match the lengths")
        if not steps.keys() <= spans.keys() or not all(type(n) is int and n > 0 for n in steps.values()):
            raise ValueError("steps do not match the ranges")
        return Ranged(lengths, shapes, spans, steps, formulas)

    def complete(self, point: Point) -> Point:
        """Return ``point`` with the derived lengths, or ``point`` itself if it has them."""
        if self.formulas.keys() <= point.keys():
            return point
        found = dict(point)
        for name, formula in self.formulas.items():
            found[name] = formula.at(found)
        return found

    def scalars(self, point: Point) -> dict[str, int]:
        """Return the values of the scalar inputs at the lengths in ``point``, by tensor."""
        point = self.complete(point)
        return {tensor: point[name] for name, tensor in self.lengths.items()}

    def shape(self, tensor: str, point: Point) -> tuple[int, ...]:
        """Return the shape of an input or output at the lengths in ``point``."""
        point = self.complete(point)
        return tuple(d if isinstance(d, int) else d.at(point) for d in self.shapes[tensor])


def _plain(extent: AffineExtent) -> list[Any]:
    return [list(extent.terms), extent.offset]


def _parse_extent(record: Any, lengths: Container[str]) -> AffineExtent:
    terms, offset = record
    if not all(n in lengths and type(f) is int for n, f in terms) or type(offset) is not int:
        raise ValueError("an extent depends on unknown lengths")
    return AffineExtent(tuple((n, f) for n, f in terms), offset)


def format_point(point: Point) -> str:
    """Format lengths as ``seq=5, batch=2``."""
    return ", ".join(f"{n}={v}" for n, v in point.items())
