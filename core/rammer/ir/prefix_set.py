"""Sets of finished operators, compact if they include all operators up to some number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PrefixSet:
    """A set of numbers: all below ``base``, and ``base + k`` for every bit k of ``bits``, whose lowest bit is 0.

    In a chain, the predecessors of an operator are all older operators, stored as one number. One bit per operator would make the
    sets n times as large for n operators. Create sets by ``|``, ``&`` and ``having``."""

    base: int = 0
    bits: int = 0

    def __contains__(self, number: int) -> bool:
        return number < self.base or bool(self.bits >> (number - self.base) & 1)

    def __or__(self, other: PrefixSet) -> PrefixSet:
        high, low = (self, other) if self.base >= other.base else (other, self)
        more = low.bits >> (high.base - low.base)
        return high if not more else _normalise_set(high.base, high.bits | more)

    def __and__(self, other: PrefixSet) -> PrefixSet:
        high, low = (self, other) if self.base >= other.base else (other, self)
        gap = high.base - low.base
        return PrefixSet(low.base, low.bits & (high.bits << gap | (1 << gap) - 1))

    def having(self, number: int) -> PrefixSet:
        """Return the union with ``number``."""
        return self if number in self else _normalise_set(self.base, self.bits | 1 << (number - self.base))

    def has(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the ``numbers`` that are members."""
        length = self.bits.bit_length()
        raw = np.frombuffer(self.bits.to_bytes(-(-length // 8) + 1, "little"), np.uint8)
        window = np.unpackbits(raw, bitorder="little").astype(bool)  # the last bit is 0 and represents all numbers above it
        places = np.clip(numbers - self.base, 0, len(window) - 1)
        result: NDArray[np.bool_] = (numbers < self.base) | window[places]
        return result


def _normalise_set(base: int, bits: int) -> PrefixSet:
    """Return the set of all numbers below ``base`` and those in ``bits``, with the largest possible ``base``."""
    low = (~bits & (bits + 1)).bit_length() - 1
    return PrefixSet(base + low, bits >> low)
