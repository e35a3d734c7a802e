"""TaskFunction: the OpenCL C text of one task, for any kernel family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rammer.codegen import Argument, KernelFamily
from rammer.ir.device import VDevice


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """A function ``void entry(global T0 *p0, ..., scratch, int task)`` with ``scratch`` in bytes; ``types`` are T0 ....

    ``helpers`` is the text that it needs besides the dialect's preamble, once per program. ``inner`` is the function that it
    calls. If ``stops``, it skips work past the dynamic lengths."""

    entry: str
    text: str
    arguments: tuple[Argument, ...]
    types: tuple[str, ...]
    scratch: int
    helpers: str = ""
    inner: TaskFunction | None = None
    stops: bool = False


#: A kernel family of this device. Devices are described as VDevice.
Family: TypeAlias = KernelFamily[VDevice, TaskFunction, None]
