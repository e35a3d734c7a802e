"""The launch executor: kernels with a group of work-items for each task, queued in order.

The queue runs kernels one after another, as ``planned_program`` planned them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rammer.device.manifest import Array
from rammer.ir.launches import Launch, first_consecutive
from rammer.ir.program import RProgram
from rammer.ir.types import itemsize

from rammer_rocm.constants import DeviceConstants
from rammer_rocm.opencl_runtime import QueuedKernel, import_opencl
from rammer_rocm.placement import Placement, find_usable_arrays, has_device_room
from rammer_rocm.planned_program import PlannedLaunches
from rammer_rocm.program_kernels import Pointer, ProgramKernels
from rammer_rocm.resident import OpenClProgram
from rammer_rocm.source import LevelShape, launch_text


class Queueable(Protocol):
    """A prepared launch."""

    def launch(self) -> None:
        """Queue it."""
        ...


class LaunchProgram(PlannedLaunches, OpenClProgram):
    """A program whose kernels have a group for each task."""

    def __init__(
        self,
        kernels: ProgramKernels,
        shared: DeviceConstants,
        program: RProgram,
        constants: Mapping[str, Array],
    ) -> None:
        super().__init__(shared.queue, kernels, program, constants)
        context = self.queue.context
        self.check_memory(context.devices[0], 0)
        self.plan_launches(kernels.vdevice.veus)
        with shared.filling():  # while the runtime compiles or loads its cached binary
            self.constants = self.placed(constants, shared)
            levels = self.level_shape()
            self.binary = kernels.build(lambda dialect: launch_text(self.written, dialect, self.traced, levels))
        self.allocate(context, False)
        self.upload_constants(constants)
        self.partials, self.arrived = self.allocate_sharing(context)
        self.prepare_levels(context)
        self.own = Placement(self.memory.buffers, self._prepare_kernels({}))

    @property
    def kernels(self) -> int:
        """Number of launches of one run."""
        return self.program.turns * len(self.steps)

    def level_shape(self) -> LevelShape | None:
        """Return the shape of the kernel that runs levels, or None without one."""
        return None

    def prepare_levels(self, context: Any) -> None:
        """Prepare the launches that run levels."""

    def level_launch(self, levels: range, arrays: Mapping[str, Any]) -> Queueable:
        """Return the launch that runs a range of levels. ``arrays`` replace buffers of the program."""
        raise NotImplementedError

    def allocate_sharing(self, context: Any) -> tuple[Any, Any]:
        """Return memory for partial sums, and zeroed counters."""
        cl = import_opencl()
        partials, arrived = (cl.Buffer(context, cl.mem_flags.READ_WRITE, size) for size in self.sharing_sizes())
        cl.enqueue_fill_buffer(self.queue, arrived, np.int32(0), 0, arrived.size)
        return partials, arrived

    def recorders(self, context: Any, joined: Sequence[Launch]) -> Sequence[Any]:
        """Return the additional arguments of a traced kernel."""
        return ()

    def _prepare_kernels(self, arrays: Mapping[str, Any]) -> list[Queueable]:
        """Create kernels with all arguments set, so that a run only queues them. ``arrays`` replace buffers of the program."""
        context = self.queue.context
        return [
            self.level_launch(step, arrays) if isinstance(step, range) else self._prepare_kernel(context, step, arrays)
            for step in self.steps
        ]

    def _prepare_kernel(self, context: Any, joined: Sequence[Launch], arrays: Mapping[str, Any]) -> QueuedKernel:
        cl, parts = import_opencl(), self.parts_of(joined)
        values: list[Any] = [self.buffer] * any(part.inside for part in parts)
        for x, part, (place, counter) in zip(joined, parts, self.sharing_places(joined), strict=False):
            f = self.functions[x.operator]
            for k, argument in enumerate(f.arguments):
                values += self._pointer_in(argument, arrays)[k in part.inside :]
            values += [self._order(context, x.tasks)] if part.ordered else []
            values += [np.int32(first_consecutive(x.tasks) or 0), np.int32(self.groups_of(x))]
            if f.blocks > 1:
                values += [self.partials, np.int64(place), self.arrived, np.int32(counter)]
        kernel = cl.Kernel(self.binary, self.entry_of(parts))
        kernel.set_args(*values, *self.recorders(context, joined))
        threads = self.functions[joined[0].operator].threads
        return QueuedKernel(self.queue, kernel, sum(map(self.groups_of, joined)) * threads, threads)

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
