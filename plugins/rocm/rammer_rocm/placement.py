"""Where a program's buffers are for a call: all in the program's own memory, or some in arrays of the caller's.

On a CPU with system-wide shared virtual memory every address of the host's is one of the unit's, and kernels find tensors by
distances from the program's memory. So an array of the host's is used where it is: the call has a table of its own, with the
distances of that array.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from rammer.device.in_place import HostRoom
from rammer.device.manifest import Array
from rammer.ir.program import RProgram
from rammer.runtime.host_memory import is_whole_buffer

from rammer_rocm.constants import LINE, SLACK
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.repeat import Seam, move_table

#: What kernels take for granted of every tensor of a program.
ROOM: Final = HostRoom(LINE, SLACK)


@dataclass(frozen=True)
class Placement:
    """``buffers`` are the bytes from the beginning of a program's memory to each of its buffers, ``arguments`` the table on the
    device that says so to kernels, ``arrays`` the caller's by buffer."""

    buffers: Mapping[str, int]
    arguments: Any
    arrays: Mapping[str, Array] = field(default_factory=dict)
    _seams: list[Seam] = field(default_factory=list, repr=False, compare=False)
    _moves: list[Any] = field(default_factory=list, repr=False, compare=False)

    def seam(self, program: RProgram) -> Seam:
        """What ``program``, which is this call's, copies between its turns."""
        if not self._seams:
            self._seams.append(Seam(program, self.buffers))
        return self._seams[0]

    def moves(self, program: RProgram, context: Any) -> Any:
        """The same for the kernel that runs all turns, on the device."""
        if not self._moves:
            self._moves.append(words_on(context, move_table(program, self.buffers)))
        return self._moves[0]


def find_usable_arrays(program: RProgram, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Of the arrays by port those that can be the memory of the ports' buffers, by buffer."""
    ports = [("input", p, inputs.get(p.external)) for p in program.inputs]
    ports += [("output", p, outputs.get(p.external)) for p in program.outputs]
    used = Counter(program.storage[p.tensor].buffer for _, p, _ in ports)
    found = dict[str, Array]()
    for kind, port, array in ports:
        storage = program.storage[port.tensor]
        buffer = program.buffer[storage.buffer]
        own = used[buffer.name] == 1 and buffer.kind == kind and is_whole_buffer(storage, buffer)
        if own and array is not None and ROOM.has(array) and array.dtype == buffer.dtype:
            found[buffer.name] = array
    return found


def byte_distance(array: Array, memory: Array) -> int:
    """Bytes from the beginning of ``memory`` to that of ``array``."""
    return int(array.ctypes.data - memory.ctypes.data)


def make_address_table(context: Any, addresses: list[tuple[int, int]]) -> Any:
    """Buffers' numbers and bytes in them, on the device."""
    return words_on(context, np.array(addresses or [(0, 0)], np.int64))


def words_on(context: Any, words: Array) -> Any:
    """A table on the device."""
    flags = import_opencl().mem_flags
    return import_opencl().Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=words)
