"""What a device says of programs that repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rammer.device.manifest import Backend

__all__ = ["Between", "Repeating", "Seaming", "between", "repeats"]


@dataclass(frozen=True, slots=True)
class Between:
    """What is between two turns: how many steps take as long, of recurrent layers (``cells``) and of a model's own loops
    (``light``). Steps that a run does not need cost as much as others, unless the device skips them: then these are less."""

    cells: int = 2
    light: int = 32


@runtime_checkable
class Repeating(Protocol):
    """A Backend may also run programs with ``repeat``: the table again and again, with moves between buffers before and after
    each turn. A Backend without this gets none: the core then runs the turns from the host."""

    @property
    def repeats(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class Seaming(Protocol):
    """A Backend may say what is between two turns; one that does not has what ``Between`` has."""

    @property
    def between(self) -> Between:
        """It."""
        ...


def between(backend: Backend) -> Between | None:
    """What is between two turns of a device; None where it does not repeat programs."""
    if not repeats(backend):
        return None
    return backend.between if isinstance(backend, Seaming) else Between()


def repeats(backend: Backend) -> bool:
    """Whether a device runs repeated programs."""
    return isinstance(backend, Repeating) and backend.repeats
