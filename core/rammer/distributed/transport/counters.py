"""Counters of the cost of transfers, incremented where each event occurs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """The counters of one device since it was opened.

    An engine counts each payload that it assembles, copies or allocates for, at the place where it does so. ``waited`` is in
    seconds, for data and for free slots; ``nbytes`` counts payloads where they are written or read."""

    payload_writes: int = 0
    flag_writes: int = 0
    nbytes: int = 0
    metadata_writes: int = 0  #: Records of dynamic-shape tensors: shape and address.
    reads: int = 0  #: One-sided reads of dynamic-shape tensors.
    pool_allocations: int = 0  #: Blocks of the preallocated pool in which dynamic-shape tensors wait for their reader.
    allocations: int = 0  #: Allocations after the exchange of addresses.
    serialisations: int = 0
    copies: int = 0  #: Copies of a payload, besides the write that sends it.
    #: Copies of a step's inputs and outputs between host arrays and the memory in which its program computes. That is a device's
    #: separate memory, or the program's part of the host's.
    host_copies: int = 0
    waited: float = 0.0

    def minus(self, before: Counters) -> Counters:
        """Return the counts since ``before``."""
        return Counters.of(a - b for a, b in zip(self.values(), before.values(), strict=True))

    def copy(self) -> Counters:
        """Return a copy of the counters."""
        return self.minus(Counters())

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(f.name for f in fields(Counters))

    def values(self) -> tuple[float, ...]:
        """Return the values in the order of the fields, for exchange between processes."""
        return tuple(float(getattr(self, f.name)) for f in fields(self))

    @staticmethod
    def of(values: Iterable[float]) -> Counters:
        """Return counters with these ``values``."""
        given = {f.name: v for f, v in zip(fields(Counters), values, strict=True)}
        waited = given.pop("waited")
        return Counters(waited=waited, **{n: int(v) for n, v in given.items()})

    def __str__(self) -> str:
        words = ", ".join(f"{getattr(self, f.name)} {f.name.replace('_', ' ')}" for f in fields(self) if f.name != "waited")
        return f"{words.replace('nbytes', 'bytes')}, {self.waited * 1e3:.3g} ms waited"
