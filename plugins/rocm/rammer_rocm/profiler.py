"""Rammer's three measurements on an OpenCL unit, by the wall clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import numpy as np

from rammer.device.manifest import Array, Binding, Loaded
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.profile.probe import random_inputs, task_times


class OpenClProfiler:
    """Measures through ``load``, the backend's own way to run a program; ``needs`` says what a GPU's compiler reports."""

    def __init__(
        self,
        device: VDevice,
        load: Callable[[RProgram, Mapping[str, Array]], Loaded],
        needs: Callable[[ROperator, Binding], Resources] | None = None,
    ) -> None:
        self.device, self.load, self.needs = device, load, needs

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Seconds of one task: with one row busy, and with every row busy (rows run different tasks)."""
        return task_times(self.load, kernel.operator, binding, self.device.veus)

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Work-items, registers, spills and local bytes as the compiler reports them; of a CPU work-items and scratch bytes."""
        return kernel.resources if self.needs is None else self.needs(kernel.operator, binding)

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Median seconds of ``iterations`` runs on random inputs, after one that is not counted."""
        loaded = self.load(program, constants)
        try:
            inputs = random_inputs(program, np.random.default_rng(0))
            loaded.run(inputs)
            return statistics.median(loaded.run(inputs).seconds for _ in range(max(1, iterations)))
        finally:
            loaded.close()
