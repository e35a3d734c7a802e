"""Memory of a program on an OpenCL device: buffer addresses, and memory that the host shares. On a CPU whose runtime has shared
virtual memory, reading or writing a tensor is an assignment. A queued copy needs microseconds."""

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
    """Byte addresses of program buffers inside a program's device buffer, and its size."""

    buffers: Mapping[str, int]
    nbytes: int


def lay_out(program: RProgram) -> DeviceMemory:
    """Assign addresses, in order: constants that are outputs or moved; arena; inputs, outputs and states."""
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
            # A page between buffers: the innermost cache of AMD's cores predicts its way by a hash of addresses. Lines at equal
            # positions of two tensors with a distance of 1.5 MiB evict each other (Lipp et al., "Take A Way", AsiaCCS 2020).
            place = round_up(place + buffer.nbytes, PART) + PART
    return DeviceMemory(buffers, place + SLACK)


def shared_memory(context: Any, nbytes: int, on_cpu: bool, idle: bool) -> tuple[Any, Array | None]:
    """Return a new buffer and its bytes as a host array. The array is None on a GPU or if the device cannot share memory.
    ``idle``: no kernel runs while the host reads or writes. OpenCL requires this for fine-grained memory."""
    cl = import_opencl()
    flags = cl.mem_flags
    if on_cpu and idle and fine_grained(context.devices[0]):
        try:
            wide = system_wide(context.devices[0])
            host = host_bytes(nbytes) if wide else cl.fsvm_empty(context, (nbytes,), np.uint8)
            return cl.Buffer(context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=host), host
        except cl.Error:  # if memory is insufficient, the allocation below reports it
            pass
    # On a CPU the runtime's allocation makes copies plain memcpys; on a GPU it would be host memory.
    return cl.Buffer(context, flags.READ_WRITE | (flags.ALLOC_HOST_PTR if on_cpu else 0), nbytes), None


def system_wide(device: Any) -> bool:
    """Return True if kernels may use any host address."""
    return _has_shared_memory(device, import_opencl().device_svm_capabilities.FINE_GRAIN_SYSTEM)


def fine_grained(device: Any) -> bool:
    """Return True if host and device may alternately access one allocation without mapping it."""
    return _has_shared_memory(device, import_opencl().device_svm_capabilities.FINE_GRAIN_BUFFER)


def _has_shared_memory(device: Any, capability: int) -> bool:
    """Return True if a device supports one kind of OpenCL shared virtual memory, ``capability``."""
    try:
        return bool(device.svm_capabilities & capability)
    except import_opencl().Error:  # a runtime of OpenCL 1.2
        return False
