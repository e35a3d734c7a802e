"""TaskKernel: the CUDA text of one operator's kernel and how to launch it, whichever family wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rammer.codegen.task import Argument, Unsuited
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator


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


def first_possible(ranked: Sequence[tuple[float, ROperator]], make: Callable[[ROperator, Binding], TaskKernel],
                   binding: Binding, count: int) -> Iterator[tuple[float, ROperator]]:  # fmt: skip
    """The first ``count`` of ``ranked`` (predicted seconds, tiled operator) that ``make`` can write as a kernel."""
    for seconds, tiled in ranked:
        if count <= 0:
            return
        try:
            make(tiled, binding)
        except Unsuited:
            continue
        count -= 1
        yield seconds, tiled
