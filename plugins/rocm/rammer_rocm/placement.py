"""Buffer locations for a call: in the program's memory, or in the caller's arrays.

On a CPU with system-wide shared virtual memory, kernels can use every host address. They address tensors by offsets from the
program's memory. Host arrays are therefore used in place: the call has a separate table with the offsets of these arrays. On a
GPU a launch has a buffer for each tensor: the call has separate kernels, whose arguments are the arrays' buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rammer.device.arrays import HostRoom
from rammer.device.manifest import Array
from rammer.ir.program import RProgram
from rammer.runtime.host_memory import is_whole_buffer

from rammer_rocm.constants import LINE, SLACK
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.repeat import Seam, move_table

#: Alignment and slack that kernels assume of every tensor of a program.
ROOM: Final = HostRoom(LINE, SLACK)


@dataclass(frozen=True)
class Placement:
    """The buffer locations of one call. ``buffers`` are the byte offsets of the buffers from the program's memory. ``arguments``
    is the kernels' device table of these offsets, or the prepared launches. ``arrays`` are the caller's arrays by buffer."""

    buffers: Mapping[str, int]
    arguments: Any
    arrays: Mapping[str, Any] = field(default_factory=dict)
    _seams: list[Seam] = field(default_factory=list, repr=False, compare=False)
    _moves: list[Any] = field(default_factory=list, repr=False, compare=False)

    def seam(self, program: RProgram) -> Seam:
        """Return the copies between iterations of ``program`` for this call."""
        if not self._seams:
            self._seams.append(Seam(program, self.buffers))
        return self._seams[0]

    def moves(self, program: RProgram, context: Any) -> Any:
        """Return the same copies on the device, for the kernel that runs all iterations."""
        if not self._moves:
            self._moves.append(words_on(context, move_table(program, self.buffers)))
        return self._moves[0]


def find_usable_arrays(
    program: RProgram, inputs: Mapping[str, Any], outputs: Mapping[str, Any], has_room: Callable[[Any], bool] = ROOM.has
) -> dict[str, Any]:
    """Return the arrays that can replace the ports' buffers, by buffer name. They meet ROOM by ``has_room``."""
    ports = [("input", p, inputs.get(p.external)) for p in program.inputs]
    ports += [("output", p, outputs.get(p.external)) for p in program.outputs]
    used = Counter(program.storage[p.tensor].buffer for _, p, _ in ports)
    found = dict[str, Any]()
    for kind, port, array in ports:
        storage = program.storage[port.tensor]
        buffer = program.buffer[storage.buffer]
        own = used[buffer.name] == 1 and buffer.kind == kind and is_whole_buffer(storage, buffer)
        if own and array is not None and has_room(array) and array.dtype == buffer.dtype:
            found[buffer.name] = array
    return found


def has_device_room(array: Any) -> bool:
    """Return True if an OpenCL array meets ROOM in its buffer."""
    after = 0 if isinstance(array, np.ndarray) or not array.nbytes else array.base_data.size - array.offset - array.nbytes
    return bool(after >= ROOM.beyond and array.offset % ROOM.aligned == 0)


def device_array(queue: Any, values: Array) -> Any:
    """Return a copy of host values as an OpenCL array that meets ROOM."""
    import pyopencl.array

    cl = import_opencl()
    memory = cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, values.nbytes + ROOM.beyond)
    made = pyopencl.array.Array(queue, values.shape, values.dtype, data=memory)
    made.set(np.ascontiguousarray(values), queue)
    return made


def byte_distance(array: Array, memory: Array) -> int:
    """Return the bytes from the start of ``memory`` to that of ``array``."""
    return int(array.ctypes.data - memory.ctypes.data)


def make_address_table(context: Any, addresses: list[tuple[int, int]]) -> Any:
    """Return a device table of buffer numbers and byte offsets."""
    return words_on(context, np.array(addresses or [(0, 0)], np.int64))


def words_on(context: Any, words: Array) -> Any:
    """Return a read-only device buffer with ``words``."""
    flags = import_opencl().mem_flags
    return import_opencl().Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=words)
