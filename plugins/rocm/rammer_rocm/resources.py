"""Registers and memory of one task, if the runtime reports them: GPUs of NVIDIA and AMD.

OpenCL reports only the local bytes of a built kernel. NVIDIA's compiler writes registers and spills into the build log on request
(``cl_nv_compiler_options``). AMD's compiler stores them in the code object, as MessagePack under names of the AMDGPU backend
("Code Object V4 Metadata", LLVM's AMDGPU usage). A CPU's runtime reports neither.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, Final

from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, ROperator

from rammer_rocm.dialect import dialect_of
from rammer_rocm.families import OpenClKernels
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.source import LaunchPart, launch_text

#: The option that requests NVIDIA's report, and the extension that provides it.
_VERBOSE: Final = ("-cl-nv-verbose", "cl_nv_compiler_options")
#: A whole number in MessagePack: up to 127 in one byte, otherwise after a byte that gives its size.
_NUMBER: Final = rb"(?:([\x00-\x7f])|\xcc(.)|\xcd(..)|\xce(....))"


def measure_resources(
    kernels: OpenClKernels, operator: ROperator, binding: Binding, context: Any, options: tuple[str, ...]
) -> Resources:
    """Return the resources of a launch of only this operator's tasks. It is rebuilt, since a cached binary has no log."""
    cl, device = import_opencl(), context.devices[0]
    vdevice: VDevice = kernels.vdevice
    function = kernels.writer.written(operator, binding)
    text = launch_text([(LaunchPart(function),)], dialect_of(vdevice))
    asked = [_VERBOSE[0]] if _VERBOSE[1] in device.extensions.split() else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report is output, which makes pyopencl warn
        program = cl.Program(context, text).build([*options, *asked], cache_dir=False)
    info, walk = cl.kernel_work_group_info, cl.Kernel(program, "launch_0")
    local = int(walk.get_work_group_info(info.LOCAL_MEM_SIZE, device))
    found = of_log(program.get_build_info(device, cl.program_build_info.LOG) or "") or of_code_object(bytes(program.binaries[0]))
    registers, spills, scalar = found or (-1, -1, -1)
    return Resources(function.threads, registers, local, spills, scalar)


def of_log(log: str) -> tuple[int, int, int] | None:
    """Parse NVIDIA's build log: registers per thread, spilled registers (of 4 bytes) and -1; None without a report."""
    used = re.findall(r"Used (\d+) registers", log)
    if not used:
        return None
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    return max(map(int, used)), max(map(int, spilled), default=0) // 4, -1


def of_code_object(binary: bytes) -> tuple[int, int, int] | None:
    """Parse an AMD code object: vector registers, spilled registers and scalar registers; None for another binary."""

    def figure(name: str) -> int | None:
        found = re.search(re.escape(name.encode()) + _NUMBER, binary, re.DOTALL)
        return int.from_bytes(next(g for g in found.groups() if g is not None), "big") if found else None

    vector = figure(".vgpr_count")
    if vector is None:
        return None
    spills = (figure(".vgpr_spill_count") or 0) + (figure(".sgpr_spill_count") or 0)
    scratch = figure(".private_segment_fixed_size") or 0
    return vector + (figure(".agpr_count") or 0), max(spills, scratch // 4), figure(".sgpr_count") or -1
