"""Rammer's three measurements on a GPU, from one-operator programs replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rammer.device.manifest import Array, Binding
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.profile.probe import probe_program, random_inputs

from rammer_cuda.compile import compile_all
from rammer_cuda.source import translation_unit

if TYPE_CHECKING:
    from rammer_cuda.backend import CudaBackend

#: Replays of one measurement (the median counts), and copies of the operator chained in one replay: they make
#: the events' own resolution, about a microsecond, small.
REPLAYS, CHAIN = 9, 20


class CudaProfiler:
    """Measures on the backend's GPU; ``resources`` needs none."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend

    def prepare(self, options: Sequence[tuple[ROperator, Binding]]) -> None:
        """Compile the kernels of many candidates side by side, so that measuring finds them made."""
        kernels = {k.entry: k for k in (self.backend.writer.written(o, b) for o, b in options)}
        compile_all({e: translation_unit([k]) for e, k in kernels.items()}, self.backend.gpu.architecture)

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Seconds of a task while the other SMs idle, and with all of them busy.

        The first is a launch of one task as a link of a chain, less an empty link. The second is such that rounds of tasks at
        ``RKernel.task_time`` take what the whole operator takes: how its blocks share SMs is the hardware's choice, so it may be
        less than the first, where several blocks fit into an SM.
        """
        operator, sms = kernel.operator, self.backend.gpu.sms
        whole = self._link_time(operator, binding, operator.task_count)
        if operator.task_count <= 1:
            return whole, whole
        alone = self._link_time(operator, binding, 1)
        if kernel.shares >= sms:
            return alone, whole / -(-kernel.shares // sms)
        alone = min(alone, whole)  # a clock's error: fewer tasks of one launch take no longer
        return alone, alone + (whole - alone) * sms / kernel.shares

    def _link_time(self, operator: ROperator, binding: Binding, tasks: int) -> float:
        """Seconds of the first ``tasks`` of an operator, without those of an empty launch."""
        return max(self.operator_time(operator, binding, tasks) - self.backend.gpu.launch, 1e-9)

    def operator_time(self, operator: ROperator, binding: Binding, tasks: int | None = None) -> float:
        """Seconds of all tasks of one operator, or of its first ``tasks``, as a link of a chain, on fresh random values."""
        program, constants = probe_program(operator, binding, operator.task_count if tasks is None else tasks)
        loaded = self.backend.open_program(program, constants, CHAIN)
        try:
            loaded.run(random_inputs(program, np.random.default_rng()))
            return float(np.median([loaded.replay() for _ in range(REPLAYS)])) / CHAIN
        finally:
            loaded.close()

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
            return float(np.median([loaded.replay() for _ in range(iterations)]))
        finally:
            loaded.close()


def whole_program(operator: ROperator, binding: Binding) -> tuple[RProgram, dict[str, Array]]:
    """All tasks of ``operator``, one a row, and random constants."""
    return probe_program(operator, binding, operator.task_count)
