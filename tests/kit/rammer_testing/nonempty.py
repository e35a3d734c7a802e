"""Loops of assertions over what was found: over nothing they would pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def some(found: Iterable[T]) -> Iterator[T]:
    """All of ``found``, of which there must be one at least. AssertionError else."""
    them = iter(found)
    for first in them:
        return chain((first,), them)
    raise AssertionError("nothing was found, so nothing would be checked")
