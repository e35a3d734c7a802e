"""What a device says of programs that repeat."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rammer.device.manifest import Backend

__all__ = ["Repeating", "repeats"]


@runtime_checkable
class Repeating(Protocol):
    """A Backend may also run programs with ``repeat``: the table again and again, with moves between buffers before and after
    each turn. A Backend without this gets none: the core then runs the turns from the host."""

    @property
    def repeats(self) -> bool:
        """Whether it does."""
        ...


def repeats(backend: Backend) -> bool:
    """Whether a device runs repeated programs."""
    return isinstance(backend, Repeating) and backend.repeats
