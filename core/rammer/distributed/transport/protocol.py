"""Transport: the frozen manifest of a transport between devices, and the protocols that it uses.

Importing a manifest imports no network library; ``open`` does. A *fabric* connects the devices of one run, some of them in this
process. An *endpoint* is one device's side of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rammer.device.manifest import Array, Backend
from rammer.distributed.distributed_program import DistributedProgram, Link
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.watchdog import TIMEOUT

__all__ = ["TIMEOUT", "Deliver", "Endpoint", "Fabric", "Feed", "Party", "Runs", "RunsParts", "Site", "TimesItself"]
__all__ += ["Transport"]

#: Callbacks of a run: one returns the model's inputs by name when the run starts, the other receives its outputs.
Feed: TypeAlias = Callable[[int], Mapping[str, Array]]
Deliver: TypeAlias = Callable[[int, dict[str, Array]], None]


@dataclass(frozen=True, slots=True)
class Site:
    """The location of a device's memory: device name, hardware, driving process, and whether several hosts take part."""

    device: str
    kind: str = "cpu"
    process: int = 0
    multi_host: bool = False


@dataclass(frozen=True, slots=True)
class Party:
    """The participants of a run: all devices in order, and the timeout of a wait (seconds)."""

    sites: tuple[Site, ...]
    timeout: float = TIMEOUT


@dataclass(frozen=True)
class Runs:
    """A numbered sequence of runs from ``first`` on. ``feed`` returns a run's inputs, ``deliver`` receives its outputs on device
    0."""

    first: int
    count: int
    feed: Feed
    deliver: Deliver


class Endpoint(Protocol):
    """One device's side of a fabric. Called from one thread. Waits raise DeviceFailure after the party's timeout, or once another
    device has ended; the error names the transfer and the devices."""

    counters: Counters

    def slot(self, name: str, run: int) -> Array:
        """Return the memory in which transfer ``name`` of run number ``run`` arrives; it repeats every ``depth`` runs."""
        ...

    def arrived(self, name: str, run: int) -> bool:
        """Return True if the tensor has arrived completely."""
        ...

    def wait(self, name: str, run: int) -> None:
        """Wait until the tensor has arrived completely."""
        ...

    def free(self, name: str, run: int) -> bool:
        """Return True if the slot that ``put`` would write is free."""
        ...

    def put(self, name: str, run: int, values: Array) -> None:
        """Write a tensor to its reader when the slot is free, followed by the flag. ``values`` may change afterwards."""
        ...

    def release(self, name: str, run: int) -> None:
        """Return the slot of an arrived tensor to its sender."""
        ...

    def fail(self, why: str) -> None:
        """Report to all other devices that this device ends, and why; never raises, never waits long."""
        ...


@runtime_checkable
class RunsParts(Protocol):
    """An endpoint that runs its device's part itself. Waits, steps and writes are queued on the device, without the host between
    the steps of a run."""

    def part(self, spread: DistributedProgram, device: int, backend: Backend) -> Any:
        """Return the executor in place of ``rammer.distributed.runtime.device_part.BoundPart``: with ``go``, ``notes`` and
        ``close``."""
        ...


@runtime_checkable
class TimesItself(Protocol):
    """An endpoint that measures its links itself: with its runs' writes and waits, from its memory."""

    def echo(self, out: str, into: str, runs: range, begins: bool) -> float:
        """Exchange a tensor per run by transfers ``out`` and ``into``, and return the seconds of a round trip.

        Round trips are sequential and release their slots. The device that ``begins`` sends first, the other after it has
        received. ``runs`` are those of both transfers."""
        ...


class Fabric(Protocol):
    """The connected devices of one run."""

    mine: tuple[int, ...]  #: Numbers of the devices that this process drives.

    def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
        """Exchange one text per device and return all in order of the devices. Raises DeviceFailure after ``seconds``."""
        ...

    def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
        """Allocate the memory of all devices, exchange its addresses, and return the endpoints of this process's devices."""
        ...

    def close(self, failed: bool = False) -> None:
        """Free all memory, in all processes together unless one has ``failed``. Closing again does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Transport:
    """The manifest of a transport.

    ``probe`` raises MissingDependency if it cannot work here. ``connects`` returns why two sites cannot reach each other, or None
    if they can. Among usable transports the highest ``rank`` wins, between hosts the highest ``far``."""

    name: str
    summary: str
    probe: Callable[[], None]
    connects: Callable[[Site, Site], str | None]
    open: Callable[[Party], Fabric]
    rank: int = 0
    far: int = 0
    reads: bool = False  #: True if dynamic-shape tensors cross at their current shape, else at the maximum.
    separate_hardware: bool = False  #: True if each device is separate hardware, so that all can be timed concurrently.
    #: The links between a number of devices, if fixed instead of measured.
    links: Callable[[int], Sequence[Link]] | None = None
    #: Predicted times of runs on simulated devices, as notes.
    played: Callable[[DistributedProgram, Backend], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        if not self.name.replace("-", "_").isidentifier():
            raise ValueError(f"transport name {self.name!r} is not an identifier")

    def joins(self, sites: Sequence[Site]) -> str | None:
        """Return the reason why two of ``sites`` cannot reach each other, or None if all can."""
        pairs = [(a, b) for i, a in enumerate(sites) for b in sites[i + 1 :]]
        return next((why for a, b in pairs if (why := self.connects(a, b)) is not None), None)
