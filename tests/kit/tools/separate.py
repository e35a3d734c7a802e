"""rocm's GPU path under Oclgrind, with every program buffer in a separate allocation.

The plugin keeps all buffers in one allocation. Oclgrind cannot detect accesses outside a tensor there, nor uninitialised reads:
it forgets the rest of an allocation when the host writes a part of it. An address here consists of an allocation's number and an
offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rammer.device.manifest import Array
from rammer.ir.launches import Launch
from rammer.ir.program import RProgram
from rammer.runtime.host_memory import storage_view

import rammer_rocm.opened_unit
import rammer_rocm.resident
from rammer_rocm.constants import DeviceConstants, PlacedConstants, packed_form
from rammer_rocm.launch_executor import LaunchProgram
from rammer_rocm.memory import DeviceMemory
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.program_kernels import Pointer
from rammer_rocm.source import LaunchPart

#: Bits of the offset in an address.
PLACE = 48
#: Closed programs, retained for Oclgrind.
KEPT: list[SeparateProgram] = []


def lay_out(program: RProgram) -> DeviceMemory:
    """Return allocation numbers, shifted to their position in an address, for all buffers including the arena's."""
    return DeviceMemory({b.name: (i + 1) << PLACE for i, b in enumerate(program.buffers)}, 4)


class SeparateProgram(LaunchProgram):
    """A program whose addresses are ``number of allocation << PLACE | place``."""

    def parts_of(self, joined: Sequence[Launch]) -> list[LaunchPart]:
        """Return the parts of the kernel of these launches; every pointer has a buffer argument."""
        return [replace(part, inside=frozenset()) for part in super().parts_of(joined)]

    def placed(self, constants: Mapping[str, Array], shared: DeviceConstants) -> PlacedConstants:
        """Return the packed constants, each in a separate allocation."""
        arguments = [a for f in self.functions.values() for a in f.arguments]
        packings = {(a.tensor, a.packing.key): a.packing for a in arguments if a.packing is not None}
        places = {name: (0, (len(self.program.buffers) + 1 + i) << PLACE) for i, name in enumerate(packings)}
        self.packs = {places[name][1]: packed_form(constants[name[0]], p) for name, p in packings.items()}
        return PlacedConstants((), places, ())

    def allocate(self, context: Any, shared: bool) -> None:
        """Allocate every buffer separately."""
        sizes = {self.memory.buffers[b.name]: b.nbytes for b in self.program.buffers}
        sizes |= {address: how.form.nbytes for address, how in self.packs.items()}
        cl = import_opencl()
        self.parts = {a: cl.Buffer(context, cl.mem_flags.READ_WRITE, max(n, 1)) for a, n in sizes.items()}
        self.images = {a: np.zeros(n, np.uint8) for a, n in sizes.items()}
        self.buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, 4)

    def upload_constants(self, constants: Mapping[str, Array]) -> None:
        """Write the constants and their packed forms."""
        super().upload_constants(constants)
        for address, how in self.packs.items():
            how.given(lambda values, address=address: self.write_bytes(values, address))

    def pointer(self, argument: Pointer) -> tuple[Any, Any]:
        """Return the allocation and the byte offset of a kernel's argument."""
        _, address = self.argument_address(argument, self.memory.buffers)
        low = (1 << PLACE) - 1
        return self.parts[address & ~low], np.int64(address & low)

    def write(self, tensor: str, values: Array, blocking: bool = True) -> None:
        """Write host values to a tensor's storage; the whole allocation is written."""
        storage = self.program.storage[tensor]
        address = self.memory.buffers[storage.buffer]
        _tensor(self.images[address], self.program, tensor)[...] = values
        self.write_bytes(self.images[address], address)

    def write_bytes(self, values: Array, address: int, blocking: bool = True) -> None:
        if values.nbytes:
            import_opencl().enqueue_copy(self.queue, self.parts[address], np.ascontiguousarray(values))

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
    rammer_rocm.resident.lay_out = lay_out
    rammer_rocm.opened_unit.LaunchProgram = SeparateProgram
