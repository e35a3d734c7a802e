"""What devices do while they run, and when: kept for traces, by the clock of each one's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

__all__ = ["Log", "Logs", "Mark"]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that took from ``begin`` to ``end`` (seconds). ``kind``: ``step``, ``wait`` for a transfer, ``room`` (until
    its slot is free), ``write`` of a transfer, ``outputs`` taken out, or ``whole`` runs, of a device that runs without the host.

    ``facts`` of a write: ``flag``, when its flag was about to be written. Of a step: ``seconds`` on the device, by ``clock``.
    """

    kind: str
    name: str
    run: int
    begin: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def moved(self, to: Callable[[float], float]) -> Mark:
        """By another clock."""
        facts = {n: to(v) if n == "flag" else v for n, v in self.facts.items()}
        return Mark(self.kind, self.name, self.run, to(self.begin), to(self.end), facts)

    def values(self) -> list[Any]:
        """As processes tell each other: ``Mark(*values)`` is it again."""
        return [self.kind, self.name, self.run, self.begin, self.end, dict(self.facts)]


class Log:
    """Of one device. ``now`` is the clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.marks = now, list[Mark]()

    def add(self, kind: str, name: str, run: int, begin: float, **facts: Any) -> None:
        """Something that began then ends now."""
        self.marks.append(Mark(kind, name, run, begin, self.now(), facts))


@runtime_checkable
class Logs(Protocol):
    """An endpoint, or what runs a device's part, that keeps a log where it has one."""

    log: Log | None
