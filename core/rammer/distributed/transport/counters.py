"""What a run's transfers cost, counted where it happens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Of one device, since it was opened. An engine counts a payload that it puts together, copies once more or allocates for
    in the place where it does so; what is counted nowhere does not happen.

    ``waited`` is in seconds, for data and for slots to be free, ``nbytes`` counts payloads where they are written or read.
    """

    payload_writes: int = 0
    flag_writes: int = 0
    nbytes: int = 0
    metadata_writes: int = 0  #: Of tensors whose shape a run decides: shape and place.
    reads: int = 0  #: One-sided reads, of such tensors.
    pool_allocations: int = 0  #: Of memory in which such tensors wait for their reader; it was there before.
    allocations: int = 0  #: After the exchange of addresses.
    serialisations: int = 0
    copies: int = 0  #: Of a payload, besides the write that brings it.
    #: Of a step's inputs and outputs, between the host's memory that they arrive in, depart from or are given in, and another
    #: one that its program computes in: a device's own, or the program's part of the host's.
    host_copies: int = 0
    waited: float = 0.0

    def minus(self, before: Counters) -> Counters:
        """What was counted since ``before``."""
        return Counters.of(a - b for a, b in zip(self.values(), before.values(), strict=True))

    def copy(self) -> Counters:
        """As it is now."""
        return self.minus(Counters())

    @staticmethod
    def names() -> tuple[str, ...]:
        """Of the fields."""
        return tuple(f.name for f in fields(Counters))

    def values(self) -> tuple[float, ...]:
        """In the order of the fields, as processes exchange them."""
        return tuple(float(getattr(self, f.name)) for f in fields(self))

    @staticmethod
    def of(values: Iterable[float]) -> Counters:
        """From ``values``."""
        given = {f.name: v for f, v in zip(fields(Counters), values, strict=True)}
        waited = given.pop("waited")
        return Counters(waited=waited, **{n: int(v) for n, v in given.items()})

    def __str__(self) -> str:
        words = ", ".join(f"{getattr(self, f.name)} {f.name.replace('_', ' ')}" for f in fields(self) if f.name != "waited")
        return f"{words.replace('nbytes', 'bytes')}, {self.waited * 1e3:.3g} ms waited"
