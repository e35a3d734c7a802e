"""Sequences that are computed on demand."""

from __future__ import annotations

from collections.abc import Iterator

from rammer.device.lazy_sequence import LazySequence


def test_items_are_made_when_they_are_asked_for_and_once() -> None:
    made = list[int]()

    def items() -> Iterator[int]:
        for k in range(5):
            made.append(k)
            yield k * k

    found = LazySequence(items())
    assert not made
    assert found and made == [0]
    assert found[:2] == [0, 1] and found[1] == 1 and made == [0, 1]
    assert [x for x, _ in zip(found, range(3), strict=False)] == [0, 1, 4]
    assert made == [0, 1, 2, 3], "zip asks for one more"
    assert list(found) == list(found) == [0, 1, 4, 9, 16] and made == list(range(5))
    assert len(found) == 5 and found[-1] == 16 and found[3:] == [9, 16] and found[-2:] == [9, 16]


def test_what_is_not_there() -> None:
    assert not LazySequence(()) and not list(LazySequence(())) and LazySequence(())[:4] == []
    assert LazySequence((1, 2))[::-1] == [2, 1] and LazySequence((1, 2, 3))[:-1] == [1, 2]
    assert 2 in LazySequence((1, 2)) and 3 not in LazySequence((1, 2))
