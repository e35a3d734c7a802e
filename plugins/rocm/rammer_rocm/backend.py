"""The opened OpenCL device with its compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from rammer.codegen.writer import generator_hash
from rammer.device.execution_forms import ExecutionForm
from rammer.device.manifest import Array, Binding, Loaded, MachineCode, OpenOptions, Profiler, Recorded
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.tuning.kernel_probe import random_inputs, task_times

from rammer_rocm.constants import DeviceConstants
from rammer_rocm.families import OpenClKernels
from rammer_rocm.kernel_writing import WrittenKernels
from rammer_rocm.launch_forms import MIXED, WAVES, form_of
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.opened_unit import OpenClUnit, find_unit, is_single_launch
from rammer_rocm.persistent_executor import RESIDENT
from rammer_rocm.resources import measure_resources
from rammer_rocm.shipped_kernels import machine_code
from rammer_rocm.trace import TracedLaunches, TracedPersistent, TracedTable, record_trace
from rammer_rocm.units import virtual_device


class OpenClBackend(OpenClUnit, OpenClKernels):
    """An OpenCL unit with the kernel families that compile programs for it. ``executor``, ``cores`` and ``kernels`` are options
    of the device; families in ``excluded`` are not offered."""

    def __init__(self, options: OpenOptions, executor: str, excluded: tuple[str, ...], cores: int, kernels: str) -> None:
        device = find_unit(options, cores)
        vdevice = virtual_device(device, kernels)
        shared = vdevice.threads > 1 and is_single_launch(executor, device, vdevice)
        OpenClKernels.__init__(self, vdevice, excluded, RESIDENT if shared else 0)
        OpenClUnit.__init__(self, device, options.index, executor, vdevice)

    def suitable_forms(self, program: RProgram, binding: Binding) -> Sequence[ExecutionForm]:
        """Return the forms that may be the fastest for a program: the first one if each run has its own lengths."""
        return self.forms[:1] if any(o.skips for o in program.operators) else self.forms

    @property
    def written(self) -> WrittenKernels:
        """The kernels of programs that this unit compiles."""
        return WrittenKernels(self, self.builder)

    @cached_property
    def profiler(self) -> OpenClProfiler:
        """The profiler, which measures on this unit."""
        return OpenClProfiler(self.vdevice, self.load, None if self.vdevice.threads == 1 else self.resources)

    def resources(self, operator: ROperator, binding: Binding) -> Resources:
        """Return the GPU compiler's resource report for an operator's kernel."""
        return measure_resources(self, operator, binding, self.context, self.builder.options)

    @cached_property
    def fingerprint(self) -> str:
        """Device, driver, the text of the kernel generators, and the excluded families."""
        detail, without = self.hardware.detail, "".join(f" without {name}" for name in (*self.without, *self.excluded))
        driver = f"{detail['platform_version']} {detail['driver']}"
        return f"rocm {self.hardware.name} {self.vdevice.name} {driver} {generator_hash('rammer_rocm')}{without}"

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Return the program, compiled and resident."""
        return self.open_program(self.written, self.constants, program, constants)

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """Return the start and end of each task of a run, by row; kernels are built again with recording."""
        loaded: TracedLaunches | TracedPersistent | TracedTable
        if self.vdevice.threads == 1:
            loaded = TracedTable(self.written, self.constants, program, constants, self.single)
        else:
            form, given = form_of(program, self.forms), (self.written, self.constants, program, constants)
            loaded = TracedLaunches(*given) if form == WAVES else TracedPersistent(*given, form == MIXED)
        try:
            return Recorded(program, record_trace(loaded, inputs))
        finally:
            loaded.close()

    def export_code(self, program: RProgram, constants: Mapping[str, Array]) -> MachineCode:
        """Return the machine code of a program, with its packed constants."""
        own = DeviceConstants(self.queue, self.vdevice.threads == 1)  # as in ``load_code``
        loaded = self.open_program(self.written, own, program, constants)
        try:
            binary = loaded.binary.get_info(import_opencl().program_info.BINARIES)[0]
            return machine_code(loaded, self.vdevice.veus, binary, constants, self.code_target, self.builder.options)
        finally:
            loaded.close()


class OpenClProfiler(Profiler):
    """A profiler that measures through the backend's ``load``; ``needs`` returns a GPU compiler's resource report."""

    def __init__(
        self,
        device: VDevice,
        load: Callable[[RProgram, Mapping[str, Array]], Loaded],
        needs: Callable[[ROperator, Binding], Resources] | None = None,
    ) -> None:
        self.device, self.load, self.needs = device, load, needs

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Return the seconds of one task: with one row busy, and with every row busy (rows run different tasks)."""
        return task_times(self.load, kernel.operator, binding, self.device.veus)

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Return work-items, registers, spills and local bytes as the compiler reports them. For a CPU, return work-items and
        scratch bytes."""
        return kernel.resources if self.needs is None else self.needs(kernel.operator, binding)

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Return the median seconds of ``iterations`` runs on random inputs, after an uncounted one."""
        loaded = self.load(program, constants)
        try:
            inputs = random_inputs(program, np.random.default_rng(0))
            loaded.run(inputs)
            return float(np.median([loaded.run(inputs).seconds for _ in range(max(1, iterations))]))
        finally:
            loaded.close()
