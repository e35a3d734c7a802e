"""Extents that are known late: affine functions of lengths, which a program takes as scalar inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from rammer.errors import BadInput

#: The least length that a model is bound at to find a program of all: where an axis has one element, ONNX's operators may
#: broadcast it.
LEAST: Final = 2
#: A length for each open dimension of a model (elements).
Point: TypeAlias = Mapping[str, int]


class NoRange(BadInput):
    """A model whose programs of several lengths are no one program."""


@dataclass(frozen=True, slots=True)
class AffineExtent:
    """``offset`` and the sum of ``factor * length`` over ``terms``, by names of dimensions (elements)."""

    terms: tuple[tuple[str, int], ...]
    offset: int

    def __str__(self) -> str:
        parts = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.terms]
        return " + ".join([*parts, str(self.offset)] if self.offset else parts)

    def at(self, point: Point) -> int:
        """Its value where the lengths are those of ``point``."""
        return self.offset + sum(factor * point[name] for name, factor in self.terms)

    @staticmethod
    def parse(text: str) -> AffineExtent:
        """Inverse of ``str``. ValueError for anything else."""
        found = _EXTENT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:80]!r} is no sum of lengths and a number")
        parts = (part.rpartition("*") for part in (found[1] or "").split(" + ") if part)
        return AffineExtent(tuple((name, int(factor or 1)) for factor, _, name in parts), int(found[2] or 0))


_TERM: Final = r"(?:-?\d{1,18}\*)?[A-Za-z_]\w*"
_BESIDE: Final = re.compile(r"by ([A-Za-z_]\w*) for (\d{1,18})(?: of (\d{1,18}))?", re.ASCII)
_EXTENT: Final = re.compile(rf"({_TERM}(?: \+ {_TERM})*)(?: \+ (-?\d{{1,18}}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RowWindow:
    """``count`` places of an axis from that element of a tensor on which the place along axis ``by`` chooses; modulo ``of``
    where that is not 0, else none before the axis begins."""

    by: str
    count: int
    of: int = 0

    def __str__(self) -> str:
        return f"by {self.by} for {self.count}{f' of {self.of}' if self.of else ''}"

    @staticmethod
    def parse(text: str) -> RowWindow:
        """Inverse of ``str``. ValueError for anything else."""
        found = _BESIDE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:80]!r} tells no places")
        return RowWindow(found[1], int(found[2]), int(found[3] or 0))

    def holds(self, place: int, begin: int) -> bool:
        """Whether ``place`` is one of them, which begin at ``begin``."""
        step = (place - begin) % self.of if self.of else place - begin
        return 0 <= step < self.count


@dataclass(frozen=True, slots=True)
class SkipTasks:
    """An operator's tasks whose first element along ``axis`` lies at or beyond ``extent`` compute nothing that counts: they
    write ``fills``, one for each output, and nothing where that is None. With ``below`` it is the tasks that end at or before
    ``extent``: what they would write is there (``standing``). ``extent`` is a function of inputs of one element (int64) of the
    program, read anew in every run. With ``beside`` it is tasks of one place along both axes that are none of those, which begin
    at ``extent``, then an input of as many elements as there are places along the other axis. A device may compute such tasks
    instead, which writes the same."""

    axis: str
    extent: AffineExtent
    fills: tuple[float | None, ...]
    below: bool = False
    beside: RowWindow | None = None

    @property
    def writes(self) -> bool:
        """Whether a task beyond the extent has anything to write."""
        return any(fill is not None for fill in self.fills)

    def __str__(self) -> str:
        fills = f" with {', '.join('none' if f is None else repr(f) for f in self.fills)}" if self.writes else ""
        if self.beside is not None:
            return f"{self.axis} beside {self.extent} {self.beside}"
        return f"{self.axis} {'below' if self.below else 'at'} {self.extent}{fills}"

    @staticmethod
    def parse(text: str, outputs: int) -> SkipTasks:
        """Inverse of ``str``, for an operator with so many ``outputs``. ValueError for anything else."""
        axis, _, rest = text.partition(" ")
        side, _, rest = rest.partition(" ")
        if side == "beside":
            extent, _, places = rest.partition(" ")
            return SkipTasks(axis, AffineExtent.parse(extent), (None,) * outputs, True, RowWindow.parse(places))
        if side not in ("at", "below"):
            raise ValueError(f"{text[:80]!r} says not at which length tasks end")
        extent, filled, fills = rest.partition(" with ")
        made = tuple(None if f == "none" else float(f) for f in fills.split(", ")) if filled else (None,) * outputs
        return SkipTasks(axis, AffineExtent.parse(extent), made, side == "below")


@dataclass(frozen=True, slots=True)
class ReduceBound:
    """A reduction of an operator to which nothing counts at or beyond ``extent`` along its reduced ``axis``: what it combines
    there is its combiner's identity, whatever the lengths, as far as it was written. A device may end its loop there or go on."""

    compute: str
    axis: str
    extent: AffineExtent

    def __str__(self) -> str:
        return f"{self.compute}.{self.axis} at {self.extent}"

    @staticmethod
    def parse(text: str) -> ReduceBound:
        """Inverse of ``str``. ValueError for anything else."""
        place, _, extent = text.partition(" at ")
        compute, _, axis = place.partition(".")
        return ReduceBound(compute, axis, AffineExtent.parse(extent))


