"""Machine code of a program in a compiled file: its launches, kernels and cubins. Only graphs of launches are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.device.driver_calls import CALLS, Argument, DriverCalls, address, int32, int64
from rammer.device.manifest import Array, MachineCode
from rammer.device.shipped_kernels import ShippedPointer, read_number, record_kernels, restore_kernels
from rammer.ir.launches import Launch, first_consecutive
from rammer.ir.program import RProgram
from rammer.ir.types import itemsize

from rammer_cuda.executor import PlannedLaunches


@dataclass(frozen=True, slots=True)
class ShippedLaunch:
    """A kernel in the machine code (``executor.LaunchedKernel``)."""

    entry: str
    arguments: tuple[ShippedPointer, ...]
    threads: int
    blocks: int
    dynamic: int


def machine_code(program: RProgram, made: PlannedLaunches, constants: Mapping[str, Array], target: str) -> MachineCode:
    """Return the machine code of a program's launches."""
    record, arrays = record_kernels(made.kernels, ("threads", "blocks", "dynamic"), constants)
    record["plan"] = [[x.operator, _encode_tasks(x.tasks), list(x.after)] for x in made.plan]
    cubins = {_cubin_name(entry): np.frombuffer(code, np.uint8) for entry, code in made.cubins.items()}
    calls = DriverCalls(program)
    record[CALLS] = _record_calls(calls, made, constants, record["users"], arrays)
    return MachineCode(target, record, {**arrays, **calls.arrays, **cubins})


def _cubin_name(entry: str) -> str:
    return f"cubin {entry}"


def _record_calls(
    calls: DriverCalls,
    made: PlannedLaunches,
    constants: Mapping[str, Array],
    users: Mapping[str, Any],
    packed: Mapping[str, Array],
) -> dict[str, Any]:
    """Return the record of the launches, in order."""
    program = calls.program
    source = {program.storage[n].buffer: n for n in constants if n in program.storage}
    arena, places = calls.allocate(program.arena_bytes), dict[str, tuple[int, int]]()
    for b in program.buffers:
        if b.kind == "arena":
            places[b.name] = arena, b.offset
        elif b.name in source:
            places[b.name] = calls.allocate(b.nbytes, [(0, "constant", source[b.name])]), 0
        else:
            places[b.name] = calls.allocate(b.nbytes), 0
    numbers = {name: calls.allocate(values.nbytes, [(0, "array", name)]) for name, values in packed.items()}
    for x in made.plan:
        kernel, values = made.kernels[x.operator], list[Argument]()
        for tensor, number in users[x.operator][1]:
            storage = program.storage[tensor]
            buffer, start = places[storage.buffer]
            inside = start + storage.offset * itemsize(program.types[tensor].dtype)
            values.append(address(buffer, inside) if number < 0 else address(numbers[str(number)], 0))
        first = first_consecutive(x.tasks)
        order = int64(0) if first is not None else address(calls.allocate_table(np.array(x.tasks, np.int32)), 0)
        groups, entry = len(x.tasks) * kernel.blocks, (_cubin_name(kernel.entry), kernel.entry)
        calls.launch(entry, groups, kernel.threads, [*values, order, int32(first or 0)], kernel.dynamic)
    return calls.record(places)


def shipped_launches(code: MachineCode, program: RProgram) -> PlannedLaunches:
    """Return the launches in ``code``. Raises ValueError or a similar error if they do not fit the program."""
    kernels = {name: ShippedLaunch(k.entry, k.arguments, *k.sizes) for name, k in restore_kernels(code, program, 3).items()}
    plan = list[Launch]()
    for place, (name, tasks, after) in enumerate(code.record["plan"]):
        before = tuple(map(read_number, after))
        if name not in kernels or any(n >= place for n in before):
            raise ValueError(f"launch {place} has no kernel or waits for a later launch")
        plan.append(Launch(name, _decode_tasks(tasks, program.task_count), before))
    cubins = {k.entry: code.arrays[_cubin_name(k.entry)].tobytes() for k in kernels.values()}
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
