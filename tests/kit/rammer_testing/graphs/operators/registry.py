"""The table of described operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from rammer_testing.graphs.draw import Draw

#: A function that adds one use of the operator to a graph; raises Reject if no value fits.
Describe: TypeAlias = Callable[[Draw, str], object]


@dataclass(frozen=True)
class Entry:
    """A function that draws an operator, and its weight (1 is usual)."""

    draw: Describe
    weight: float = 1.0


DESCRIBED: Final[dict[str, Entry]] = {}

#: Lowered operators that graphs do not draw, and the reasons.
LEFT_OUT: Final[Mapping[str, str]] = {
    "Constant": "drawn as an operand of others",
    "BitCast": "numbers of any bits are of any size, and NaN; tests/devices/test_stored_types.py has all pairs of types",
    "NonZero": "its shape depends on data, which is refused",
    "Unique": "its shape depends on data, which is refused",
    "STFT": "drawn alone, by rammer_testing.operators: its frames are those of a signal",
    "RoiAlign": "drawn alone, by rammer_testing.operators: which samples a box has leaps with its size",
    "MaxUnpool": "drawn alone, by rammer_testing.operators: its indices are those of a pooling",
    "Compress": "its shape depends on data, which is refused",
    "NonMaxSuppression": "its shape depends on data, which is refused",
}


def describe(*ops: str, weight: float = 1.0) -> Callable[[Describe], Describe]:
    """Return a decorator that registers a function to draw these operators."""

    def register(fn: Describe) -> Describe:
        for op in ops:
            DESCRIBED[op] = Entry(fn, weight)
        return fn

    return register