#: Where no dimension follows from others.
NONE: Final[Mapping[str, AffineExtent]] = MappingProxyType({})
#: A dimension of a tensor: a number of elements, or one that follows from lengths.
Dim: TypeAlias = "int | AffineExtent"


@dataclass(frozen=True)
class Ranged:
    """How a program for the longest of a range serves every length of it. ``lengths`` are its scalar inputs (int64) by the
    name of the
    dimension, ``shapes`` those of its other inputs and of its outputs, by tensor."""

    lengths: Mapping[str, str]
    shapes: Mapping[str, tuple[Dim, ...]]
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)  #: Least and greatest length by dimension.

    def record(self) -> dict[str, Any]:
        """Plain data, for a file."""
        shapes = {n: [d if isinstance(d, int) else [list(d.terms), d.offset] for d in s] for n, s in self.shapes.items()}
        return {"lengths": dict(self.lengths), "shapes": shapes, "spans": {n: list(s) for n, s in self.spans.items()}}

    @staticmethod
    def restored(record: Any, tensors: Mapping[str, int]) -> Ranged:
        """Inverse of ``record``. ValueError and the like for what is about others than ``tensors``, by their ranks."""
        lengths = {str(n): str(t) for n, t in record["lengths"].items()}
        shapes = {str(n): tuple(_parse_dim(d, lengths) for d in s) for n, s in record["shapes"].items()}
        if any(tensors.get(t) != 0 for t in lengths.values()) or {n: len(s) for n, s in shapes.items()} != {
            n: rank for n, rank in tensors.items() if n not in lengths.values()
        }:
            raise ValueError("lengths of other tensors")
        spans = {str(n): (low, high) for n, (low, high) in record["spans"].items()}
        if {*spans} != {*lengths} or not all(type(n) is int and n >= 0 for s in spans.values() for n in s):
            raise ValueError("other lengths have ranges")
        return Ranged(lengths, shapes, spans)

    def shape(self, tensor: str, point: Point) -> tuple[int, ...]:
        """The shape of an input or output where the lengths are those of ``point``."""
        return tuple(d if isinstance(d, int) else d.at(point) for d in self.shapes[tensor])


def _parse_dim(record: Any, lengths: Mapping[str, str]) -> Dim:
    if type(record) is int:
        return record
    terms, offset = record
    if not all(n in lengths and type(f) is int for n, f in terms) or type(offset) is not int:
        raise ValueError("an extent of other lengths")
    return AffineExtent(tuple((n, f) for n, f in terms), offset)


def format_point(point: Point) -> str:
    """``seq=5, batch=2``."""
    return ", ".join(f"{n}={v}" for n, v in point.items())
