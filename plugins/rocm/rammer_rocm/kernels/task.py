"""TaskFunction: the OpenCL C text of one task, whichever kernel family wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rammer.codegen.kernel_family import KernelFamily
from rammer.codegen.task_parameters import Argument
from rammer.ir.device import VDevice


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """``void entry(global T0 *p0, ..., scratch, int task)``; ``scratch`` is in bytes, ``types`` are T0 ...; ``helpers`` is what
    the text needs besides the dialect's preamble, and a program has once.

    ``inner`` is what it calls. One that ``stops`` at the lengths leaves what lies beyond.
    """

    entry: str
    text: str
    arguments: tuple[Argument, ...]
    types: tuple[str, ...]
    scratch: int
    helpers: str = ""
    inner: TaskFunction | None = None
    stops: bool = False


#: A family of this device's kernels. Units are described as virtual devices.
Family: TypeAlias = KernelFamily[VDevice, TaskFunction, None]
