"""Extents that are known late: affine functions of lengths, which a program takes as scalar inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

#: The least length that a model is bound at to find a program of all: where an axis has one element, ONNX's operators may
#: broadcast it.
LEAST: Final = 2
#: A length for each open dimension of a model (elements).
Point: TypeAlias = Mapping[str, int]


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

    def shape(self, tensor: str, point: Point) -> tuple[int, ...]:
        """The shape of an input or output where the lengths are those of ``point``."""
        return tuple(d if isinstance(d, int) else d.at(point) for d in self.shapes[tensor])


def spelled(point: Point) -> str:
    """``seq=5, batch=2``."""
    return ", ".join(f"{n}={v}" for n, v in point.items())
