"""Memory of an OpenCL unit that the host sees, too: on a CPU whose runtime has shared virtual memory, reading and writing a
tensor is then an assignment, where a queued copy takes microseconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer.device.manifest import Array

from rammer_rocm.units import opencl


def shared_memory(context: Any, nbytes: int, on_cpu: bool, idle: bool) -> tuple[Any, Array | None]:
    """A new buffer, and its bytes as the host sees them: None on a GPU, and where that is not to be had.

    ``idle``: whenever the host reads or writes, no kernel runs; only then may it, says OpenCL of fine-grained memory.
    """
    cl = opencl()
    flags = cl.mem_flags
    if on_cpu and idle and fine_grained(context.devices[0]):
        try:
            host = cl.fsvm_empty(context, (nbytes,), np.uint8)
            return cl.Buffer(context, flags.READ_WRITE | flags.USE_HOST_PTR, hostbuf=host), host
        except cl.Error:  # where it is memory that is short, what follows says so
            pass
    # On a CPU the runtime's own allocation makes copies plain memcpys; on a GPU it would be host memory.
    return cl.Buffer(context, flags.READ_WRITE | (flags.ALLOC_HOST_PTR if on_cpu else 0), nbytes), None


def fine_grained(device: Any) -> bool:
    """Whether host and device may both read and write one allocation, in turns, without mapping it."""
    cl = opencl()
    try:
        return bool(device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_BUFFER)
    except cl.Error:  # a runtime of OpenCL 1.2
        return False
