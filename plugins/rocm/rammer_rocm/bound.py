"""Bound calls on an OpenCL unit: queued copies between the caller's arrays and the program's one memory buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from rammer.device.arrays import host_view, on_host
from rammer.device.manifest import Array, Bound
from rammer.errors import BadInput
from rammer.ir.program import Port, RProgram
from rammer.runtime.host_bound import WHOLE, check_apart
from rammer.verify import state_ports

from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.placement import ROOM, Placement, device_array


class Queued(Protocol):
    """The interface of a bound call's program: one memory buffer on a device, and runs on a queue."""

    program: RProgram
    queue: Any
    buffer: Any
    threads: int
    closed: bool

    def start(self, tensor: str) -> int:
        """Return the first byte of a tensor in the buffer."""
        ...

    def write(self, tensor: str, values: Array, blocking: bool = True) -> None:
        """Queue a copy of values from the host."""
        ...

    def read(self, tensor: str) -> Array:
        """Return a tensor's values, after all queued work."""
        ...

    def seen(self, tensor: str) -> Array | None:
        """Return a tensor's elements in the device's memory between runs, or None if the host cannot access it."""
        ...

    def placement(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Placement:
        """Return the placement of buffers for a call with these arrays, by port."""
        ...

    def queue_run(self, at: Placement | None = None) -> None:
        """Queue one run of the program."""
        ...

    def finish(self) -> None:
        """Wait for all queued runs. Raises DeviceFailure if one is incomplete."""
        ...

    def failures(self) -> AbstractContextManager[None]:
        """Convert the runtime's errors to DeviceFailure."""
        ...


class OpenClBound(Bound):
    """A bound call on fixed arrays.

    A program's tensors are parts of one OpenCL buffer. Every run copies its inputs to it and its outputs out of it, in the
    device's memory. On a CPU that memory is the host's, and the arrays are NumPy's. On a GPU the arrays are
    ``pyopencl.array.Array``; a host array is copied to one when it is bound. Kernels use arrays that satisfy ``placement.ROOM``
    in place."""

    def __init__(self, program: Queued, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> None:
        self._program, self.stream, self._on_cpu = program, program.queue, program.threads == 1
        #: The queue of a CPU that runs are ordered with, if it is not the program's: length variants have one each.
        self._other = None if stream is program.queue else stream
        same = self._on_cpu and getattr(stream, "context", None) == program.queue.context
        if self._other is not None and not same:
            raise BadInput("programs run on the queue that their device was opened with", hint="leave out stream")
        ports = program.program.inputs, program.program.outputs
        read = {p.external: self._bind_input(p, inputs[p.external]) for p in ports[0]}
        kept = state_ports(program.program)
        written = {
            p.external: read[kept[p.external]] if p.external in kept else self._bind_output(p, outputs.get(p.external))
            for p in ports[1]
        }
        check_apart({n: a for n, a in read.items() if n not in kept.values()}, written, _has_overlap)
        #: The tensors of states, which stay in the program's memory, by the names of both ports.
        self._states = {p.external: p.tensor for p in (*ports[0], *ports[1]) if p.external in {*kept, *kept.values()}}
        for name in kept.values():
            self._copy_in(self._states[name], read[name])
        self._at = program.placement(read, written)
        self._moved = [[p for p in some if p.external not in self._states and not self._is_in_place(p)] for some in ports]
        nbytes = sum(program.program.types[p.tensor].nbytes for some in self._moved for p in some)
        where = "in the host's memory, which is the device's" if self._on_cpu else "on the device"
        super().__init__(
            read,
            written,
            clock=WHOLE if self._on_cpu or not nbytes else "wall, copies on the device",
            stream=program.queue,
            notes=[f"{nbytes} bytes of inputs and outputs are copied {where} in every run"] if nbytes else [],
            copied=(tuple(p.external for p in self._moved[0]), tuple(p.external for p in self._moved[1])),
        )

    def _is_in_place(self, port: Port) -> bool:
        """Return True if kernels use the port's array in place."""
        return self._program.program.storage[port.tensor].buffer in self._at.arrays

    def _bind_input(self, port: Port, given: Any) -> Any:
        what = f"input {port.external!r}"
        if not on_host(given):
            return self._device_array(what, given)
        array = host_view(what, given)
        return array if self._on_cpu else device_array(self.stream, array)

    def _bind_output(self, port: Port, given: Any) -> Any:
        what, kind = f"output {port.external!r}", self._program.program.types[port.tensor]
        if given is None:
            made: Any = ROOM.zeros(kind.shape, kind.dtype)
            return made if self._on_cpu else device_array(self.stream, made)
        if not on_host(given):
            return self._device_array(what, given)
        if not self._on_cpu:
            raise BadInput(f"{what} is in host memory", hint="bind a pyopencl array, or none and read bound.to_host()")
        array = host_view(what, given)
        if not array.flags.writeable:
            raise BadInput(f"{what} is an array that cannot be written")
        return array

    def _device_array(self, what: str, given: Any) -> Any:
        if not isinstance(given, _array_module().Array):
            raise BadInput(f"{what} is a {type(given).__name__} of another device", hint="bind a pyopencl or NumPy array")
        if given.context != self._program.queue.context:
            raise BadInput(f"{what} is an array of another OpenCL context", hint="make it with bound.stream")
        if not given.flags.c_contiguous:
            raise BadInput(f"{what} is a strided OpenCL array", hint="bind a dense one")
        return given

    def launch(self) -> None:
        """Queue one run. With the executor ``single`` it has finished on return."""
        program = self._program
        with program.failures():
            if self._other is not None:
                self._other.finish()
            for port in self._moved[0]:
                self._copy_in(port.tensor, self.inputs[port.external])
            program.queue_run(self._at)
            for port in self._moved[1]:
                self._copy_out(port.tensor, self.outputs[port.external])
            if self._other is not None:
                self.stream.finish()

    def _copy_in(self, tensor: str, array: Any) -> None:
        if isinstance(array, np.ndarray):
            self._program.write(tensor, array, blocking=False)
        elif array.nbytes:
            import_opencl().enqueue_copy(
                self.stream,
                self._program.buffer,
                array.base_data,
                byte_count=array.nbytes,
                src_offset=array.offset,
                dst_offset=self._program.start(tensor),
            )

    def _copy_out(self, tensor: str, array: Any) -> None:
        if not array.nbytes:
            return
        if not isinstance(array, np.ndarray):
            import_opencl().enqueue_copy(
                self.stream,
                array.base_data,
                self._program.buffer,
                byte_count=array.nbytes,
                src_offset=self._program.start(tensor),
                dst_offset=array.offset,
            )
        elif (seen := self._program.seen(tensor)) is not None:
            np.copyto(array, seen)
        elif array.flags.c_contiguous:
            import_opencl().enqueue_copy(
                self.stream, array, self._program.buffer, src_offset=self._program.start(tensor), is_blocking=False
            )
        else:
            np.copyto(array, self._program.read(tensor))

    def wait(self) -> None:
        """Wait for the queue. Raises DeviceFailure if queued work failed."""
        with self._program.failures():
            self._program.finish()

    def store(self, values: Mapping[str, Any]) -> None:
        """Copy values into bound inputs, after the runs queued before."""
        self.wait()
        for name, value in values.items():
            array, what = self.inputs[name], f"input {name!r}"
            given = host_view(what, value) if on_host(value) else self._device_array(what, value).get(self.stream)
            if isinstance(array, np.ndarray):
                super().store({name: given})
            else:
                array.set(np.ascontiguousarray(given), self.stream)
            if name in self._states:
                self._copy_in(self._states[name], array)
        self.wait()

    def fetch(self, names: Sequence[str]) -> dict[str, Array]:
        """Return copies of outputs after the runs queued before."""
        self.wait()
        for name in (n for n in names if n in self._states):
            self._copy_out(self._states[name], self.outputs[name])
        self.wait()
        found = {n: self.outputs[n] for n in names}
        return {n: a.copy() if isinstance(a, np.ndarray) else np.asarray(a.get(self.stream)) for n, a in found.items()}

    def release(self) -> None:
        """Release the arrays after waiting for the queue."""
        if not self._program.closed:
            self.wait()
        self.inputs, self.outputs, self._at = {}, {}, Placement({}, None)


def _array_module() -> Any:
    import_opencl()
    import pyopencl.array

    return pyopencl.array


def _has_overlap(a: Any, b: Any) -> bool:
    """Return True if two arrays overlap; OpenCL arrays overlap if their ranges in one buffer do."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.may_share_memory(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) or a.base_data != b.base_data:
        return False
    return bool(a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes)
