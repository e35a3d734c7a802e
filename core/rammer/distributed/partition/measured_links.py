"""What was measured of devices before a cut is chosen: the links between them, and what parts take on each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rammer.device.manifest import Backend
from rammer.distributed.distributed_program import DevicePart, Link

__all__ = ["Clock", "MeasuredDevices", "seconds_of"]

#: Seconds of every step of every device's part, each device by itself; None where a device is not measured.
Clock: TypeAlias = Callable[[Sequence[DevicePart]], Sequence[Sequence[float]] | None]


@dataclass(frozen=True)
class MeasuredDevices:
    """``links`` that are not here are assumed; without a ``clock`` parts take what is predicted."""

    links: Sequence[Link] = ()
    clock: Clock | None = None


def seconds_of(part: DevicePart, backend: Backend) -> list[float]:
    """Of each step as it runs alone on its device: the median of some runs on random inputs. What the host computes takes what is
    predicted. DeviceFailure where a program does not load."""
    return [
        s.program.predicted if s.host is not None else backend.profiler.program_time(s.program, s.constants) for s in part.steps
    ]
