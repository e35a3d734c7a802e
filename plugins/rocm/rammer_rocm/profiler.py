"""Rammer's three measurements on an OpenCL unit, by the wall clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping

import numpy as np

from rammer.device.manifest import Array, Binding, Loaded
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import Buffer, BufferKind, Port, RProgram, Task
from rammer.profile.probe import own_buffer
from rammer.runtime.host_memory import random_inputs, random_values

from rammer_rocm.kernels import task_function

#: Seconds that one timed launch should take at least, so that the launch itself is about 1%.
SPAN = 5e-4
REPEATS = 8
#: Upper limit of tasks in a timed row.
LONGEST_ROW = 20_000


class OpenClProfiler:
    """Measures through ``load``, the backend's own way to run a program."""

    def __init__(self, device: VDevice, load: Callable[[RProgram, Mapping[str, Array]], Loaded]) -> None:
        self.device, self.load = device, load

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Seconds of one task: with one row busy, and with every row busy (rows run different tasks)."""
        return self._seconds(kernel.operator, binding, 1), self._seconds(kernel.operator, binding, self.device.veus)

    def _seconds(self, operator: ROperator, binding: Binding, rows: int) -> float:
        tasks = max(1, -(-operator.task_count // rows))
        once = self._timed(operator, binding, rows, tasks)
        if once * tasks >= SPAN:
            return once
        wanted = math.ceil(SPAN / max(once, 1e-9))
        return self._timed(operator, binding, rows, min(max(wanted, tasks), LONGEST_ROW))

    def _timed(self, operator: ROperator, binding: Binding, rows: int, length: int) -> float:
        """Seconds a task when ``rows`` rows run ``length`` tasks each; the best of a few runs."""
        program, rng = repeated(operator, binding, rows, length, self.device.veus), np.random.default_rng(0)
        loaded = self.load(program, random_arrays(program, "constant", rng))
        try:
            inputs = random_inputs(program, rng)
            return min(loaded.run(inputs).seconds for _ in range(REPEATS)) / length
        finally:
            loaded.close()

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Work-items and scratch bytes; OpenCL tells neither registers nor spills of a loaded kernel."""
        function = task_function(kernel.operator, binding, self.device)
        return Resources(threads=self.device.threads, local_bytes=function.scratch)

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Median seconds of ``iterations`` runs on random inputs, after one that is not counted."""
        loaded = self.load(program, constants)
        try:
            inputs = random_inputs(program, np.random.default_rng(0))
            loaded.run(inputs)
            return statistics.median(loaded.run(inputs).seconds for _ in range(max(1, iterations)))
        finally:
            loaded.close()


def repeated(operator: ROperator, binding: Binding, rows: int, length: int, veus: int) -> RProgram:
    """A program whose first ``rows`` rows each run ``length`` tasks of ``operator``, cycling through them."""
    names = (*operator.inputs, *operator.outputs)
    buffers, storages = [], []
    for name in names:
        moved, size = own_buffer(binding.storages[name], f"b_{name}")
        storages.append(moved)
        kind: BufferKind = "constant" if name in binding.constants else "input"
        kind = "output" if name in operator.outputs else kind
        buffers.append(Buffer(f"b_{name}", binding.types[name].dtype, size, kind))
    count = operator.task_count
    table = tuple(
        tuple(Task(operator.name, (v + i * rows) % count) for i in range(length)) if v < rows else () for v in range(veus)
    )
    inputs = tuple(Port(n, n) for n in operator.inputs if n not in binding.constants)
    outputs = tuple(Port(n, n) for n in operator.outputs)
    return RProgram(
        "profile",
        "profile",
        inputs,
        outputs,
        tuple(buffers),
        tuple(storages),
        (operator,),
        (),
        table,
        precision=binding.precision,
    )


def random_arrays(program: RProgram, kind: BufferKind, rng: np.random.Generator) -> dict[str, Array]:
    """Random values for the tensors of ``kind`` buffers."""
    return {
        s.tensor: random_values(program.types[s.tensor], rng) for s in program.storages if program.buffer[s.buffer].kind == kind
    }
