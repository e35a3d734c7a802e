"""Descriptions of OpenCL devices as Hardware and VDevice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rammer.device.manifest import Hardware
from rammer.ir.device import MemoryLayer, VDevice

from rammer_rocm.build import nvidia_capability
from rammer_rocm.opencl_runtime import kind_of
from rammer_rocm.vnni import has_dots

#: vload_half and vstore_half are part of every OpenCL (specification 1.2, 6.12.7): float16 needs no cl_khr_fp16.
PRECISIONS = ("float32", "float16")
#: Bytes per second of two DDR channels, the minimum of a desktop CPU (JEDEC DDR4-2933, 23.5 GB/s each).
CPU_DRAM = 47e9
#: FLOP per cycle and lane of one fused multiply-add unit. Cores with two units (Intel server parts, Zen 5) reach twice that. A
#: low estimate only scales all predictions equally.
FLOP_PER_LANE = 2
#: Seconds of one wave boundary: a launch on an in-order queue (2 to 3 us on CPU runtimes, 5 us on GPUs).
CPU_LAUNCH, GPU_LAUNCH = 3e-6, 5e-6
#: The same on one core, which never waits for another: the next operator's first task (0.5 us measured on Zen 4).
ONE_CORE = 5e-7
#: Standard deviation of the error in the predicted fraction of time that stitching saves: 420 random graphs on a core of a Zen 4
#: CPU.
CPU_DOUBT = 0.066
#: Comparisons of a CPU's counting sort from which NumPy's sort and two further launches take less time.
SORT_STEPS = 1 << 17
#: AMD targets with matrix instructions (``matrix.matrix_instruction``).
MATRIX_TARGETS = ("gfx90a", "gfx942", "gfx1100")
#: The name of a virtual device with matrix instructions is this prefix and the target.
PREFIX = "opencl_"
#: Work-items that cooperate on one task on a GPU: four wavefronts of 64.
GPU_THREADS = 256


def make_hardware(index: int, device: Any) -> Hardware:
    """Return the Hardware description of OpenCL device ``index``."""
    detail = {
        "platform": device.platform.name.strip(),
        "platform_version": device.platform.version.strip(),
        "driver": device.driver_version.strip(),
        "opencl_c": device.opencl_c_version.strip(),
        "vendor": device.vendor.strip(),
        "compute_units": str(device.max_compute_units),
    }
    return Hardware(index, device.name.strip(), kind_of(device), int(device.global_mem_size), detail)


def device_name(target: str) -> str:
    """Return the name of the virtual device of an AMD target, as "gfx90a:sramecc+:xnack-", or of any other GPU."""
    name = target.partition(":")[0]
    return PREFIX + (name if name in MATRIX_TARGETS else "gpu")


def lower_precisions(name: str) -> tuple[str, ...]:
    """Return the formats to which a virtual device of this name can round operands of products."""
    return ("bfloat16",) if name.removeprefix(PREFIX) in MATRIX_TARGETS else ()


def amd_code_target(name: str, walk: str) -> str:
    """Return the target of machine code for an AMD GPU with this name, as "gfx90a:sramecc+:xnack-", or "" for other devices.
    ``walk`` names the kernels that run a program. A code object is for an architecture, and loads with any driver of it."""
    found = re.match(r"gfx[0-9a-f]+\b", name)
    return f"{found.group()} {walk}" if found else ""


def virtual_device(device: Any, kernels: str = "") -> VDevice:
    """Return the VDevice of an OpenCL device for its own kernels, or those of a "cpu" or a "gpu". ``source`` of each figure names
    its origin."""
    return _make_gpu(device) if (kernels or kind_of(device)) == "gpu" else _make_cpu(device)


def _make_cpu(device: Any) -> VDevice:
    cores, lanes = int(device.max_compute_units), max(1, int(device.native_vector_width_float))
    clock, clock_source = _clock_rate(device)
    dots = has_dots(device, lanes)
    cache, cache_source = _l2_bytes(device)
    layers = (
        MemoryLayer("dram", "device", int(device.global_mem_size), CPU_DRAM, 64, "two DDR4-2933 channels"),
        # 32 bytes per cycle between L2 and L1 on every x86 core since Haswell (vendors' optimisation guides).
        MemoryLayer("cache", "veu", cache, cores * clock * 32, 64, cache_source),
        MemoryLayer("register", "thread", 32 * 4 * lanes, cores * clock * 64, 4 * lanes, "32 vector registers"),
    )
    return VDevice(
        name="opencl_cpu",
        description=device.name.strip(),
        veus=cores,
        layers=layers,
        flops=clock * FLOP_PER_LANE * lanes,
        launch=CPU_LAUNCH if cores > 1 else ONE_CORE,
        threads=1,
        vector=lanes,
        resident=cores,
        source=f"OpenCL device info; {clock_source}",
        precisions=PRECISIONS,
        dots=clock * FLOP_PER_LANE * 4 * lanes if dots else 0.0,
        spills=True,
        doubt=CPU_DOUBT,
        sort_steps=SORT_STEPS,
    )


def _make_gpu(device: Any) -> VDevice:
    groups = int(device.max_compute_units)
    threads = min(GPU_THREADS, int(device.max_work_group_size))
    clock, name = max(1, int(device.max_clock_frequency)) * 1e6, device_name(device.name.strip())
    layers = (
        # 16 bytes per cycle and compute unit: within 30% of gfx906, gfx90a and H200 data sheets.
        MemoryLayer("vram", "device", int(device.global_mem_size), groups * clock * 8, 64, "estimate per unit"),
        MemoryLayer("lds", "veu", int(device.local_mem_size), groups * clock * 128, 4, "CL_DEVICE_LOCAL_MEM_SIZE"),
        # 256 registers per work-item is the architectural limit of both AMD and NVIDIA.
        MemoryLayer("register", "thread", 255 * 4, groups * clock * 512, 4, "255 registers a work-item"),
    )
    return VDevice(
        name=name,
        description=device.name.strip(),
        veus=groups,
        layers=layers,
        flops=clock * _gpu_lanes(device) * FLOP_PER_LANE,
        launch=GPU_LAUNCH,
        threads=threads,
        vector=1,
        resident=groups,
        source="OpenCL device info",
        precisions=PRECISIONS + lower_precisions(name),
    )


def _gpu_lanes(device: Any) -> int:
    """Return the fp32 lanes of a compute unit, one FMA each per cycle: 64 (AMD CDNA and GCN instruction set manuals), but 128 on
    NVIDIA's since compute capability 8.6 (CUDA C++ programming guide, "Compute Capabilities")."""
    return 128 if nvidia_capability(device) > (8, 0) else 64


def _clock_rate(device: Any) -> tuple[float, str]:
    """Return the clock in Hz and its source. If the runtime reports 0, use /proc/cpuinfo, else 2 GHz."""
    if device.max_clock_frequency > 0:
        return device.max_clock_frequency * 1e6, "CL_DEVICE_MAX_CLOCK_FREQUENCY"
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    return (float(match.group(1)) * 1e6, "/proc/cpuinfo") if match else (2e9, "assumed 2 GHz")


def _l2_bytes(device: Any) -> tuple[int, str]:
    """Return the bytes of one core's L2, and the source."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, size = (folder / "level").read_text().strip(), (folder / "size").read_text().strip()
        except OSError:
            continue
        if level == "2" and re.fullmatch(r"\d+K", size):
            return int(size[:-1]) * 1024, str(folder)
    known = int(device.global_mem_cache_size)
    # Some runtimes report the shared last level; every recent core has at least half a megabyte.
    return min(known, 1 << 19) if known else 1 << 18, "CL_DEVICE_GLOBAL_MEM_CACHE_SIZE"
