"""The table executor: a few groups walk a table of tasks, in one launch per wave or in one launch per program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rammer.device.driver_calls import EPOCH, LAUNCH, LOOP, DriverCalls, buffer_argument, int32
from rammer.device.manifest import Array
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram, Task, waves

from rammer_rocm.constants import PART, DeviceConstants, round_up
from rammer_rocm.memory import shared_memory, system_wide
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.placement import Placement, byte_distance, find_usable_arrays, make_address_table
from rammer_rocm.planned_program import BINARY
from rammer_rocm.program_kernels import Function, ProgramKernels
from rammer_rocm.repeat import move_table
from rammer_rocm.resident import OpenClProgram
from rammer_rocm.source import LINE_WORDS, RUN_WORDS, WalkShape, program_text

if TYPE_CHECKING:
    from rammer_rocm.kernels.task import TaskFunction


class TableProgram(OpenClProgram):
    """A program whose tasks are a table on the device. With ``single``, one launch runs all waves."""

    def __init__(
        self,
        kernels: ProgramKernels,
        shared: DeviceConstants,
        program: RProgram,
        constants: Mapping[str, Array],
        single: bool,
    ) -> None:
        context, device = shared.queue.context, kernels.vdevice
        # A single launch is complete when a run returns, so programs need no common order, and may run side by side.
        queue = import_opencl().CommandQueue(context) if single else shared.queue
        super().__init__(queue, kernels, program, constants)
        self.single, functions = single, self.functions
        distinct = {f.entry: f for f in functions.values()}
        numbers = {name: i for i, name in enumerate(distinct)}
        scratch = round_up(max((f.scratch for f in distinct.values()), default=0), PART)
        self.epoch, self.moved, self.launch = 0, 0, 0
        # A single launch uses at most one group per compute unit, regardless of the number of program rows.
        self.groups = min(program.veus, device.veus) if single else program.veus
        self.check_memory(context.devices[0], self.groups * scratch)
        with shared.filling():  # while the runtime compiles or loads its cached binary
            self.constants = self.placed(constants, shared)
            self.pointers = [a for f in functions.values() for a in f.arguments]
            arguments, row_of = self._argument_table(functions)
            self.table = make_table(program, {o: numbers[f.entry] for o, f in functions.items()}, row_of)
            #: True if one launch runs all iterations.
            self.turning = single and program.repeat is not None
            shape = WalkShape(program.veus, scratch, len(self.constants.buffers), self.traced, self.turning)
            written = cast("list[TaskFunction]", list(distinct.values()))
            self.binary = kernels.build(lambda dialect: program_text(written, self.table.sets, shape, dialect, single))
        self.upload(context, arguments, constants, self.groups * scratch)
        shared.queue.finish()  # the constants
        self.own = Placement(self.memory.buffers, self.tables[0])
        self._prepare_kernels(context)

    @property
    def kernels(self) -> int:
        """Number of launches of one run (with ``single``: if no launch ends early)."""
        return 1 if self.single else self.program.turns * len(self.table.kernel_of_wave)

    def _argument_table(self, functions: Mapping[str, Function]) -> tuple[Array, dict[str, int]]:
        """Return the argument table (buffer number and byte offset per pointer), and each operator's start in it."""
        addresses, row_of = list[tuple[int, int]](), dict[str, int]()
        for name, function in functions.items():
            row_of[name] = 2 * len(addresses)
            addresses += [self.argument_address(a, self.memory.buffers) for a in function.arguments]
        return np.array(addresses or [(0, 0)], np.int64), row_of

    def upload(self, context: Any, arguments: Array, constants: Mapping[str, Array], scratch: int) -> None:
        """Upload memory, constants that are outputs, and the tables to the device."""
        cl = import_opencl()
        flags = cl.mem_flags
        self.allocate(context, self.single)
        try:
            self.spill = cl.Buffer(context, flags.READ_WRITE, max(scratch, 64))
            tables = (arguments, self.table.starts, self.table.runs, self.table.filled)
            self.tables = [cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=t) for t in tables]
            self.upload_constants(constants)
        except cl.MemoryError as problem:
            raise DeviceFailure(f"out of device memory: {scratch} bytes of scratch wanted ({problem})") from problem

    def recorders(self, context: Any) -> Sequence[Any]:
        """Return the additional kernel argument buffers of a traced program."""
        return ()

    def _prepare_kernels(self, context: Any) -> None:
        """Create kernels with all arguments set, so that a run only enqueues them."""
        cl = import_opencl()
        arguments, starts, runs, filled = self.tables
        common = (self.buffer, arguments, starts, runs, self.spill, *self.constants.buffers, *self.recorders(context))
        veus, count = self.program.veus, len(self.table.kernel_of_wave)
        self.launches: list[Any] = []
        self.counters: Array | None = None
        if self.single:
            words = (count + self.turning) * (LINE_WORDS + veus) + 1
            self.sync, self.counters = shared_memory(context, words * 4, True, True)
            self._reset_counters()
            self.most_launches = (int(self.table.filled.sum()) + 1) * (self.program.turns + 1)
            kernel = cl.Kernel(self.binary, "program")
            # With declared types, setting all ten arguments is ten times faster than setting one argument without.
            turning = [None, *[np.int32] * 3] if self.turning else []
            kernel.set_arg_types([*[None] * (len(common) + 2), *[np.int32] * 3, *turning])
            self.fixed: tuple[Any, ...] = (*common[2:], filled, self.sync)  # the table belongs to the call
            self.launches.append(kernel)
            return
        for wave, number in enumerate(self.table.kernel_of_wave):
            kernel = cl.Kernel(self.binary, f"wave_{number}")
            kernel.set_args(*common, np.int32(wave * veus))
            self.launches.append(kernel)

    def _reset_counters(self) -> None:
        """Reset the counters to zero: at the start, after an aborted run, and before the epochs overflow."""
        cl = import_opencl()
        cl.enqueue_fill_buffer(self.queue, self.sync, np.int32(0), 0, self.sync.size)
        self.queue.finish()
        self.epoch = self.moved = self.launch = 0

    def record_calls(self, calls: DriverCalls, memory: int, constants: Sequence[int]) -> dict[str, Any]:
        """Record the launches of a run: one for each wave, or one that is repeated until the last wave has finished."""
        table, count = self.table, len(self.table.kernel_of_wave)
        arguments = np.array([self.argument_address(a, self.memory.buffers) for a in self.pointers] or [(0, 0)], np.int64)
        tables = [calls.allocate_table(t) for t in (arguments, table.starts, table.runs)]
        common = [buffer_argument(n) for n in (memory, *tables, calls.allocate(self.spill.size), *constants)]
        if not self.single:
            for wave, number in enumerate(table.kernel_of_wave):
                values = [*common, int32(wave * self.program.veus)]
                calls.launch((BINARY, f"wave_{number}"), self.groups, 1, values)
            return {}
        filled, sync = calls.allocate_table(table.filled), calls.allocate(self.sync.size)
        if not count:
            return {}
        values, last = [*common, buffer_argument(filled), buffer_argument(sync), EPOCH, LAUNCH, int32(count)], count - 1
        done = int(table.filled[last])
        if self.turning:  # the first counter is that of moves
            values += [buffer_argument(calls.allocate_table(move_table(self.program, self.memory.buffers))), *LOOP]
            last, done = 0, int(table.filled.max())
        calls.launch((BINARY, "program"), self.groups, 1, values)
        return {"until": [sync, last * LINE_WORDS * 4, done, self.most_launches]}

    def placement(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Placement:
        """Return the placement for a call with these arrays by port. Kernels use host arrays in place where possible, if the host
        shares the program's memory."""
        found = (
            find_usable_arrays(self.program, inputs, outputs) if self.host is not None and system_wide(self.queue.device) else {}
        )
        if self.host is None or not found:
            return self.own
        buffers = {**self.memory.buffers, **{name: byte_distance(array, self.host) for name, array in found.items()}}
        return Placement(
            buffers, make_address_table(self.queue.context, [self.argument_address(a, buffers) for a in self.pointers]), found
        )

    def queue_run(self, at: Placement | None = None) -> None:
        """Queue one run on the current inputs; with ``single`` the run is complete on return."""
        if self.turning:
            self._run_turns(at or self.own)
        else:
            super().queue_run(at)

    def queue_turn(self, at: Placement) -> None:
        """Queue one iteration of the table."""
        if not self.single:
            for kernel in self.launches:
                self._enqueue_kernel(kernel)
            return
        count = len(self.table.kernel_of_wave)
        if not count:
            return
        self.epoch += 1
        self._run_single(at.arguments, self.epoch, (), count - 1, int(self.table.filled[-1]) * self.epoch)

    def _run_turns(self, at: Placement) -> None:
        """Run all iterations of the table, including the moves between them, in one launch."""
        turns = self.program.turns_at(lambda name: self.read_length(name, at))
        first, moved, moves = self.epoch + 1, self.moved + 1, at.moves(self.program, self.queue.context)
        self.epoch, self.moved = self.epoch + turns, self.moved + turns + 1
        self._run_single(at.arguments, first, (moves, moved, turns, self.program.turns - turns), 0, self.moved)

    def recover(self) -> None:
        """Reset the counters after an aborted run."""
        if self.single:
            self._reset_counters()

    def _enqueue_kernel(self, kernel: Any) -> None:
        import_opencl().enqueue_nd_range_kernel(self.queue, kernel, (self.groups,), (1,))

    def _run_single(self, arguments: Any, epoch: int, turning: tuple[Any, ...], last: int, target: int) -> None:
        """Launch until the counter of the ``last`` wave reaches ``target``: once, or again after each early exit. Every launch
        finishes at least one row."""
        kernel, count = self.launches[0], len(self.table.kernel_of_wave)
        for _ in range(self.most_launches):
            self.launch += 1
            kernel.set_args(self.buffer, arguments, *self.fixed, epoch, self.launch, count, *turning)
            self._enqueue_kernel(kernel)
            if self._finished_rows(last) == target:
                if max(self.epoch * self.program.veus, self.moved, self.launch) > 2**30:
                    self._reset_counters()
                return
        self._reset_counters()
        raise DeviceFailure(f"program {self.program.name} makes no progress", hint="try --option executor=waves")

    def _finished_rows(self, wave: int) -> int:
        """Return the counter of a wave after all queued work has finished."""
        place = wave * LINE_WORDS
        if self.counters is not None:
            self.queue.finish()
            return int(self.counters.view(np.int32)[place])
        done = np.zeros(1, np.int32)
        import_opencl().enqueue_copy(self.queue, done, self.sync, src_offset=place * 4, is_blocking=True)
        return int(done[0])

    def poison(self) -> bool:
        """Fill arena, inputs, outputs and scratch with NaN (all bits set) to expose values that a run does not write."""
        import_opencl().enqueue_fill_buffer(self.queue, self.spill, np.uint8(255), 0, self.spill.size)
        return super().poison()

    def buffers(self) -> Sequence[Any]:
        """Return all device memory that the program owns."""
        return (*super().buffers(), self.spill, *self.tables, *([self.sync] if self.single else []))

    def close(self) -> None:
        """Free the device memory when all queued work has finished."""
        super().close()
        self.launches.clear()
        self.fixed, self.counters = (), None


@dataclass(frozen=True)
class WaveTable:
    """The rows as data: ``starts[wave * veus + veu]`` indexes ``runs``, and ``filled`` counts a wave's non-empty rows."""

    starts: Array
    runs: Array
    filled: Array
    sets: tuple[tuple[int, ...], ...]
    kernel_of_wave: tuple[int, ...]


def make_table(program: RProgram, function_of: Mapping[str, int], row_of: Mapping[str, int]) -> WaveTable:
    """Fold every wave's rows into runs of equally spaced tasks of one operator."""
    starts, runs, filled = [0], list[tuple[int, ...]](), list[int]()
    members: dict[tuple[int, ...], int] = {}
    kernel_of_wave = []
    for wave in waves(program):
        rows: list[list[Task]] = [[] for _ in range(program.veus)]
        for placed in wave:
            rows[placed.veu].append(placed.task)
        for row in rows:
            runs += _runs(row, function_of, row_of)
            starts.append(len(runs))
        filled.append(sum(1 for row in rows if row))
        used = tuple(sorted({function_of[t.task.operator] for t in wave}))
        kernel_of_wave.append(members.setdefault(used, len(members)))
    flat = np.array(runs or [(0,) * RUN_WORDS], dtype=np.int32)
    return WaveTable(np.array(starts, np.int32), flat, np.array(filled or [0], np.int32), tuple(members), tuple(kernel_of_wave))


def _runs(row: Sequence[Task], function_of: Mapping[str, int], row_of: Mapping[str, int]) -> list[tuple[int, ...]]:
    result = list[tuple[int, ...]]()
    for operator, group in groupby(row, key=lambda t: t.operator):
        indices = [t.index for t in group]
        while indices:
            step = indices[1] - indices[0] if len(indices) > 1 else 1
            count = 1
            while count < len(indices) and indices[count] == indices[0] + count * step:
                count += 1
            result.append((function_of[operator], row_of[operator], indices[0], count, step))
            del indices[:count]
    return result
