"""Counts of a campaign and their table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

#: Outcomes of a mutant: a clear error; a run with the required numbers; a run whose numbers are not judged; a run of a resealed
#: file with other numbers, which is allowed; anything else.
REFUSED, RIGHT, RAN, OTHER, FAULT = COLUMNS = ("refused", "right", "ran, not judged", "other numbers, allowed", "faults")
_HEADERS: Final = ("kind", "way", "mutants", *COLUMNS)


@dataclass
class Tally:
    """The counts of a campaign. ``ends`` counts by (kind, way, column). ``faults`` are messages and the locations of stored
    mutants. ``unbegun`` are reasons for runs that could not start, independent of the mutants."""

    ends: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    faults: list[tuple[str, str]] = field(default_factory=list)
    unbegun: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    def count(self, kind: str, way: str, what: str, seconds: float) -> None:
        """Count one more mutant."""
        self.ends[kind, way, what] += 1
        self.slowest = max(self.slowest, seconds)

    def add(self, other: Tally) -> None:
        """Add the counts of another campaign."""
        self.ends.update(other.ends)
        self.faults += other.faults
        self.unbegun.update(other.unbegun)
        self.slowest = max(self.slowest, other.slowest)

    @property
    def mutants(self) -> int:
        """The number of all mutants."""
        return sum(self.ends.values())

    def data(self) -> dict[str, Any]:
        """Return the counts as JSON data."""
        return {
            "ends": [[*k, n] for k, n in sorted(self.ends.items())],
            "faults": self.faults,
            "unbegun": dict(self.unbegun),
            "slowest": self.slowest,
        }

    def __str__(self) -> str:
        pairs = sorted({k[:2] for k in self.ends})
        rows: list[tuple[object, ...]] = [(kind, way, *self._counts(kind, way)) for kind, way in pairs]
        rows.append(("all", "", self.mutants, *(sum(n for k, n in self.ends.items() if k[2] == what) for what in COLUMNS)))
        lines = [f"{self.mutants} mutants, slowest {self.slowest:.1f} s", _line(_HEADERS), *map(_line, rows)]
        lines += [f"{n} times {fault}" for fault, n in Counter(f for f, _ in self.faults).most_common()]
        lines += [f"{n} runs could not begin: {why}" for why, n in self.unbegun.most_common()]
        return "\n".join((*lines, *(f"fault at {where}" for _, where in self.faults if "/" in where)))

    def _counts(self, kind: str, way: str) -> tuple[int, ...]:
        counts = [self.ends[kind, way, what] for what in COLUMNS]
        return sum(counts), *counts


def _line(row: tuple[object, ...]) -> str:
    first, second, *numbers = row
    widths = [max(9, len(h)) for h in _HEADERS[2:]]
    return f"{first:9} {second:20} " + " ".join(f"{n!s:>{w}}" for n, w in zip(numbers, widths, strict=True))
