"""The OpenCL runtime of this machine: pyopencl with every driver, and the available devices."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import platformdirs

from rammer.cache import why_shared
from rammer.errors import MissingDependency

from rammer_rocm.icd import RUNTIME_PACKAGE, SUPPORT_PACKAGE, prepare_icd

#: Non-empty once the environment has been prepared.
_READY: Final = list[bool]()


def import_opencl() -> Any:
    """Return the pyopencl module, with every driver of this machine reachable. Raises MissingDependency."""
    if _READY and (module := sys.modules.get("pyopencl")) is not None:
        return module  # every program call gets here; checking the environment took a tenth of a small call's time
    prepare_icd()
    # A task on a CPU is one work-item, so Intel's work-item vectoriser (mode 1 = off) does not help. It took four fifths of the
    # build time.
    os.environ.setdefault("CL_CONFIG_CPU_VECTORIZER_MODE", "1")
    # If the cache is not writable, pyopencl reads this variable without a default; "" makes it build without a cache.
    os.environ.setdefault("PYOPENCL_CACHE_FAILURE_FATAL", "")
    try:
        import pyopencl
    except ImportError as problem:
        raise MissingDependency("pyopencl", f"pip install pyopencl ({problem})") from problem
    _prepare_calls()
    _READY.append(True)
    return pyopencl


def _prepare_calls() -> None:
    """Import pyopencl's cache of kernel invokers with a safe cache folder.

    pyopencl stores the invokers in the user's cache folder from its first kernel on. If that folder is not writable, or other
    users can write to it, a temporary folder is used. The process removes that folder on exit."""
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
    """Return the OpenCL devices: AMD GPUs, then other GPUs, then CPUs, then others. Raises MissingDependency if the list is
    empty: every machine has a CPU, so a runtime is missing."""
    cl = import_opencl()
    try:
        found = [device for platform in cl.get_platforms() for device in _devices(platform)]
    except cl.Error:
        found = []  # the loader's report of a missing platform
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
    """Return ``gpu``, ``cpu`` or ``accelerator`` for a device."""
    types = import_opencl().device_type
    if device.type & types.GPU:
        return "gpu"
    return "cpu" if device.type & types.CPU else "accelerator"


def _device_rank(device: Any) -> int:
    kind = kind_of(device)
    amd = bool(re.search(r"\bAMD\b|Advanced Micro", f"{device.vendor} {device.platform.vendor}"))
    return {"gpu": 0 if amd else 1, "cpu": 2}.get(kind, 3)


@cache
def _enqueue_function() -> Any:
    """Return the OpenCL function that launches a kernel, from the loader that pyopencl is linked to."""
    import_opencl()
    function = ctypes.CDLL(importlib.import_module("pyopencl._cl").__file__).clEnqueueNDRangeKernel
    return function


class QueuedKernel:
    """A kernel with all arguments set, for launches of ``items`` work-items in groups of ``threads``.

    pyopencl creates an event object for every launch, which costs time of the host and of a GPU. Nothing waits for these events,
    so ``launch`` calls OpenCL without one."""

    def __init__(self, queue: Any, kernel: Any, items: int, threads: int) -> None:
        self.queue, self.kernel = queue, kernel  # the addresses below are valid as long as these objects
        self._sizes = [(ctypes.c_size_t * 1)(n) for n in (items, threads)]
        self._enqueue, word, pointer = _enqueue_function(), ctypes.c_uint, ctypes.c_void_p
        sizes = [pointer(ctypes.addressof(n)) for n in self._sizes]
        # Objects of C's types are passed faster than values that a declaration converts.
        self._arguments = pointer(queue.int_ptr), pointer(kernel.int_ptr), word(1), None, *sizes, word(0), None, None

    def launch(self) -> None:
        """Queue one launch. Raises an error of pyopencl."""
        status = self._enqueue(*self._arguments)
        if status:
            cl = import_opencl()
            raise cl.RuntimeError(f"clEnqueueNDRangeKernel failed: {cl.status_code.to_string(status)}")
