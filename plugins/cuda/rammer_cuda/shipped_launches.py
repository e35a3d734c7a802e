"""Machine code of a program in a compiled file: its launches, kernels and cubins. Only graphs of launches are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.device.manifest import Array, MachineCode
from rammer.device.shipped_kernels import ShippedPointer, read_number, record_kernels, restore_kernels
from rammer.ir.launches import Launch, first_consecutive
from rammer.ir.program import RProgram

from rammer_cuda.executor import PlannedLaunches


@dataclass(frozen=True, slots=True)
class ShippedLaunch:
    """A kernel in the machine code (``executor.LaunchedKernel``)."""

    entry: str
    arguments: tuple[ShippedPointer, ...]
    threads: int
    blocks: int
    dynamic: int


def machine_code(made: PlannedLaunches, constants: Mapping[str, Array], target: str) -> MachineCode:
    """Return the machine code of a program's launches."""
    record, arrays = record_kernels(made.kernels, ("threads", "blocks", "dynamic"), constants)
    record["plan"] = [[x.operator, _encode_tasks(x.tasks), list(x.after)] for x in made.plan]
    cubins = {f"cubin {entry}": np.frombuffer(code, np.uint8) for entry, code in made.cubins.items()}
    return MachineCode(target, record, {**arrays, **cubins})


def shipped_launches(code: MachineCode, program: RProgram) -> PlannedLaunches:
    """Return the launches in ``code``. Raises ValueError or a similar error if they do not fit the program."""
    kernels = {name: ShippedLaunch(k.entry, k.arguments, *k.sizes) for name, k in restore_kernels(code, program, 3).items()}
    plan = list[Launch]()
    for place, (name, tasks, after) in enumerate(code.record["plan"]):
        before = tuple(map(read_number, after))
        if name not in kernels or any(n >= place for n in before):
            raise ValueError(f"launch {place} has no kernel or waits for a later launch")
        plan.append(Launch(name, _decode_tasks(tasks, program.task_count), before))
    cubins = {k.entry: code.arrays[f"cubin {k.entry}"].tobytes() for k in kernels.values()}
    return PlannedLaunches(plan, kernels, cubins)


def _encode_tasks(tasks: tuple[int, ...]) -> list[Any]:
    """Return [first, number] for consecutive tasks, else the tasks and None."""
    return [tasks[0], len(tasks)] if first_consecutive(tasks) is not None else [*tasks, None]


def _decode_tasks(listed: list[Any], most: int) -> tuple[int, ...]:
    if listed[-1] is None:
        return tuple(map(read_number, listed[:-1]))
    first, count = map(read_number, listed)
    if not 0 < count <= most:
        raise ValueError(f"a launch has {count} tasks")
    return tuple(range(first, first + count))
