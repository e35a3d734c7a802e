"""What a device may record of a run: when and where each task ran. Plugins find the names in ``rammer.device.manifest``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rammer.ir.program import RProgram

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one unit of the device (a vEU in a predicted schedule, an SM of a GPU in a measured one); ``start``
    and ``end`` in seconds from the start of the program."""

    veu: int
    operator: str
    index: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run: when its tasks ran, and the ``program`` whose tasks they are. That is the one that was to run, or what the device
    made of it: with other tiles, or placed anew."""

    program: RProgram
    spans: Sequence[Span]


@runtime_checkable
class Tracer(Protocol):
    """A backend that can also say when and where each task ran."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """The tasks of one run, by the device's own clock; a task that is several groups of threads has several spans.

        The kernels are built once more with what records times, so that ordinary ones carry nothing of it.
        """
        ...
