"""TaskKernel: the CUDA text of one operator's kernel and how to launch it, whichever family wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.codegen.task import Argument


@dataclass(frozen=True, slots=True)
class TaskKernel:
    """One operator's kernel: entry point, text, pointer arguments and launch shape.

    ``threads`` a block, ``shared`` bytes in all of which ``dynamic`` are asked for at launch, ``blocks`` a task: a
    task whose sum is split runs as one thread-block cluster of so many.
    """

    entry: str
    text: str
    arguments: tuple[Argument, ...]
    threads: int
    shared: int
    dynamic: int = 0
    blocks: int = 1
