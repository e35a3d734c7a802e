"""Transport: the frozen manifest of a way between devices, and the protocols behind it.

Importing a manifest imports nothing of a network's; ``open`` does. A *fabric* is what joins the devices of one run, some of them
this process's own, an *endpoint* is one device's side of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rammer.device.manifest import Backend
from rammer.distributed.distributed_program import DistributedProgram, Link
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.watchdog import TIMEOUT

__all__ = ["TIMEOUT", "Endpoint", "Fabric", "Party", "RunsParts", "Site", "TimesItself", "Transport"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a device's memory is: the device's name, what its hardware is, the process that drives it, and whether the processes
    are of several hosts."""

    device: str
    kind: str = "cpu"
    process: int = 0
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Party:
    """Who takes part: all devices in order, and how long one waits for another (seconds)."""

    sites: tuple[Site, ...]
    timeout: float = TIMEOUT


class Endpoint(Protocol):
    """One device's side. Called from one thread. Everything that waits raises DeviceFailure after the party's timeout, or once
    another device has ended, and says which transfer waits for whom."""

    counters: Counters

    def slot(self, name: str, run: int) -> Array:
        """The memory that transfer ``name`` of run number ``run`` arrives in; the same again every ``depth`` runs."""
        ...

    def arrived(self, name: str, run: int) -> bool:
        """Whether it is all there."""
        ...

    def wait(self, name: str, run: int) -> None:
        """Return when it is all there."""
        ...

    def free(self, name: str, run: int) -> bool:
        """Whether the slot that ``put`` would write is free."""
        ...

    def put(self, name: str, run: int, values: Array) -> None:
        """Write a tensor where it is read, when the slot is free, and the flag behind it. ``values`` may change afterwards."""
        ...

    def release(self, name: str, run: int) -> None:
        """What arrived has been read: its slot is the sender's again."""
        ...

    def fail(self, why: str) -> None:
        """Tell all others that this device ends, and why; never raises, never waits long."""
        ...


@runtime_checkable
class RunsParts(Protocol):
    """An endpoint may also run its device's part itself: waits, steps and writes are queued on the device, and no host is between
    the steps of a run."""

    def part(self, spread: DistributedProgram, device: int, backend: Backend) -> Any:
        """In the place of ``rammer.distributed.runtime.device_part.BoundPart``: it has ``go``, ``notes`` and ``close``."""
        ...


@runtime_checkable
class TimesItself(Protocol):
    """An endpoint may also time by itself what links are measured by: as its runs write and wait, from its own memory."""

    def echo(self, out: str, into: str, runs: range, begins: bool) -> float:
        """So many tensors go by transfer ``out`` and come by ``into``, one behind the other, and slots are given back; who
        ``begins`` sends first, the other one when it has received. ``runs`` are those of both transfers. Seconds of a round,
        there and back."""
        ...


class Fabric(Protocol):
    """The devices of one run, joined."""

    mine: tuple[int, ...]  #: Numbers of the devices that this process drives.

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        """What every device says (of its own ones each process), in order of the devices. DeviceFailure after so long."""
        ...

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """All devices' memory is allocated and its addresses exchanged; the endpoints of this process's own devices."""
        ...

    def close(self, failed: bool = False) -> None:
        """Free all memory; all devices together, unless one has ``failed``. Closing again does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Transport:
    """A manifest. ``probe`` raises MissingDependency where it cannot work here; ``connects`` says why two sites cannot reach each
    other by it, and None where they can; of several that can, the one with the highest ``rank`` is taken, and between hosts
    the one with the highest ``far``."""

    name: str
    summary: str
    probe: Callable[[], None]
    connects: Callable[[Site, Site], str | None]
    open: Callable[[Party], Fabric]
    rank: int = 0
    far: int = 0
    reads: bool = False  #: Whether a tensor whose shape a run decides crosses as it is; else as it is at the most.
    apart: bool = (
        False  #: Whether its devices are hardware of their own, so that what runs on one can be timed beside the others.
    )
    #: The ways between so many devices, where they are known and not measured.
    links: Callable[[int], Sequence[Link]] | None = None
    #: What runs take on its devices, where these are simulated, as notes.
    played: Callable[[DistributedProgram, Backend], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        if not self.name.replace("-", "_").isidentifier():
            raise ValueError(f"transport name {self.name!r} is no identifier")

    def joins(self, sites: Sequence[Site]) -> str | None:
        """Why not all of ``sites`` reach each other, or None."""
        pairs = [(a, b) for i, a in enumerate(sites) for b in sites[i + 1 :]]
        return next((why for a, b in pairs if (why := self.connects(a, b)) is not None), None)
