"""A sequence whose items are computed on first access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

__all__ = ["LazySequence"]

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence over ``items`` that computes each item once, in order, when it is first accessed. Readers of the first few items
    do not compute the rest."""

    def __init__(self, items: Iterable[T]) -> None:
        self._rest, self._made = iter(items), list[T]()

    def _extend_to(self, count: int | None) -> list[T]:
        """Return the computed items, after extending them to ``count`` (None: all) if enough exist."""
        self._made += islice(self._rest, None if count is None else max(count - len(self._made), 0))
        return self._made

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        last = index.stop if isinstance(index, slice) else index + 1
        start = index.start or 0 if isinstance(index, slice) else index
        return self._extend_to(None if last is None or last < 0 or start < 0 else last)[index]

    def __iter__(self) -> Iterator[T]:
        place = 0
        while len(self._extend_to(place + 1)) > place:
            yield self._made[place]
            place += 1

    def __bool__(self) -> bool:
        return bool(self._extend_to(1))

    def __len__(self) -> int:
        return len(self._extend_to(None))
