"""Log of the activity of devices with times, for traces, by the clock of each device's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Log", "Mark"]


@dataclass(frozen=True, slots=True)
class Mark:
    """An interval from ``begin`` to ``end`` (seconds).

    ``kind`` is ``step``, ``wait`` for a transfer, ``room`` (until its slot is free), ``write`` of a transfer, or ``outputs``
    copied out. A device that runs without the host has ``whole`` runs.

    ``facts`` of a write: ``flag``, when its flag was about to be written. Of a step: ``seconds`` on the device, by ``clock``.
    """

    kind: str
    name: str
    run: int
    begin: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def moved(self, to: Callable[[float], float]) -> Mark:
        """Return the mark with times converted by ``to``."""
        facts = {n: to(v) if n == "flag" else v for n, v in self.facts.items()}
        return Mark(self.kind, self.name, self.run, to(self.begin), to(self.end), facts)

    def values(self) -> list[Any]:
        """Return the values that processes exchange; ``Mark(*values)`` restores the mark."""
        return [self.kind, self.name, self.run, self.begin, self.end, dict(self.facts)]


class Log:
    """The marks of one device; ``now`` is the clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.marks = now, list[Mark]()

    def add(self, kind: str, name: str, run: int, begin: float, **facts: Any) -> None:
        """Append a mark that started at ``begin`` and ends now."""
        self.marks.append(Mark(kind, name, run, begin, self.now(), facts))
