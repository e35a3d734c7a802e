"""The launch executor: kernels with a group of work-items for each task, queued in order.

A launch has the tasks of one operator in one wave (``rammer.ir.launches``). The queue runs kernels one after another, so
launches that do not depend on each other share a kernel if their groups have equal work-items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np

from rammer.device.driver_calls import Argument, DriverCalls, buffer_argument, int32, int64
from rammer.device.manifest import Array
from rammer.ir.launches import Launch, first_consecutive, make_launches
from rammer.ir.program import RProgram
from rammer.ir.types import itemsize

from rammer_rocm.constants import DeviceConstants, round_up
from rammer_rocm.opencl_runtime import QueuedKernel, import_opencl
from rammer_rocm.placement import Placement, find_usable_arrays, has_device_room
from rammer_rocm.program_kernels import Function, Pointer, ProgramKernels
from rammer_rocm.resident import BINARY, OpenClProgram
from rammer_rocm.source import LevelShape, launch_text

if TYPE_CHECKING:
    from rammer_rocm.kernels.task import TaskFunction

#: Maximum launches of one kernel: each adds its registers' maximum and parameters (OpenCL guarantees 1024 bytes of parameters).
MOST_PARTS: Final = 6
#: Launches with more groups per vEU than this are not joined: alone they fill the device.
MOST_GROUPS: Final = 4
#: Alignment in floats of the memory that groups of a task share.
LINE: Final = 64


class Queueable(Protocol):
    """A prepared launch."""

    def launch(self) -> None:
        """Queue it."""
        ...


class LaunchProgram(OpenClProgram):
    """A program whose kernels have a group for each task."""

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
        self.levels = launch_levels(make_launches(program))
        #: The steps of a run, in order: the launches of a kernel, or a range of levels that one launch runs.
        self.steps = self.make_steps(kernels.vdevice.veus)
        self.plan = [step for step in self.steps if not isinstance(step, range)]
        texts = dict.fromkeys(tuple(functions[x.operator] for x in joined) for joined in self.plan)
        with shared.filling():  # while the runtime compiles or loads its cached binary
            self.constants = self.placed(functions, constants, shared)
            signatures = {tuple(f.entry for f in parts): parts for parts in texts}
            self.number = {entries: i for i, entries in enumerate(signatures)}
            written = cast("list[Sequence[TaskFunction]]", list(signatures.values()))
            levels = self.level_shape()
            self.binary = kernels.build(lambda dialect: launch_text(written, dialect, self.traced, levels))
        self.allocate(context, False)
        self.upload_constants(constants)
        self.partials, self.arrived = self.allocate_sharing(context)
        self.prepare_levels(context)
        self.own = Placement(self.memory.buffers, self._prepare_kernels({}))

    @property
    def kernels(self) -> int:
        """Number of launches of one run."""
        return self.program.turns * len(self.steps)

    def make_steps(self, veus: int) -> list[list[Launch] | range]:
        """Return the steps of a run."""
        return [joined for level in self.levels for joined in join_level(level, self.functions, veus)]

    def level_shape(self) -> LevelShape | None:
        """Return the shape of the kernel that runs levels, or None without one."""
        return None

    def prepare_levels(self, context: Any) -> None:
        """Prepare the launches that run levels."""

    def level_launch(self, levels: range) -> Queueable:
        """Return the launch that runs a range of levels."""
        raise NotImplementedError

    def groups_of(self, launch: Launch) -> int:
        """Return the groups of one launch."""
        return len(launch.tasks) * self.functions[launch.operator].blocks

    def allocate_sharing(self, context: Any) -> tuple[Any, Any]:
        """Return memory for partial sums, and zeroed counters. Kernels and levels run in order, so all use the same memory."""
        ends = [self.sharing_places(launches)[-1] for launches in (*self.plan, *self.levels)]
        floats, words = (max((end[i] for end in ends), default=0) for i in (0, 1))
        cl = import_opencl()
        partials, arrived = (cl.Buffer(context, cl.mem_flags.READ_WRITE, max(4 * n, 64)) for n in (floats, words))
        cl.enqueue_fill_buffer(self.queue, arrived, np.int32(0), 0, arrived.size)
        return partials, arrived

    def sharing_places(self, joined: Sequence[Launch]) -> list[tuple[int, int]]:
        """Return the first partial sum (floats) and the first counter of each launch of a kernel, then the ends."""
        found = [(0, 0)]
        for x in joined:
            f, (place, counter) = self.functions[x.operator], found[-1]
            tasks = len(x.tasks) if f.blocks > 1 else 0
            found.append((round_up(place + f.partials * tasks, LINE), counter + tasks))
        return found

    def recorders(self, context: Any, joined: Sequence[Launch]) -> Sequence[Any]:
        """Return the additional arguments of a traced kernel."""
        return ()

    def _prepare_kernels(self, arrays: Mapping[str, Any]) -> list[Queueable]:
        """Create kernels with all arguments set, so that a run only queues them. ``arrays`` replace buffers of the program."""
        context = self.queue.context
        return [
            self.level_launch(step) if isinstance(step, range) else self._prepare_kernel(context, step, arrays)
            for step in self.steps
        ]

    def _prepare_kernel(self, context: Any, joined: Sequence[Launch], arrays: Mapping[str, Any]) -> QueuedKernel:
        cl, values = import_opencl(), list[Any]()
        for x, (place, counter) in zip(joined, self.sharing_places(joined), strict=False):
            f = self.functions[x.operator]
            for argument in f.arguments:
                values += self._pointer_in(argument, arrays)
            first = first_consecutive(x.tasks)
            values += [None if first is not None else self._order(context, x.tasks), np.int32(first or 0)]
            values.append(np.int32(self.groups_of(x)))
            if f.blocks > 1:
                values += [self.partials, np.int64(place), self.arrived, np.int32(counter)]
        functions = [self.functions[x.operator] for x in joined]
        kernel = cl.Kernel(self.binary, f"launch_{self.number[tuple(f.entry for f in functions)]}")
        kernel.set_args(*values, *self.recorders(context, joined))
        threads = functions[0].threads
        return QueuedKernel(self.queue, kernel, sum(map(self.groups_of, joined)) * threads, threads)

    def record_calls(self, calls: DriverCalls, memory: int, constants: Sequence[int]) -> dict[str, Any] | None:
        """Record the launches of a run, in order."""
        partials, arrived = calls.allocate(self.partials.size), calls.allocate(self.arrived.size)
        for joined in self.plan:
            values = list[Argument]()
            for x, (place, counter) in zip(joined, self.sharing_places(joined), strict=False):
                f = self.functions[x.operator]
                for number, start in (self.argument_address(a, self.memory.buffers) for a in f.arguments):
                    values += [buffer_argument(constants[number - 1] if number else memory), int64(start)]
                first = first_consecutive(x.tasks)
                order = calls.allocate_table(np.array(x.tasks, np.int32)) if first is None else -1
                values += [buffer_argument(order), int32(first or 0), int32(self.groups_of(x))]
                if f.blocks > 1:
                    values += [buffer_argument(partials), int64(place), buffer_argument(arrived), int32(counter)]
            functions = [self.functions[x.operator] for x in joined]
            entry = f"launch_{self.number[tuple(f.entry for f in functions)]}"
            calls.launch((BINARY, entry), sum(map(self.groups_of, joined)), functions[0].threads, values)
        return {}

    def pointer(self, argument: Pointer) -> tuple[Any, Any]:
        """Return the buffer and the byte offset of a kernel's argument."""
        number, place = self.argument_address(argument, self.memory.buffers)
        return self.constants.buffers[number - 1] if number else self.buffer, np.int64(place)

    def _pointer_in(self, argument: Pointer, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return ``pointer`` of an argument, or its place in the array that replaces its buffer."""
        storage = self.program.storage[argument.tensor] if argument.packing is None else None
        if storage is None or storage.buffer not in arrays:
            return self.pointer(argument)
        array, inside = arrays[storage.buffer], storage.offset * itemsize(self.program.buffer[storage.buffer].dtype)
        return array.base_data, np.int64(array.offset + inside)

    def placement(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Placement:
        """Return the placement for a call with these arrays by port, which kernels use in place where possible."""
        if self.program.repeat is not None:  # whose moves address the program's memory
            return self.own
        found = find_usable_arrays(self.program, inputs, outputs, has_device_room)
        arrays = {buffer: array for buffer, array in found.items() if buffer not in self.buffers_of_ranges()}
        return Placement(self.memory.buffers, self._prepare_kernels(arrays), arrays) if arrays else self.own

    def buffers_of_ranges(self) -> set[str]:
        """Return the buffers that ranges of levels use, which are always in the program's memory."""
        inside = (x for step in self.steps if isinstance(step, range) for i in step for x in self.levels[i])
        return {buffer for x in inside for buffer in self.buffers_of(x)}

    def buffers_of(self, launch: Launch) -> set[str]:
        """Return the buffers of the program that the tasks of a launch use."""
        tensors = [a.tensor for a in self.functions[launch.operator].arguments if a.packing is None]
        return {self.program.storage[t].buffer for t in tensors}

    def _order(self, context: Any, tasks: Sequence[int]) -> Any:
        flags = import_opencl().mem_flags
        return import_opencl().Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=np.array(tasks, np.int32))

    def queue_turn(self, at: Placement) -> None:
        """Queue one iteration: all kernels, without waits of the host."""
        for kernel in at.arguments:
            kernel.launch()

    def recover(self) -> None:
        """Zero the counters after an aborted run."""
        import_opencl().enqueue_fill_buffer(self.queue, self.arrived, np.int32(0), 0, self.arrived.size)

    def buffers(self) -> Sequence[Any]:
        """Return all device memory that the program owns."""
        return (*super().buffers(), self.partials, self.arrived)

    def close(self) -> None:
        """Free the device memory when all queued work has finished."""
        super().close()
        self.own = Placement({}, [])


