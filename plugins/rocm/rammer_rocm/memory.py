"""A program's memory on an OpenCL unit: where its buffers are, and memory that the host sees, too.

On a CPU whose runtime has shared virtual memory, reading and writing a tensor is then an assignment, where a queued copy takes
microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.device.manifest import Array
from rammer.ir.program import RProgram

from rammer_rocm.constants import PART, SLACK, host_bytes, round_up
from rammer_rocm.opencl_runtime import import_opencl


@dataclass(frozen=True)
class DeviceMemory:
    """Byte addresses of program buffers inside a program's own buffer on the device, and its size."""

    buffers: Mapping[str, int]
    nbytes: int


def lay_out(program: RProgram) -> DeviceMemory:
    """Addresses: constants that are outputs or move, arena, inputs, outputs."""
    outputs = {program.storage[port.tensor].buffer for port in program.outputs}
    outputs |= program.moved_constants
    place, buffers = 0, dict[str, int]()
    for buffer in program.buffers:
        if buffer.kind == "constant" and buffer.name in outputs:
            buffers[buffer.name] = place
            place += round_up(buffer.nbytes, 64)
    place = round_up(place, PART)
    for buffer in program.buffers:
        if buffer.kind == "arena":
            buffers[buffer.name] = place + buffer.offset
    place = round_up(place + program.arena_bytes, PART)
    for buffer in program.buffers:
        if buffer.kind in ("input", "output", "state"):
            buffers[buffer.name] = place
            # A page between them: the innermost cache of AMD's cores guesses its way by a hash of addresses, and lines at equal
            # places of two tensors that lie 1.5 MiB apart push each other out (Lipp et al., "Take A Way", AsiaCCS 2020).
            place = round_up(place + buffer.nbytes, PART) + PART
    return DeviceMemory(buffers, place + SLACK)


def shared_memory(context: Any, nbytes: int, on_cpu: bool, idle: bool) -> tuple[Any, Array | None]:
    """A new buffer, and its bytes as the host sees them: None on a GPU, and where that is not to be had.

    ``idle``: whenever the host reads or writes, no kernel runs; only then may it, says OpenCL of fine-grained memory.
    """
    cl = import_opencl()
    flags = cl.mem_flags
    if on_cpu and idle and fine_grained(context.devices[0]):
        try:
            wide = system_wide(context.devices[0])
            host = host_bytes(nbytes) if wide else cl.fsvm_empty(context, (nbytes,), np.uint8)
            return cl.Buffer(context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=host), host
        except cl.Error:  # where it is memory that is short, what follows says so
            pass
    # On a CPU the runtime's own allocation makes copies plain memcpys; on a GPU it would be host memory.
    return cl.Buffer(context, flags.READ_WRITE | (flags.ALLOC_HOST_PTR if on_cpu else 0), nbytes), None


def system_wide(device: Any) -> bool:
    """Whether kernels may use any address of the host's."""
    return _has_shared_memory(device, import_opencl().device_svm_capabilities.FINE_GRAIN_SYSTEM)


def fine_grained(device: Any) -> bool:
    """Whether host and device may both read and write one allocation, in turns, without mapping it."""
    return _has_shared_memory(device, import_opencl().device_svm_capabilities.FINE_GRAIN_BUFFER)


def _has_shared_memory(device: Any, capability: int) -> bool:
    """Whether a device has one of OpenCL's ways to share virtual memory."""
    try:
        return bool(device.svm_capabilities & capability)
    except import_opencl().Error:  # a runtime of OpenCL 1.2
        return False
