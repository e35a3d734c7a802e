"""Rammer's three measurements on a GPU, from one-operator programs replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from rammer.device.manifest import Array, Binding
from rammer.ir.operator import Resources, RKernel
from rammer.ir.program import RProgram
from rammer.profile.probe import probe_program, random_inputs

if TYPE_CHECKING:
    from rammer_cuda.backend import CudaBackend

#: Replays of one measurement; the median counts.
REPLAYS = 15


class CudaProfiler:
    """Measures on the backend's GPU; ``resources`` needs none."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Seconds of one task alone, and with one task on every vEU, less an empty node's time."""
        device = self.backend.vdevice
        times = []
        for tasks in (1, min(device.veus, kernel.operator.task_count)):
            program, constants = probe_program(kernel.operator, binding, tasks)
            times.append(max(self.program_time(program, constants, REPLAYS) - device.launch, 1e-9))
        return times[0], max(times[1], times[0])

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Registers, shared memory and spills, from ptxas."""
        return self.backend.resources(kernel.operator, binding)

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Median seconds of the graph on fresh random inputs, after two warm-up runs."""
        loaded: Any = self.backend.load(program, constants)
        try:
            rng = np.random.default_rng()
            inputs = random_inputs(program, rng)
            for _ in range(2):
                loaded.run(inputs)
            return median(loaded.replay() for _ in range(iterations))
        finally:
            loaded.close()