def launch_levels(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Return launches by level, in a legal order: those of a level do not depend on each other."""
    level, levels = list[int](), list[list[Launch]]()
    for x in launches:
        level.append(max((level[i] + 1 for i in x.after), default=0))
        if level[-1] == len(levels):
            levels.append([])
        levels[level[-1]].append(x)
    return levels


def join_level(level: Sequence[Launch], functions: Mapping[str, Function], veus: int) -> list[list[Launch]]:
    """Return the launches of each kernel of a level. A kernel's launches do not depend on each other."""
    kernels, most = list[list[Launch]](), MOST_GROUPS * veus
    open_ = dict[int, list[list[Launch]]]()  # kernels with room, by work-items of a group
    for x in level:
        groups, threads = count_groups([x], functions), functions[x.operator].threads
        room = (k for k in open_.get(threads, ()) if len(k) < MOST_PARTS and count_groups(k, functions) <= most)
        kernel = next(room, None) if groups <= most else None
        if kernel is None:
            kernel = []
            kernels.append(kernel)
            open_.setdefault(threads, []).append(kernel)
        kernel.append(x)
    return kernels


def count_groups(launches: Sequence[Launch], functions: Mapping[str, Function]) -> int:
    """Return the groups of launches."""
    return sum(len(x.tasks) * functions[x.operator].blocks for x in launches)
