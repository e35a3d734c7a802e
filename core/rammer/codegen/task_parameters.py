"""What kernel families of any device share: a task's pointer parameters, packed constants, and how to decline."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Unsuited(Exception):
    """A kernel family cannot compute this operator (the message says why); another one does."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Another arrangement of a constant's values, made once when a program is loaded.

    ``key`` names the arrangement, so that operators that want the same one share it; ``size`` is its
    number of elements, ``dtype`` their type, and ``make`` computes it from the constant in its logical shape.
    """

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
    """One operator's tasks as a text, whichever kernel family wrote it; a device's own is a dataclass that knows, too, how to run
    it. Equal operators on different tensors share one text, and so one ``entry``, which ends with a hash of it."""

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
        """What its pointers point at, in order."""
        ...


def hash_of(text: str) -> str:
    """The end of the name of what has this text."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def packing_key(*parts: object) -> str:
    """The key of the arrangement that ``parts`` (which print alike if they are alike) describe in full."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def pad_axis(array: Array, axis: int, count: int) -> Array:
    """``array`` with zeros appended along ``axis`` (from 0) up to ``count``."""
    missing = count - array.shape[axis]
    return np.pad(array, [(0, missing if d == axis else 0) for d in range(array.ndim)]) if missing else array
