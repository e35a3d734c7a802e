"""A complete rammer device in one file: the host computes every task with NumPy, two tasks at a time.

A plugin answers four questions, and this file answers them in order. How is the hardware structured (VDevice)? Which kernels
compute an operator (candidates, kernel)? How long do they run (Profiler)? How does a finished program run (load, run)? The core
decides everything else, independent of device names. Methods that compile import the compiler (`rammer-core`): compiled files
run without it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Array, Backend, Binding, Device, Hardware, Loaded, OpenOptions, Option, Profiler, RunResult
from rammer.errors import DeviceUnavailable
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import Resources, RKernel, ROperator, Written
from rammer.ir.program import RProgram, waves
from rammer.runtime.host_bound import HostBound
from rammer.runtime.host_memory import HostMemory

VEUS = 2  # tasks that run at a time: threads of this process
# `--option memory=BYTES` sets it. The core checks the value, whose type is that of the default.
MEMORY = Option("memory", 0, "Bytes that a program may use; 0: all of the machine's.", least=0)


# 1. The hardware as data. Layers are listed from the largest to the fastest memory. The figures rank tiles until tuning measures
# them, so they need not be exact. Capacity 0 means that tiles have no limit.
def virtual_device(memory: int) -> VDevice:
    layers = (MemoryLayer("ram", "device", memory, bandwidth=1e10), MemoryLayer("cache", "veu", 0, bandwidth=1e11))
    return VDevice("toy", "NumPy on the host", VEUS, layers, flops=1e10, launch=1e-4, dispatch=5e-5, resident=VEUS)


# 2. A program on the device: memory is allocated and constants are copied once, then it runs many times.
class ToyProgram(Loaded):
    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        self.program = program
        # Flat buffers with every tensor as a strided view; a program that needs more than `limit` is rejected.
        self.memory = HostMemory(program, constants, limit)
        self.pool = ThreadPoolExecutor(VEUS)
        # Tasks of one wave do not wait for each other. The table may have any number of rows: a wave keeps one list of tasks per
        # row, and a free thread runs the next list.
        self.waves = []
        for wave in waves(program):
            rows: dict[int, list[tuple[ROperator, int]]] = {}
            for placed in wave:
                operator = program.operator[placed.task.operator]
                rows.setdefault(placed.veu, []).append((operator, placed.task.index))
            self.waves.append(list(rows.values()))
        self.kernels = len(self.waves)  # launches of one run, for reports

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        self.memory.write_inputs(inputs)
        start = time.perf_counter()
        for rows in self.waves:
            list(self.pool.map(self.run_row, rows))  # list() waits for all rows and raises their exceptions
        seconds = time.perf_counter() - start
        return RunResult(self.memory.read_outputs(), seconds)

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> HostBound:
        """Bind fixed host arrays, which the core's adapter reads and writes around ``run``."""
        return HostBound(self.program, self.run, inputs, outputs, stream)

    def run_row(self, tasks: list[tuple[ROperator, int]]) -> None:
        for operator, index in tasks:
            self.memory.run_task(operator, index)

    def close(self) -> None:
        self.pool.shutdown()


# 3. The three measurements, by the clock. Devices without a clock use formulas.
class ToyProfiler(Profiler):
    def __init__(self, backend: ToyBackend) -> None:
        self.backend = backend

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Return the seconds of one task with one vEU busy, and with all vEUs busy."""
        from rammer.tuning.kernel_probe import task_times

        return task_times(self.backend.load, kernel.operator, binding, VEUS)

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        return kernel.resources

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        from rammer.tuning.kernel_probe import random_inputs

        loaded = self.backend.load(program, constants)
        inputs = random_inputs(program, np.random.default_rng(0))
        try:
            return statistics.median(loaded.run(inputs).seconds for _ in range(iterations))
        finally:
            loaded.close()


# 4. The open device, which joins the parts. Capabilities that the base class declares are optional.
class ToyBackend(Backend):
    def __init__(self, options: OpenOptions) -> None:
        if options.require not in ("", "cpu"):
            raise DeviceUnavailable(f"toy is a cpu, not a {options.require}")
        self.hardware = probe()[options.index]
        self.limit = options.value(MEMORY) or self.hardware.memory
        self.vdevice = virtual_device(self.limit)
        self.profiler = ToyProfiler(self)
        # Kernels tuned under one fingerprint are not reused under another.
        self.fingerprint = f"toy 1, NumPy {np.__version__}, {self.limit} bytes"

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Return promising tiles from the core's search. Devices with custom kernels add families."""
        from rammer.fusion.tile_search import candidates

        return candidates(operator, binding, self.vdevice, 4)

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Return a tiled operator with its source. Here that is its expressions; C-family devices call `rammer.codegen`."""
        from rammer.fusion.tile_traffic import task_cost

        cost = task_cost(operator, binding.types, self.vdevice)
        return RKernel(operator, lambda: Written(str(operator), Resources(threads=1)), cost.alone, cost.crowded)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        return ToyProgram(program, constants, self.limit)

    def close(self) -> None:
        """Free resources of the open device: a context or a queue, for example. The host needs none;
        programs own their threads."""


def probe() -> Sequence[Hardware]:
    """Return the available units: [] if none exist. Raise MissingDependency if a driver is missing."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [Hardware(0, "the host, by NumPy", "cpu", memory)]


@hookimpl
def rammer_devices() -> Sequence[Device]:
    # `api` is the API version that this was written for: a literal.
    return [Device("toy", "NumPy on the host", probe, ToyBackend, options=(MEMORY,), api=5)]
