"""A program resident on an OpenCL device: one memory buffer, shared constants, and runs on an in-order queue.

Two executors extend it: tables that a few groups walk (``table_executor.py``, CPUs), and launches with a group for each task
(``launch_executor.py``, GPUs)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rammer.device.manifest import Array, Bound, Loaded, RunResult
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram
from rammer.runtime.host_memory import is_whole_buffer, storage_view

from rammer_rocm.bound import OpenClBound
from rammer_rocm.constants import DeviceConstants, PlacedConstants
from rammer_rocm.memory import lay_out, shared_memory
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.placement import Placement
from rammer_rocm.planned_program import PlannedProgram
from rammer_rocm.program_kernels import ProgramKernels

#: Note for run results: the rows that are printed do not determine the compute units.
PLACEMENT = "the OpenCL runtime places rows on compute units"


class OpenClProgram(PlannedProgram, Loaded):
    """A program resident on an OpenCL device."""

    #: True if kernels record the start and end of each task (``trace.py``).
    traced = False
    buffer: Any
    #: The program's memory as a host array, or None if the host cannot access it.
    host: Array | None = None
    #: The placement of runs without the caller's arrays.
    own: Placement

    binary: Any

    def __init__(self, queue: Any, kernels: ProgramKernels, program: RProgram, constants: Mapping[str, Array]) -> None:
        self.program, self.queue, self.closed = program, queue, False
        self.device, self.threads = kernels.vdevice, kernels.vdevice.threads
        self.views = dict[str, Array]()
        self.functions = kernels.functions(program, constants)
        self.memory = lay_out(program)

    def placed(self, constants: Mapping[str, Array], shared: DeviceConstants) -> PlacedConstants:
        """Store the constants that kernels read on the device, in the required forms."""
        try:
            return shared.placed(self.wanted_forms(constants))
        except import_opencl().MemoryError as problem:
            raise DeviceFailure(f"out of device memory for the constants of {self.program.name} ({problem})") from problem

    def check_memory(self, device: Any, scratch: int) -> None:
        """Raise DeviceFailure if the arena, or the arena and ``scratch`` bytes, exceed the limits of ``device``."""
        limits = (
            ("one allocation", self.memory.nbytes, int(device.max_mem_alloc_size)),
            ("memory", self.memory.nbytes + scratch, int(device.global_mem_size)),
        )
        for what, need, limit in limits:
            if need > limit:
                raise DeviceFailure(
                    f"program {self.program.name} needs {need} bytes of {what}, {device.name.strip()} has {limit}",
                    hint="use a smaller batch, or a device with more memory",
                )

    def allocate(self, context: Any, shared: bool) -> None:
        """Allocate the program's memory; with ``shared`` the host may view it, since runs have finished when they return."""
        try:
            self.buffer, self.host = shared_memory(context, self.memory.nbytes, self.threads == 1, shared)
        except import_opencl().MemoryError as problem:
            raise DeviceFailure(f"out of device memory: {self.memory.nbytes} bytes wanted ({problem})") from problem

    def upload_constants(self, constants: Mapping[str, Array]) -> None:
        """Write the constants that are outputs."""
        for name in sorted(constants):
            if name in self.program.storage and self.program.storage[name].buffer in self.memory.buffers:
                self.write(name, constants[name])

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Execute one run. ``seconds`` is wall time from the first enqueue to the end of the last kernel."""
        for port in self.program.inputs:
            self.write(port.tensor, inputs[port.external])
        seconds = self.execute()
        return RunResult({p.external: self.read(p.tensor) for p in self.program.outputs}, seconds, (PLACEMENT,))

    def placement(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Placement:
        """Return the placement for a call with these arrays by port."""
        return self.own

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Bind fixed arrays: host arrays on a CPU, ``pyopencl.array.Array`` on a GPU."""
        return OpenClBound(self, inputs, outputs, stream)

    def execute(self) -> float:
        """Run on the current inputs and return the seconds. Raises DeviceFailure if the device reports an error."""
        start = time.perf_counter()
        with self.failures():
            self.queue_run()
            self.queue.finish()
            seconds = time.perf_counter() - start
            self.finish()
        return seconds

    def finish(self) -> None:
        """Wait for all queued runs. Raises DeviceFailure if one is incomplete."""
        self.queue.finish()

    def queue_run(self, at: Placement | None = None) -> None:
        """Queue one run on the current inputs."""
        at = at or self.own
        if self.program.repeat is None:
            self.queue_turn(at)
        else:
            at.seam(self.program).run(lambda: self.queue_turn(at), self._copy, lambda name: self.read_length(name, at))

    def queue_turn(self, at: Placement) -> None:
        """Queue one iteration of the program."""
        raise NotImplementedError

    def read_length(self, tensor: str, at: Placement) -> int:
        """Return the length that the scalar ``tensor`` holds in this run."""
        given = at.arrays.get(self.program.storage[tensor].buffer)
        seen = self.seen(tensor) if given is None else given
        return int((self.read(tensor) if seen is None else seen).item())

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between addresses, as offsets from the program's memory."""
        queue, buffer = self.queue, self.buffer
        import_opencl().enqueue_copy(queue, buffer, buffer, src_offset=source, dst_offset=target, byte_count=nbytes)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Convert OpenCL errors to DeviceFailure."""
        try:
            yield
        except import_opencl().Error as problem:
            self.recover()
            raise DeviceFailure(f"program {self.program.name} failed on the device: {problem}") from problem

    def recover(self) -> None:
        """Restore the device's state after an aborted run."""

    def poison(self) -> bool:
        """Fill arena, inputs and outputs with NaN (all bits set) to expose values that a run does not write."""
        cl = import_opencl()
        for buffer in self.program.buffers:
            if buffer.kind != "constant" and buffer.nbytes:
                cl.enqueue_copy(
                    self.queue, self.buffer, np.full(buffer.nbytes, 255, np.uint8), dst_offset=self.memory.buffers[buffer.name]
                )
        return True

    def start(self, tensor: str) -> int:
        """Return the byte address of a dense tensor that fills its buffer."""
        return self.memory.buffers[self.program.storage[tensor].buffer]

    def write(self, tensor: str, values: Array, blocking: bool = True) -> None:
        """Write host values into a tensor's storage. Without ``blocking`` a dense copy may finish later, in queue order."""
        if (view := self.views.get(tensor)) is not None:  # a program of a range has many scalar inputs
            view[...] = values
            return
        storage = self.program.storage[tensor]
        buffer = self.program.buffer[storage.buffer]
        if not buffer.nbytes:
            return
        seen = self.seen(tensor)
        if seen is not None:
            np.copyto(seen, values)
            return
        if is_whole_buffer(storage, buffer):
            dense = np.ascontiguousarray(values, buffer.dtype)
            self.write_bytes(dense, self.memory.buffers[storage.buffer], blocking or dense is not values)
            return
        flat = self.flat(storage.buffer)
        storage_view(flat, storage)[...] = values
        self.write_bytes(flat, self.memory.buffers[storage.buffer])

    def write_bytes(self, values: Array, address: int, blocking: bool = True) -> None:
        """Copy dense ``values`` to ``address`` (bytes) of the program's memory."""
        if values.nbytes:
            import_opencl().enqueue_copy(self.queue, self.buffer, values, dst_offset=address, is_blocking=blocking)

    def read(self, tensor: str) -> Array:
        """Return a copy of a tensor after all queued runs."""
        seen, storage = self.seen(tensor), self.program.storage[tensor]
        if seen is not None:
            return seen.copy()
        return np.ascontiguousarray(storage_view(self.flat(storage.buffer), storage)).reshape(storage.shape)

    def seen(self, tensor: str) -> Array | None:
        """Return a view of a tensor's elements, valid between runs, or None if the host cannot access device memory."""
        if self.host is None:
            return None
        if tensor not in self.views:
            storage = self.program.storage[tensor]
            buffer, start = self.program.buffer[storage.buffer], self.memory.buffers[storage.buffer]
            flat = self.host[start : start + buffer.nbytes].view(buffer.dtype)
            self.views[tensor] = storage_view(flat, storage)
        return self.views[tensor]

    def flat(self, name: str) -> Array:
        """Return the contents of a buffer after all queued runs."""
        buffer = self.program.buffer[name]
        flat = np.empty(buffer.size, buffer.dtype)
        if buffer.nbytes:
            import_opencl().enqueue_copy(self.queue, flat, self.buffer, src_offset=self.memory.buffers[name])
        return flat

    def close(self) -> None:
        """Free the device memory when all queued work has finished."""
        self.closed = True
        self.queue.finish()
        for buffer in self.buffers():
            buffer.release()
        self.views.clear()
        self.host = None
        self.constants = PlacedConstants((), {}, ())  # other programs may still share them

    def buffers(self) -> Sequence[Any]:
        """Return all device memory that the program owns."""
        return (self.buffer,)
