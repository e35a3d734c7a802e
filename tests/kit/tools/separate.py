"""rocm's GPU path under Oclgrind, with every program buffer in a separate allocation.

The plugin keeps all buffers in one allocation. Oclgrind cannot detect accesses outside a tensor there, nor uninitialised reads:
it forgets the rest of an allocation when the host writes a part of it. Here kernels address each buffer by its distance from the
first. A simulated address consists of an allocation number and an offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rammer.device.manifest import Array
from rammer.ir.program import RProgram
from rammer.runtime.host_memory import storage_view

import rammer_rocm.backend
import rammer_rocm.executor
from rammer_rocm.constants import DeviceConstants, PlacedConstants, packed_form
from rammer_rocm.executor import OpenClProgram
from rammer_rocm.memory import DeviceMemory
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.program_kernels import Function

#: Bits of the offset in a simulated address (Oclgrind's Memory.h: 16 bits are the allocation number).
PLACE = 48
#: Closed programs, retained for Oclgrind.
KEPT: list[SeparateProgram] = []
_PROBE = "__kernel void place(__global char *p, __global ulong *found) { found[0] = (ulong)p; }"


def lay_out(program: RProgram) -> DeviceMemory:
    """Return allocation numbers, shifted to their position in an address, for all buffers including the arena's."""
    return DeviceMemory({b.name: (i + 1) << PLACE for i, b in enumerate(program.buffers)}, 4)


class SeparateProgram(OpenClProgram):
    """A program whose addresses are ``number of allocation << PLACE | place``."""

    def placed(
        self, functions: Mapping[str, Function], constants: Mapping[str, Array], shared: DeviceConstants
    ) -> PlacedConstants:
        """Return the packed constants, each in a separate allocation."""
        packings = {
            (a.tensor, a.packing.key): a.packing for f in functions.values() for a in f.arguments if a.packing is not None
        }
        places = {name: (0, (len(self.program.buffers) + 1 + i) << PLACE) for i, name in enumerate(packings)}
        self.packs = {places[name][1]: packed_form(constants[name[0]], p) for name, p in packings.items()}
        return PlacedConstants((), places, ())

    def upload(self, context: Any, arguments: Array, constants: Mapping[str, Array], scratch: int) -> None:
        sizes = {self.memory.buffers[b.name]: b.nbytes for b in self.program.buffers}
        sizes |= {address: how.form.nbytes for address, how in self.packs.items()}
        self.parts = {a: self._allocated(context, n) for a, n in sizes.items()}
        self.images = {a: np.zeros(n, np.uint8) for a, n in sizes.items()}
        self.buffer, self.spill = self._allocated(context, 4), self._allocated(context, 4)
        tables = (self._moved(context, arguments), self.table.starts, self.table.runs, self.table.filled)
        self.tables = [self._allocated(context, t.nbytes) for t in tables]
        for made, values in zip(self.tables, tables, strict=True):
            import_opencl().enqueue_copy(self.queue, made, values)
        self.upload_constants(constants)
        for address, how in self.packs.items():
            how.given(lambda values, address=address: self.write_bytes(values, address))

    def _allocated(self, context: Any, nbytes: int) -> Any:
        return import_opencl().Buffer(context, import_opencl().mem_flags.READ_WRITE, max(nbytes, 1))

    def _moved(self, context: Any, arguments: Array) -> Array:
        """Return addresses as distances from ``self.buffer``."""
        cl = import_opencl()
        kernel = cl.Kernel(cl.Program(context, _PROBE).build(), "place")
        found, place = np.zeros(1, np.uint64), self._allocated(context, 8)

        def first(part: Any) -> int:
            kernel(self.queue, (1,), (1,), part, place)
            cl.enqueue_copy(self.queue, found, place)
            return int(found[0])

        base, low = first(self.buffer), (1 << PLACE) - 1
        starts = {address: first(part) for address, part in self.parts.items()}
        moved = [(number, starts[int(a) & ~low] + (int(a) & low) - base) for number, a in arguments]
        return np.array(moved, np.int64)

    def write(self, tensor: str, values: Array, blocking: bool = True) -> None:
        """Write host values to a tensor's storage; the whole allocation is written."""
        storage = self.program.storage[tensor]
        address = self.memory.buffers[storage.buffer]
        _tensor(self.images[address], self.program, tensor)[...] = values
        self.write_bytes(self.images[address], address)

    def write_bytes(self, values: Array, address: int, blocking: bool = True) -> None:
        if values.nbytes:
            import_opencl().enqueue_copy(self.queue, self.parts[address], values)

    def read(self, tensor: str) -> Array:
        address = self.memory.buffers[self.program.storage[tensor].buffer]
        image = np.empty_like(self.images[address])
        if image.nbytes:
            import_opencl().enqueue_copy(self.queue, image, self.parts[address])
        return np.array(_tensor(image, self.program, tensor), order="C")

    def poison(self) -> bool:
        """Fill all memory except constants with NaN (all bits set)."""
        for buffer in self.program.buffers:
            if buffer.kind != "constant":
                address = self.memory.buffers[buffer.name]
                self.images[address][...] = 0xFF
                self.write_bytes(self.images[address], address)

    def close(self) -> None:
        """Retain all allocations: Oclgrind would apply the state of a freed allocation to the next one with its number."""
        self.closed = True
        KEPT.append(self)


def _tensor(image: Array, program: RProgram, tensor: str) -> Array:
    """Return a tensor as a view of its buffer's bytes."""
    storage = program.storage[tensor]
    return storage_view(image.view(program.buffer[storage.buffer].dtype), storage)


def install() -> None:
    """Use separate allocations for all later programs of the plugin in this process."""
    rammer_rocm.executor.lay_out = lay_out
    rammer_rocm.backend.OpenClProgram = SeparateProgram
