"""Sets of operators that have ended, small where everything up to some operator has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PrefixSet:
    """Numbers: all below ``base``, and ``base + k`` for every bit k of ``bits``, of which the lowest is 0.

    In a chain, what comes before an operator is everything that is older: one number, where a bit for each of them would
    make sets of a program with n operators n times as large. Make it by ``|``, ``&`` and ``having``.
    """

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
        """This and ``number``."""
        return self if number in self else _normalise_set(self.base, self.bits | 1 << (number - self.base))

    def has(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``numbers`` are members."""
        length = self.bits.bit_length()
        raw = np.frombuffer(self.bits.to_bytes(-(-length // 8) + 1, "little"), np.uint8)
        window = np.unpackbits(raw, bitorder="little").astype(bool)  # the last bit is 0 and stands for all beyond it
        places = np.clip(numbers - self.base, 0, len(window) - 1)
        result: NDArray[np.bool_] = (numbers < self.base) | window[places]
        return result


def _normalise_set(base: int, bits: int) -> PrefixSet:
    """All below ``base`` and what ``bits`` say, with as large a base as can be."""
    low = (~bits & (bits + 1)).bit_length() - 1
    return PrefixSet(base + low, bits >> low)
