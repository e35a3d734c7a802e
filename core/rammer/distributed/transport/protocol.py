"""Transport: the frozen manifest of a transport between devices, and the base classes of its objects.

Importing a manifest imports no network library; ``open`` does. A *fabric* connects the devices of one run, some of them in this
process. An *endpoint* is one device's side of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Protocol, TypeAlias

import numpy as np

from rammer.device.manifest import Array, Backend
from rammer.distributed.distributed_program import DistributedProgram, Link
from rammer.distributed.joining import TIMEOUT
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.event_log import Log
from rammer.distributed.transport.memory_layout import Exposed
from rammer.errors import DeviceFailure

__all__ = ["TIMEOUT", "Deliver", "Endpoint", "Fabric", "Feed", "Party", "Reach", "Runs", "Site", "StepRunner", "Transport"]

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


class StepRunner(ABC):
    """The executor of one device's steps in runs over several devices. Called from one thread."""

    log: Log | None = None  #: The log of the current runs. The default runner ignores it: ``go`` is logged as a whole.
    logs_steps: bool = False  #: True if the runner logs its steps.

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """The work of the device besides running its steps. The default is none."""
        return ()

    @abstractmethod
    def go(self, runs: Runs) -> None:
        """Execute all ``runs``. Raises the errors of steps and transfers."""

    @abstractmethod
    def close(self) -> None:
        """Free the loaded programs. Closing again does nothing."""


class Endpoint(ABC):
    """One device's side of a fabric. Called from one thread. Waits raise DeviceFailure after the party's timeout, or once another
    device has ended; the error names the transfer and the devices."""

    counters: Counters
    log: Log | None = None  #: The log of the current runs; an endpoint may ignore it.

    @abstractmethod
    def slot(self, name: str, run: int) -> Array:
        """Return the memory in which transfer ``name`` of run number ``run`` arrives; it repeats every ``depth`` runs."""

    @abstractmethod
    def arrived(self, name: str, run: int) -> bool:
        """Return True if the tensor has arrived completely."""

    @abstractmethod
    def wait(self, name: str, run: int) -> None:
        """Wait until the tensor has arrived completely."""

    @abstractmethod
    def free(self, name: str, run: int) -> bool:
        """Return True if the slot that ``put`` would write is free."""

    @abstractmethod
    def put(self, name: str, run: int, values: Array) -> None:
        """Write a tensor to its reader when the slot is free, followed by the flag. ``values`` may change afterwards."""

    @abstractmethod
    def release(self, name: str, run: int) -> None:
        """Return the slot of an arrived tensor to its sender."""

    @abstractmethod
    def fail(self, why: str) -> None:
        """Report to all other devices that this device ends, and why; never raises, never waits long."""

    @property
    def queues_steps(self) -> bool:
        """True if the endpoint overrides ``part``."""
        return type(self).part is not Endpoint.part

    def part(self, spread: DistributedProgram, device: int, backend: Backend) -> StepRunner:
        """Return an executor of a device's steps that queues waits, steps and writes on the device. The default raises
        DeviceFailure, and the host runs the steps."""
        raise DeviceFailure("the transport queues no steps on the device")

    def echo(self, out: str, into: str, runs: range, begins: bool) -> float:
        """Exchange a tensor per run by transfers ``out`` and ``into``, and return the seconds of a round trip.

        Round trips are sequential and release their slots. The device that ``begins`` sends first, the other after it has
        received. ``runs`` are those of both transfers. The default is the median from the host's memory, by the host's clock."""
        times, values = list[float](), np.zeros_like(self.slot(into, 0)) if begins else None
        for run in runs:
            begin = time.perf_counter()
            if values is not None:
                self.put(out, run, values)
            self.wait(into, run)
            if values is None:
                self.put(out, run, self.slot(into, run))
            times.append(time.perf_counter() - begin)
            self.release(into, run)
        return median(times)


class Reach(ABC):
    """The operations of an engine that ``MemoryEndpoint`` uses."""

    memory: Array  #: The memory that this device exposes, as bytes.

    @abstractmethod
    def write(self, target: int, place: int, values: Array, last: bool = False) -> None:
        """Write bytes into another device's memory. On return the bytes have arrived, so later writes become visible later, and
        ``values`` may change. For the ``last`` of several writes, a flag, only the latter is guaranteed."""

    @abstractmethod
    def until(self, ready: Callable[[], bool], ended: Callable[[], bool], seconds: float) -> None:
        """Wait until ``ready``, which other devices' writes make true, or until ``seconds`` pass or another device has ``ended``.
        ``ended`` is polled less often. Incoming writes are processed meanwhile."""

    def watched(self, doing: str, last: str = "") -> None:  # noqa: B027  (optional)
        """Set the description of the current wait for messages of an engine that ends the process; "" for none. ``last`` is the
        reason why this device ends: the remaining time is then short, and it is the message. The default does nothing."""

    def read(self, source: int, place: int, into: Array) -> None:
        """Read bytes of another device's memory. On return they are in ``into``. A transport with ``Transport.reads`` needs it:
        tensors of dynamic shape then cross at their current shape. The default raises ValueError."""
        raise ValueError("tensors of dynamic shape need an engine with one-sided reads")

    def kept(self) -> None:
        """Make this device's writes to its memory visible to readers that are notified later. Needed with ``read``. The default
        raises ValueError."""
        raise ValueError("tensors of dynamic shape need an engine with one-sided reads")


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
