"""TaskFunction: the OpenCL C text of one task, whichever kernel family wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Unsuited(Exception):
    """A kernel family cannot compute this operator (the message says why); another one does."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Another arrangement of a constant's values, made once when a program is loaded.

    ``key`` names the arrangement, so that operators that want the same one share it; ``size`` is its
    number of float32 elements and ``make`` computes it from the constant in its logical shape.
    """

    key: str
    size: int
    make: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Argument:
    """A pointer parameter: the tensor's first element, or a packed copy of a constant."""

    tensor: str
    ctype: str
    written: bool
    packing: Packing | None = None


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """``void name(global T0 *p0, ..., scratch, int task)``; ``scratch`` is in bytes.

    Equal operators on different tensors share one text, and so one ``name``, a hash of the text.
    """

    name: str
    text: str
    arguments: tuple[Argument, ...]
    scratch: int
