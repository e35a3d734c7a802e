"""The persistent executor of GPUs: one launch, whose groups run all levels of a program.

A level has the tasks of launches that do not depend on each other (``launch_executor.launch_levels``). Group ``g`` of ``n`` runs
tasks ``g``, ``g + n`` and so on of each level, then waits until all groups have finished the level. All groups must therefore run
at the same time. OpenCL does not tell how many do, so a trial finds the number when a program is loaded: all groups wait for each
other once. A group that waits too long ends the run for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from rammer.device.manifest import Array
from rammer.errors import DeviceFailure
from rammer.ir.launches import Launch, make_launches
from rammer.ir.program import RProgram

from rammer_rocm.constants import DeviceConstants, round_up
from rammer_rocm.launch_executor import LINE, launch_levels
from rammer_rocm.opencl_runtime import QueuedKernel, import_opencl, kind_of
from rammer_rocm.placement import Placement
from rammer_rocm.program_kernels import ProgramKernels
from rammer_rocm.resident import OpenClProgram
from rammer_rocm.source import TRIAL_POLLS, UNIT_WORDS, persistent_text

if TYPE_CHECKING:
    from rammer_rocm.kernels.task import TaskFunction

#: The counter is reset before it exceeds this.
LARGEST: Final = 1 << 30
#: Groups of a unit that kernels are chosen for, and those that trials on a GPU try.
RESIDENT: Final = 2
TRIED: Final = (3, 2, 1)
#: Byte of ``sync`` that is not zero after a group gave up.
GIVEN_UP: Final = 128


class PersistentProgram(OpenClProgram):
    """A program that one launch of ``groups`` groups runs."""

    def __init__(
        self,
        kernels: ProgramKernels,
        shared: DeviceConstants,
        program: RProgram,
        constants: Mapping[str, Array],
    ) -> None:
        super().__init__(shared.queue, kernels, program, constants)
        context, functions = self.queue.context, self.functions
        self.check_memory(context.devices[0], 0)
        self.items, self.epoch = kernels.vdevice.threads, 0
        self.levels = launch_levels(make_launches(program))
        distinct = list({f.entry: f for f in functions.values()}.values())
        numbers = {f.entry: i for i, f in enumerate(distinct)}
        self.pointers = max((len(f.arguments) for f in distinct), default=0)
        with shared.filling():  # while the runtime compiles or loads its cached binary
            self.constants = self.placed(functions, constants, shared)
            sizes = len(self.constants.buffers), self.pointers, self.items
            trial = TRIAL_POLLS[kind_of(context.devices[0]) != "gpu"]
            written = cast("list[TaskFunction]", distinct)
            self.binary = kernels.build(lambda dialect: persistent_text(written, dialect, sizes, trial, self.traced))
        self.allocate(context, False)
        self.upload_constants(constants)
        self.own = Placement(self.memory.buffers, None)
        self.places: list[tuple[Launch, int]] = [(x, task) for x, task, _ in self._units()]
        units, starts, floats, counters = self._make_table(numbers)
        self._upload_table(context, units, starts, floats, counters)
        self._prepare_kernel(context, len(starts) - 1)
        self.word = np.zeros(1, np.int32)
        self.groups = self.find_groups()
        self.launch = self._prepare_launch(self.groups)

    @property
    def kernels(self) -> int:
        """Number of launches of one run."""
        return self.program.turns

    def _units(self) -> list[tuple[Launch, int, int]]:
        """Return the launch, the position of the task in it and the rank of every unit of work, by level."""
        return [
            (x, i, rank)
            for level in self.levels
            for x in level
            for i in range(len(x.tasks))
            for rank in range(self.functions[x.operator].blocks)
        ]

    def _make_table(self, numbers: Mapping[str, int]) -> tuple[Array, Array, int, int]:
        """Return the rows of all units, the first unit of each level, and the shared partial sums and counters.

        A row has the function, the task, the slot, the rank, the places of its partial sums and counters, then buffer and byte
        offset of every pointer. A row has whole 64-bit words."""
        rows, starts, most = list[list[int]](), [0], [0, 0]
        for level in self.levels:
            floats = counters = 0
            for x in level:
                f = self.functions[x.operator]
                pointers = [n for a in f.arguments for n in self.argument_address(a, self.memory.buffers)]
                pointers += [0] * (2 * self.pointers - len(pointers))
                for i, task in enumerate(x.tasks):
                    for rank in range(f.blocks):
                        rows.append([numbers[f.entry], task, i, rank, floats, counters, *pointers])
                if f.blocks > 1:
                    floats, counters = round_up(floats + f.partials * len(x.tasks), LINE), counters + len(x.tasks)
            starts.append(len(rows))
            most = [max(most[0], floats), max(most[1], counters)]
        width = UNIT_WORDS + 2 * self.pointers
        table = np.array(rows or [[0] * width], np.int64)
        return table, np.array(starts, np.int32), most[0], most[1]

    def _upload_table(self, context: Any, units: Array, starts: Array, floats: int, counters: int) -> None:
        cl = import_opencl()
        flags = cl.mem_flags
        self.tables = [cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=t) for t in (units, starts)]
        self.partials = cl.Buffer(context, flags.READ_WRITE, max(4 * floats, 64))
        self.arrived = cl.Buffer(context, flags.READ_WRITE, max(4 * counters, 64))
        self.sync = cl.Buffer(context, flags.READ_WRITE, 256)
        self.recover()

    def recorders(self, context: Any) -> Sequence[Any]:
        """Return the additional kernel arguments of a traced program."""
        return ()

    def _prepare_kernel(self, context: Any, levels: int) -> None:
        cl = import_opencl()
        self.kernel = cl.Kernel(self.binary, "program")
        fixed = (self.buffer, *self.constants.buffers, *self.tables, self.partials, self.arrived, self.sync)
        self.kernel.set_args(*fixed, np.int32(levels), *self.recorders(context), np.int32(0))
        self.last, self.count = len(fixed) + 1 + len(self.recorders(context)), levels

    def find_groups(self) -> int:
        """Return the number of groups that run at the same time, by trials of whole groups for each unit."""
        for each in TRIED if kind_of(self.queue.device) == "gpu" else (1,):
            groups = each * self.device.veus
            self._set_levels(0)
            self._prepare_launch(groups).launch()
            if not self._has_given_up():
                self._set_levels(self.count)
                self._zero_counters()
                return groups
            self.recover()
        raise DeviceFailure(
            f"groups of {self.queue.device.name.strip()} do not run at the same time", hint="try --option executor=waves"
        )

    def _set_levels(self, levels: int) -> None:
        self.kernel.set_arg(self.last - len(self.recorders(self.queue.context)) - 1, np.int32(levels))

    def _prepare_launch(self, groups: int) -> QueuedKernel:
        """Return the launch of ``groups`` groups. The last argument of a trial is their number."""
        self.kernel.set_arg(self.last, np.int32(groups))
        return QueuedKernel(self.queue, self.kernel, groups * self.items, self.items)

    def _has_given_up(self) -> bool:
        """Wait for all queued runs. Return True if a group gave up in one of them."""
        import_opencl().enqueue_copy(self.queue, self.word, self.sync, src_offset=GIVEN_UP, is_blocking=False)
        self.queue.finish()
        return bool(self.word[0])

    def queue_turn(self, at: Placement) -> None:
        """Queue one iteration: one launch."""
        if not self.count:
            return
        if (self.epoch + 1) * self.groups * self.count > LARGEST:
            self._zero_counters()
        self.kernel.set_arg(self.last, np.int32(self.epoch * self.count))
        self.epoch += 1
        self.launch.launch()

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
        self.epoch = 0

    def recover(self) -> None:
        """Zero all counters after an aborted run."""
        import_opencl().enqueue_fill_buffer(self.queue, self.sync, np.int32(0), 0, self.sync.size)
        self._zero_counters()

    def buffers(self) -> Sequence[Any]:
        """Return all device memory that the program owns."""
        return (*super().buffers(), *self.tables, self.partials, self.arrived, self.sync)
