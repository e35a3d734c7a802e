"""Loops of assertions over possibly empty collections, which would pass without an element."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeVar

T = TypeVar("T")


def some(found: Iterable[T]) -> Iterator[T]:
    """Yield all elements of ``found``. Raises AssertionError if it is empty."""
    them = iter(found)
    for first in them:
        return chain((first,), them)
    raise AssertionError("nothing was found, so nothing would be checked")
