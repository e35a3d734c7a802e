"""Common parts of kernel families of any device: pointer parameters, packed constants, and how to decline."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Unsuited(Exception):
    """Error of a kernel family that cannot compute an operator, with the reason; another family does."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Another arrangement of a constant's values, computed once when a program is loaded.

    ``key`` names the arrangement, so that operators with the same arrangement share it. ``size`` is its number of elements,
    ``dtype`` their type, and ``make`` computes it from the constant in its logical shape."""

    key: str
    size: int
    make: Callable[[Array], Array]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Argument:
    """A pointer parameter: the tensor's first element, or a packed copy of a constant."""

    tensor: str
    written: bool
    packing: Packing | None = None


class TaskCode(Protocol):
    """The text of one operator's tasks, by any kernel family. A device's implementation is a dataclass that can also run it.
    Equal operators on different tensors share one text, and so one ``entry``, which ends with a hash of it."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def entry(self) -> str:
        """The name of the function."""
        ...

    @property
    def text(self) -> str:
        """The function, and what it needs besides the dialect's preamble."""
        ...

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The tensors that its pointers point at, in order."""
        ...


def hash_of(text: str) -> str:
    """Return the suffix of a name, a hash of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def packing_key(*parts: object) -> str:
    """Return the key of the arrangement that ``parts`` describe in full; equal parts print alike."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def pad_axis(array: Array, axis: int, count: int) -> Array:
    """Return ``array`` with zeros appended along ``axis`` (from 0) up to ``count``."""
    missing = count - array.shape[axis]
    return np.pad(array, [(0, missing if d == axis else 0) for d in range(array.ndim)]) if missing else array
