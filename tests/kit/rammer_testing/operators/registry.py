"""The table of operators: how graphs and single-operator checks draw each, and the operators that graphs leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from onnx import defs

from rammer_testing.operators.case import OperatorCase
from rammer_testing.operators.draw import Draw, Reject, schema_of

#: A function that adds one use of the operator, or returns a case of the operator alone. Raises Reject if no value fits.
Describe: TypeAlias = Callable[[Draw, str], object]


@dataclass(frozen=True)
class Entry:
    """A function that draws an operator, and its weight in graphs (1 is usual; 0: single-operator checks only)."""

    draw: Describe
    weight: float = 1.0


DESCRIBED: Final[dict[str, Entry]] = {}

#: Lowered operators that graphs do not draw, and the reasons.
LEFT_OUT: Final[Mapping[str, str]] = {
    "Constant": "drawn as an operand of others",
    "BitCast": "numbers of any bits are of any size, and NaN; tests/devices/test_stored_types.py has all pairs of types",
    "NonZero": "its shape depends on data, which is refused",
    "Unique": "its shape depends on data, which is refused",
    "STFT": "drawn alone: its frames are those of a signal",
    "RoiAlign": "drawn alone: which samples a box has leaps with its size",
    "MaxUnpool": "drawn alone: its indices are those of a pooling",
    "Compress": "its shape depends on data, which is refused",
    "NonMaxSuppression": "its shape depends on data, which is refused",
}
#: The opsets of single operators.
FIRST, LAST = 7, 26


def describe(*ops: str, weight: float = 1.0) -> Callable[[Describe], Describe]:
    """Return a decorator that registers a function to draw these operators."""

    def register(fn: Describe) -> Describe:
        for op in ops:
            DESCRIBED[op] = Entry(fn, weight)
        return fn

    return register


def describe_alone(*ops: str) -> Callable[[Describe], Describe]:
    """Return a decorator that registers a function to draw these operators in single-operator checks only."""
    return describe(*ops, weight=0)


def drawn(op: str, seed: int, number: int) -> OperatorCase:
    """Return case ``number`` of a single operator, determined by the arguments. All its revisions are equally likely."""
    rng = np.random.default_rng([seed, number, *op.encode()])
    entry = DESCRIBED[op]
    for _ in range(1000):
        low, high = _revisions(op)[int(rng.integers(len(_revisions(op))))]
        d = Draw(
            rng,
            int(rng.integers(low, high + 1)),
            empty=float(rng.choice([0.0, 0.0, 0.0, 0.04, 0.25])) if entry.weight else 0.0,
            largest=6,
            level=bool(rng.random() < 0.5),
            renew=1.0,
            alone=op,
        )
        try:
            made = entry.draw(d, op)
            return made if isinstance(made, OperatorCase) else d.use()
        except Reject:
            continue
    raise AssertionError(f"{op} cannot be drawn")


@lru_cache(512)
def _revisions(op: str) -> list[tuple[int, int]]:
    """Return the first and the last opset of each revision of an operator; 17 for operators of other domains."""
    found = sorted({max(s.since_version, FIRST) for s in defs.get_all_schemas_with_history() if (s.name, s.domain) == (op, "")})
    spans = [(n, max(after - 1, n)) for n, after in zip(found, [*found[1:], LAST + 1][: len(found)], strict=True)]
    return [(low, high) for low, high in spans if schema_of(op, low) is not None] or [(17, 17)]
