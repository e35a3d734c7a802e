"""The persistent executor of GPUs: launches whose groups run several levels of a program.

A level has the tasks of launches that do not depend on each other (``planned_program.launch_levels``). Group ``g`` of ``n`` runs
tasks ``g``, ``g + n`` and so on of each level, then waits until all groups have finished the level. All groups must therefore run
at the same time. OpenCL does not tell how many do, so a trial finds the number when a program is loaded: all groups wait for each
other once. A group that waits too long ends the run for all.

One launch runs all levels, or in form ``mixed`` only those that groups for all units finish in a few rounds. A kernel with all
functions has the registers and the local memory of the largest one, so larger levels are faster alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from rammer.device.driver_calls import DriverCalls
from rammer.device.manifest import Array
from rammer.errors import DeviceFailure
from rammer.ir.launches import Launch
from rammer.ir.program import RProgram

from rammer_rocm.constants import DeviceConstants
from rammer_rocm.launch_executor import LaunchProgram, Queueable
from rammer_rocm.opencl_runtime import QueuedKernel, import_opencl, kind_of
from rammer_rocm.planned_program import count_groups, join_level
from rammer_rocm.program_kernels import Pointer, ProgramKernels
from rammer_rocm.source import CPU_POLLS, GPU_POLLS, UNIT_WORDS, LevelShape

if TYPE_CHECKING:
    from rammer_rocm.kernels.task import TaskFunction

#: The counter is reset before it exceeds this.
LARGEST: Final = 1 << 30
#: Groups of a unit that kernels are chosen for, and those that trials on a GPU try.
RESIDENT: Final = 2
TRIED: Final = (3, 2, 1)
#: Rounds of a small level: a launch between two ranges takes 20 to 40 us on an H200, and a round 1 to 5 us.
MOST_ROUNDS: Final = 8
#: Maximum ports in the caller's arrays: each adds a comparison to every pointer of a row.
MOST_PORTS: Final = 8
#: Bytes of local memory for a unit's row.
ROW: Final = 1024
#: Byte of ``sync`` that is not zero after a group gave up.
GIVEN_UP: Final = 128


class PersistentProgram(LaunchProgram):
    """A program whose levels one launch of ``groups`` groups runs, or with ``mixed`` a launch for each range of small levels."""

    def __init__(
        self,
        kernels: ProgramKernels,
        shared: DeviceConstants,
        program: RProgram,
        constants: Mapping[str, Array],
        mixed: bool = False,
    ) -> None:
        self.mixed, self.items, self.passed = mixed, kernels.vdevice.threads, 0
        super().__init__(kernels, shared, program, constants)

    def make_steps(self, veus: int) -> list[list[Launch] | range]:
        """Return the steps of a run: one range of all levels, or ranges of small levels between launches."""
        if not self.mixed:
            return [range(len(self.levels))] if self.levels else []
        steps = list[list[Launch] | range]()
        for small, numbers in groupby(range(len(self.levels)), lambda i: self._is_small(self.levels[i], veus)):
            found = list(numbers)
            if small and len(found) > 1:
                steps.append(range(found[0], found[-1] + 1))
            else:
                steps += [joined for i in found for joined in join_level(self.levels[i], self.functions, veus)]
        return steps

    def _is_small(self, level: Sequence[Launch], veus: int) -> bool:
        """Return True if ``veus`` groups run a level in a few rounds, with their rows in local memory."""
        inside, functions = count_groups(level, self.functions) <= MOST_ROUNDS * veus, [self.functions[x.operator] for x in level]
        room = self.device.layer("veu").capacity - ROW
        fits = all(f.scratch <= room and 8 * (UNIT_WORDS + 2 * len(f.arguments)) <= ROW for f in functions)
        return inside and fits

    def level_shape(self) -> LevelShape | None:
        """Return the shape of the kernel that runs the levels of ranges."""
        self.inside = [i for step in self.steps if isinstance(step, range) for i in step]
        used = {f.entry: f for i in self.inside for x in self.levels[i] for f in [self.functions[x.operator]]}
        self.entries = list(used)
        self.pointers = max((len(f.arguments) for f in used.values()), default=0)
        polls = GPU_POLLS if kind_of(self.queue.device) == "gpu" else CPU_POLLS
        written = cast("list[TaskFunction]", list(used.values()))
        shape = LevelShape(written, len(self.constants.buffers), len(self.ports), self.pointers, self.items, polls)
        return shape if self.inside else None

    @cached_property
    def ports(self) -> list[str]:
        """The buffers of ports that levels use in the caller's arrays."""
        named = (self.program.storage[p.tensor].buffer for p in (*self.program.inputs, *self.program.outputs))
        return list(dict.fromkeys(named))[:MOST_PORTS]

    def buffers_of_ranges(self) -> set[str]:
        """Return the buffers that are always in the program's memory: those of ranges of levels, but for ``ports``."""
        return super().buffers_of_ranges() - {*self.ports}

    def prepare_levels(self, context: Any) -> None:
        """Upload the table of the levels, and find the number of groups."""
        cl, flags = import_opencl(), import_opencl().mem_flags
        units, starts = self._make_table()
        self.tables = [cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=t) for t in (units, starts)]
        self.sync = cl.Buffer(context, flags.READ_WRITE, 256)
        self.pinned = cl.Buffer(context, flags.READ_WRITE | flags.ALLOC_HOST_PTR, 64)
        self.word, _ = cl.enqueue_map_buffer(self.queue, self.pinned, cl.map_flags.READ, 0, (1,), np.int32)
        self.recover()
        self.groups = self.find_groups() if self.inside else 0

    def _make_table(self) -> tuple[Array, Array]:
        """Return the rows of all units of the levels inside ranges, and the first unit of each of these levels.

        A row has the function, the task, the slot, the rank, the places of its partial sums and counters, then buffer and byte
        offset of every pointer. A row has whole 64-bit words."""
        rows, starts = list[list[int]](), [0]
        numbers = {entry: i for i, entry in enumerate(self.entries)}
        for level in (self.levels[i] for i in self.inside):
            for x, (floats, counters) in zip(level, self.sharing_places(level), strict=False):
                f = self.functions[x.operator]
                pointers = [n for a in f.arguments for n in self._row_address(a)]
                pointers += [0] * (2 * self.pointers - len(pointers))
                for i, task in enumerate(x.tasks):
                    for rank in range(f.blocks):
                        rows.append([numbers[f.entry], task, i, rank, floats, counters, *pointers])
            starts.append(len(rows))
        width = UNIT_WORDS + 2 * self.pointers
        return np.array(rows or [[0] * width], np.int64), np.array(starts, np.int32)

    def _row_address(self, argument: Pointer) -> tuple[int, int]:
        """Return the number of a pointer's buffer, and the byte in it: the program's memory, constants, then ports."""
        buffer = self.program.storage[argument.tensor].buffer if argument.packing is None else ""
        if buffer not in self.ports:
            return self.argument_address(argument, self.memory.buffers)
        return len(self.constants.buffers) + 1 + self.ports.index(buffer), self.argument_address(argument, {buffer: 0})[1]

    def unit_recorders(self) -> Sequence[Any]:
        """Return the additional arguments of the traced kernel that runs levels."""
        return ()

    def _level_kernel(self, base: int, levels: int, groups: int, arrays: Mapping[str, Any]) -> QueuedKernel:
        """Return the launch of ``levels`` levels from number ``base`` of the table; its last argument is not set. ``arrays``
        replace buffers of ports."""
        kernel, ports = import_opencl().Kernel(self.binary, "program"), list[Any]()
        for name in self.ports:
            at = arrays.get(name)
            own = self.buffer, np.int64(self.memory.buffers[name])
            ports += own if at is None else (at.base_data, np.int64(at.offset))
        fixed = (self.buffer, *self.constants.buffers, *ports, *self.tables, self.partials, self.arrived, self.sync)
        values = (*fixed, *self.unit_recorders(), np.int32(base), np.int32(levels))
        kernel.set_args(*values, np.int32(0))
        self.last = len(values)
        return QueuedKernel(self.queue, kernel, groups * self.items, self.items)

    def level_launch(self, levels: range, arrays: Mapping[str, Any]) -> Queueable:
        """Return the launch that runs a range of levels. ``arrays`` replace buffers of ports."""
        first = self.inside.index(levels[0])
        return RangeLaunch(self, self._level_kernel(first, len(levels), self.groups, arrays), len(levels))

    def find_groups(self) -> int:
        """Return the number of groups that run at the same time, by trials of whole groups for each unit."""
        for each in TRIED if kind_of(self.queue.device) == "gpu" and not self.mixed else (1,):
            groups = each * self.device.veus
            trial = self._level_kernel(0, 0, groups, {})
            trial.kernel.set_arg(self.last, np.int32(groups))
            trial.launch()
            given_up = self._has_given_up()
            self.recover()
            if not given_up:
                return groups
        raise DeviceFailure(
            f"groups of {self.queue.device.name.strip()} do not run at the same time", hint="try --option executor=waves"
        )

    def _has_given_up(self) -> bool:
        """Wait for all queued runs. Return True if a group gave up in one of them."""
        import_opencl().enqueue_copy(self.queue, self.word, self.sync, src_offset=GIVEN_UP, is_blocking=False)
        self.queue.finish()
        return bool(self.word[0])

    def pass_levels(self, count: int) -> int:
        """Return the levels that were passed since the counter was zero, before a launch of ``count`` more."""
        if (self.passed + count) * self.groups > LARGEST:
            self._zero_counters()
        self.passed += count
        return self.passed - count

    def finish(self) -> None:
        """Wait for all queued runs. Raises DeviceFailure if groups gave up in one of them, which leaves its outputs unwritten."""
        if self._has_given_up():
            self.recover()
            raise DeviceFailure(
                f"program {self.program.name}: its groups do not run at the same time", hint="try --option executor=waves"
            )

    def _zero_counters(self) -> None:
        """Zero the counters of groups, but not the word that says that a group gave up: no caller has seen it."""
        for buffer, size in ((self.arrived, self.arrived.size), (self.sync, GIVEN_UP)):
            import_opencl().enqueue_fill_buffer(self.queue, buffer, np.int32(0), 0, size)
        self.passed = 0

    def recover(self) -> None:
        """Zero all counters after an aborted run."""
        import_opencl().enqueue_fill_buffer(self.queue, self.sync, np.int32(0), 0, self.sync.size)
        self._zero_counters()

    def record_calls(self, calls: DriverCalls, memory: int, constants: Sequence[int]) -> None:
        """Return None: the calls of a run differ from those of the run before."""

    def buffers(self) -> Sequence[Any]:
        """Return all device memory that the program owns."""
        return (*super().buffers(), *self.tables, self.sync)


class RangeLaunch:
    """The launch of a range of ``levels`` levels of ``program``."""

    def __init__(self, program: PersistentProgram, prepared: QueuedKernel, levels: int) -> None:
        self.program, self.prepared, self.levels = program, prepared, levels

    def launch(self) -> None:
        """Queue it, with the levels that were passed before."""
        self.prepared.kernel.set_arg(self.program.last, np.int32(self.program.pass_levels(self.levels)))
        self.prepared.launch()
