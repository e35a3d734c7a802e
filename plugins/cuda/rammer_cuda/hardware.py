"""GPU detection through the driver."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rammer.device.manifest import Hardware
from rammer.errors import MissingDependency

from rammer_cuda.driver import HINT, check_result, import_driver
from rammer_cuda.gpu import Gpu


def gpu_count() -> int:
    """Return the number of GPUs, 0 if the driver finds none. Raises MissingDependency without the driver."""
    api = import_driver()
    try:
        status = api.cuInit(0)[0]
    except RuntimeError as problem:  # cuda.bindings raises this when libcuda is absent
        raise MissingDependency(
            "libcuda.so.1, which was not found", "install the NVIDIA driver; compiling with --target sm_90a needs none"
        ) from problem
    return int(check_result(api.cuDeviceGetCount(), "counting GPUs")) if int(status) == 0 else 0


def probe_gpus() -> list[Hardware]:
    """Return one Hardware per GPU. Raises MissingDependency without the driver, or with a GPU but without CuPy."""
    import_driver()
    with ThreadPoolExecutor(1) as other:  # the driver starts in 0.1 s, during the 0.2 s of CuPy's import
        found = other.submit(gpu_count)
        with suppress(Exception):  # with a GPU, the import below reports the error
            import_cupy()
        count = found.result()
    if count:
        import_cupy()
    return [_query_hardware(i) for i in range(count)]


def create_context(index: int) -> threading.Thread:
    """Start to create the context of GPU ``index`` on a thread (0.13 s), while models are read. Join the thread before using the
    GPU. If the creation fails, that use reports the error."""

    def create() -> None:
        module = import_cupy()
        with suppress(module.cuda.runtime.CUDARuntimeError), module.cuda.Device(index):
            module.cuda.runtime.free(0)

    thread = threading.Thread(target=create, name="rammer-cuda-context")
    thread.start()
    return thread


def import_cupy() -> Any:
    """Import the module ``cupy``. Raises MissingDependency without it."""
    try:
        import cupy as module
    except ImportError as problem:
        raise MissingDependency("cupy", HINT) from problem
    return module


class Unit:
    """GPU ``id``. Inside ``with unit:`` it is the thread's current device with a current context.

    CuPy's ``Device`` does nothing in a thread whose device already has that number, as GPU 0 has in every new thread. A driver
    call, which creates no context, would then fail."""

    def __init__(self, index: int) -> None:
        self.id, self._runtime, self._own = index, import_cupy().cuda.runtime, threading.local()

    def __enter__(self) -> Unit:
        before = self._own.__dict__.setdefault("before", [])
        before.append(self._runtime.getDevice())
        self._runtime.setDevice(self.id)
        return self

    def __exit__(self, *problem: object) -> None:
        before = self._own.before.pop()
        if before != self.id:
            self._runtime.setDevice(before)

    def multiprocessors(self) -> int:
        """Return the number of SMs."""
        return device_attribute(self.id, "MULTIPROCESSOR_COUNT")


def device_attribute(index: int, name: str) -> int:
    """Return a device attribute by its driver name, without the ``CU_DEVICE_ATTRIBUTE_`` prefix."""
    api = import_driver()
    key = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(
        check_result(api.cuDeviceGetAttribute(key, check_result(api.cuDeviceGet(index), "finding a GPU")), f"reading {name}")
    )


def _query_hardware(index: int) -> Hardware:
    api = import_driver()
    handle = check_result(api.cuDeviceGet(index), "finding a GPU")
    name = check_result(api.cuDeviceGetName(128, handle), "reading a GPU's name").split(b"\0")[0].decode()
    memory = int(check_result(api.cuDeviceTotalMem(handle), "reading a GPU's memory"))
    version = int(check_result(api.cuDriverGetVersion(), "reading the driver's version"))
    detail = {"driver CUDA": f"{version // 1000}.{version % 1000 // 10}", "architecture": device_architecture(index)}
    return Hardware(index, name, "gpu", memory, detail)


def device_architecture(index: int) -> str:
    """Return the architecture, such as ``sm_90a``: the architecture-specific target if it exists."""
    major, minor = device_attribute(index, "COMPUTE_CAPABILITY_MAJOR"), device_attribute(index, "COMPUTE_CAPABILITY_MINOR")
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def gpu_of(unit: Hardware) -> Gpu:
    """Return the figures of a GPU from ``probe_gpus``, all read from the driver."""
    index = unit.index
    # Double data rate: two transfers per memory clock (kHz); the bus width is in bits.
    bandwidth = 2e3 * device_attribute(index, "MEMORY_CLOCK_RATE") * device_attribute(index, "GLOBAL_MEMORY_BUS_WIDTH") / 8
    return Gpu(
        unit.detail["architecture"],
        unit.name,
        sms=device_attribute(index, "MULTIPROCESSOR_COUNT"),
        clock=1e3 * device_attribute(index, "CLOCK_RATE"),
        shared=device_attribute(index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2=device_attribute(index, "L2_CACHE_SIZE"),
        memory=unit.memory,
        bandwidth=bandwidth,
        source="CUDA driver",
        registers=device_attribute(index, "MAX_REGISTERS_PER_MULTIPROCESSOR"),
        threads=device_attribute(index, "MAX_THREADS_PER_MULTIPROCESSOR"),
    )
