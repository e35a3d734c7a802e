"""TaskFunction: the OpenCL C text of one task, whichever kernel family wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.codegen.task import Argument


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """``void name(global T0 *p0, ..., scratch, int task)``; ``scratch`` is in bytes, ``types`` are T0 ...

    Equal operators on different tensors share one text, and so one ``name``, a hash of the text.
    """

    name: str
    text: str
    arguments: tuple[Argument, ...]
    types: tuple[str, ...]
    scratch: int
