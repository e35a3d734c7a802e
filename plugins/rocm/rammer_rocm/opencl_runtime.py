"""The OpenCL runtime of this machine: pyopencl with every driver, and the units that it finds."""

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

from rammer.cache.cache_folder import why_shared
from rammer.errors import MissingDependency

from rammer_rocm.icd import RUNTIME_PACKAGE, SUPPORT_PACKAGE, prepare_icd

#: Whether the environment has been prepared.
_READY: Final = list[bool]()


def import_opencl() -> Any:
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
    cl = import_opencl()
    try:
        found = [device for platform in cl.get_platforms() for device in _devices(platform)]
    except cl.Error:
        found = []  # so the loader says that there is no platform
    if not found:
        raise MissingDependency(
            "an OpenCL runtime that has a unit",
            f"pip install {RUNTIME_PACKAGE} {SUPPORT_PACKAGE}, or a GPU's driver ({prepare_icd().why})",
        )
    return sorted(found, key=_device_rank)


def _devices(platform: Any) -> list[Any]:
    cl = import_opencl()
    try:
        return list(platform.get_devices())
    except cl.Error:
        return []


def kind_of(device: Any) -> str:
    """``gpu``, ``cpu`` or ``accelerator``."""
    types = import_opencl().device_type
    if device.type & types.GPU:
        return "gpu"
    return "cpu" if device.type & types.CPU else "accelerator"


def _device_rank(device: Any) -> int:
    kind = kind_of(device)
    amd = bool(re.search(r"\bAMD\b|Advanced Micro", f"{device.vendor} {device.platform.vendor}"))
    return {"gpu": 0 if amd else 1, "cpu": 2}.get(kind, 3)
