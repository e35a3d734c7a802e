"""TaskKernel: the CUDA text of one operator's kernel and how to launch it, whichever family wrote it."""

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

    ``key`` names the arrangement, so that operators that want the same one share it; ``make`` computes it
    from the constant in its logical shape, ``size`` is its number of elements.
    """

    key: str
    size: int
    make: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Argument:
    """A pointer parameter: the tensor's first element, or a packed copy of a constant."""

    tensor: str
    written: bool
    packing: Packing | None = None


@dataclass(frozen=True, slots=True)
class TaskKernel:
    """One operator's kernel: entry point, text, pointer arguments and launch shape.

    ``threads`` a block, ``shared`` bytes in all of which ``dynamic`` are asked for at launch, ``blocks`` a task: a
    task whose sum is split runs as one thread-block cluster of so many.
    """

    entry: str
    text: str
    arguments: tuple[Argument, ...]
    threads: int
    shared: int
    dynamic: int = 0
    blocks: int = 1
