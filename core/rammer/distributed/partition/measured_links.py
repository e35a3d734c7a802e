"""Measurements of devices before a partition is chosen: the links between them, and the times of parts on each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rammer.device.manifest import Backend
from rammer.distributed.distributed_program import DevicePart, Link

__all__ = ["Clock", "MeasuredDevices", "seconds_of"]

#: Measures the seconds of every step of every device's part, each device separately. None if a device is not measured.
Clock: TypeAlias = Callable[[Sequence[DevicePart]], Sequence[Sequence[float]] | None]


@dataclass(frozen=True)
class MeasuredDevices:
    """The measured ``links``; missing ones are assumed. Without a ``clock``, parts take their predicted times."""

    links: Sequence[Link] = ()
    clock: Clock | None = None


def seconds_of(part: DevicePart, backend: Backend) -> list[float]:
    """Return the seconds of each step alone on its device: the median of several runs on random inputs. Host operators take their
    predicted times. Raises DeviceFailure if a program does not load."""
    return [
        s.program.predicted if s.host is not None else backend.profiler.program_time(s.program, s.constants) for s in part.steps
    ]
