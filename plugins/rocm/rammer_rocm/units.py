"""Finding OpenCL units and describing them as Hardware and VDevice."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import platformdirs

from rammer.device.manifest import Hardware
from rammer.errors import MissingDependency
from rammer.ir.device import MemoryLayer, VDevice
from rammer.profile.folder import why_shared

from rammer_rocm.icd import RUNTIME_PACKAGE, SUPPORT_PACKAGE, prepare_icd
from rammer_rocm.vnni import has_dots

#: vload_half and vstore_half belong to every OpenCL (specification 1.2, 6.12.7): float16 needs no cl_khr_fp16.
PRECISIONS = ("float32", "float16")
#: Bytes per second of two DDR channels, the least a desktop CPU has (JEDEC DDR4-2933, 23.5 GB/s each).
CPU_DRAM = 47e9
#: FLOP per cycle and lane of one fused multiply-add unit. Cores with two units (Intel server parts, Zen 5)
#: reach twice that; a low estimate only scales all predictions alike.
FLOP_PER_LANE = 2
#: Seconds of one wave boundary: a launch on an in-order queue (2 to 3 us on CPU runtimes, 5 us on GPUs).
CPU_LAUNCH, GPU_LAUNCH = 3e-6, 5e-6
#: On one core, which waits for no other: the next operator's first task (0.5 us measured on Zen 4).
ONE_CORE = 5e-7
#: By how much the share of time that a stitched operator is predicted to save is off (standard deviation): 420 random graphs on
#: a core of a Zen 4 CPU.
CPU_DOUBT = 0.066
#: Work-items that cooperate on one task on a GPU: four wavefronts of 64.
GPU_THREADS = 256


#: Whether the environment has been prepared.
_READY: Final = list[bool]()


def opencl() -> Any:
    """The pyopencl module, with every driver of this machine reachable. Raises MissingDependency."""
    if _READY and (module := sys.modules.get("pyopencl")) is not None:
        return module  # every call of a program asks; looking at the environment took a tenth of a small one's time
    prepare_icd()
    # A task on a CPU is one work-item: Intel's work-item vectoriser (mode 1 = off) could only cost build time, and
    # it cost four fifths of it.
    os.environ.setdefault("CL_CONFIG_CPU_VECTORIZER_MODE", "1")
    # Where it cannot write its cache, pyopencl looks this up without a default; "" makes it build without one.
    os.environ.setdefault("PYOPENCL_CACHE_FAILURE_FATAL", "")
    try:
        import pyopencl
    except ImportError as problem:
        raise MissingDependency("pyopencl", f"pip install pyopencl ({problem})") from problem
    _prepare_calls()
    _READY.append(True)
    return pyopencl


def _prepare_calls() -> None:
    """pyopencl keeps how kernels are called in the user's cache folder, from an import on that its first kernel makes; if
    nobody can write there, or others can, in a folder that is removed with the process."""
    folder = Path(platformdirs.user_cache_dir("pytools", "pytools"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        usable = not why_shared(folder)
    except OSError:
        usable = False
    if not usable:
        own, before = tempfile.TemporaryDirectory(prefix="rammer_"), os.environ.get("XDG_CACHE_HOME")
        atexit.register(own.cleanup)
        os.environ["XDG_CACHE_HOME"] = own.name
        importlib.import_module("pyopencl.invoker")
        os.environ.pop("XDG_CACHE_HOME")
        os.environ.update({"XDG_CACHE_HOME": before} if before is not None else {})


def units() -> list[Any]:
    """OpenCL devices: AMD GPUs, then other GPUs, then CPUs, then anything else. MissingDependency where there is none: any
    machine has a CPU, so it is a runtime that is missing."""
    cl = opencl()
    try:
        found = [device for platform in cl.get_platforms() for device in _devices(platform)]
    except cl.Error:
        found = []  # so the loader says that there is no platform
    if not found:
        raise MissingDependency(
            "an OpenCL runtime that has a unit",
            f"pip install {RUNTIME_PACKAGE} {SUPPORT_PACKAGE}, or a GPU's driver ({prepare_icd().why})",
        )
    return sorted(found, key=_rank)


def _devices(platform: Any) -> list[Any]:
    cl = opencl()
    try:
        return list(platform.get_devices())
    except cl.Error:
        return []


def kind_of(device: Any) -> str:
    """``gpu``, ``cpu`` or ``accelerator``."""
    types = opencl().device_type
    if device.type & types.GPU:
        return "gpu"
    return "cpu" if device.type & types.CPU else "accelerator"


def _rank(device: Any) -> int:
    kind = kind_of(device)
    amd = bool(re.search(r"\bAMD\b|Advanced Micro", f"{device.vendor} {device.platform.vendor}"))
    return {"gpu": 0 if amd else 1, "cpu": 2}.get(kind, 3)


def hardware(index: int, device: Any) -> Hardware:
    """What unit ``index`` really is."""
    detail = {
        "platform": device.platform.name.strip(),
        "platform_version": device.platform.version.strip(),
        "driver": device.driver_version.strip(),
        "opencl_c": device.opencl_c_version.strip(),
        "vendor": device.vendor.strip(),
        "compute_units": str(device.max_compute_units),
    }
    return Hardware(index, device.name.strip(), kind_of(device), int(device.global_mem_size), detail)


def virtual_device(device: Any) -> VDevice:
    """The VDevice of an OpenCL unit; ``source`` of each figure says where it comes from."""
    return _gpu(device) if kind_of(device) == "gpu" else _cpu(device)


def _cpu(device: Any) -> VDevice:
    cores, lanes = int(device.max_compute_units), max(1, int(device.native_vector_width_float))
    clock, clock_source = _clock(device)
    dots = has_dots(device, lanes)
    cache, cache_source = _l2_bytes(device)
    layers = (
        MemoryLayer("dram", "device", int(device.global_mem_size), CPU_DRAM, 64, "two DDR4-2933 channels"),
        # 32 bytes a cycle between L2 and L1 on every x86 core since Haswell (vendors' optimisation guides).
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
    )


def _gpu(device: Any) -> VDevice:
    groups = int(device.max_compute_units)
    threads = min(GPU_THREADS, int(device.max_work_group_size))
    clock = max(1, int(device.max_clock_frequency)) * 1e6
    layers = (
        # 16 bytes a cycle per compute unit: within 30% of gfx906, gfx90a and H200 data sheets.
        MemoryLayer("vram", "device", int(device.global_mem_size), groups * clock * 8, 64, "estimate per unit"),
        MemoryLayer("lds", "veu", int(device.local_mem_size), groups * clock * 128, 4, "CL_DEVICE_LOCAL_MEM_SIZE"),
        # 256 registers a work-item is the architectural limit of both AMD and NVIDIA.
        MemoryLayer("register", "thread", 255 * 4, groups * clock * 512, 4, "255 registers a work-item"),
    )
    return VDevice(
        name="opencl_gpu",
        description=device.name.strip(),
        veus=groups,
        layers=layers,
        # 64 lanes a compute unit (AMD CDNA and GCN instruction set manuals), one FMA each a cycle.
        flops=clock * 64 * FLOP_PER_LANE,
        launch=GPU_LAUNCH,
        threads=threads,
        vector=1,
        resident=groups,
        source="OpenCL device info",
        precisions=PRECISIONS,
    )


def _clock(device: Any) -> tuple[float, str]:
    """Clock in Hz; some CPU runtimes answer 0, then the kernel's figure, then 2 GHz."""
    if device.max_clock_frequency > 0:
        return device.max_clock_frequency * 1e6, "CL_DEVICE_MAX_CLOCK_FREQUENCY"
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)
    return (float(match.group(1)) * 1e6, "/proc/cpuinfo") if match else (2e9, "assumed 2 GHz")


def _l2_bytes(device: Any) -> tuple[int, str]:
    """Bytes of one core's L2."""
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, size = (folder / "level").read_text().strip(), (folder / "size").read_text().strip()
        except OSError:
            continue
        if level == "2" and re.fullmatch(r"\d+K", size):
            return int(size[:-1]) * 1024, str(folder)
    known = int(device.global_mem_cache_size)
    # Some runtimes report the shared last level: half a megabyte is what every recent core has at least.
    return min(known, 1 << 19) if known else 1 << 18, "CL_DEVICE_GLOBAL_MEM_CACHE_SIZE"
