"""The opened OpenCL device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from rammer.codegen.writer import generator_hash
from rammer.device.arrays import HostRoom
from rammer.device.manifest import Array, Backend, Binding, Hardware, IterationCost, Loaded, OpenOptions, Profiler, Recorded
from rammer.errors import BadInput, DeviceUnavailable
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.tuning.kernel_probe import random_inputs, task_times

from rammer_rocm.build import Builder, build_options, language_version
from rammer_rocm.constants import DeviceConstants
from rammer_rocm.families import OpenClKernels
from rammer_rocm.launch_executor import LaunchProgram
from rammer_rocm.opencl_runtime import import_opencl, kind_of, units
from rammer_rocm.persistent_executor import RESIDENT, PersistentProgram
from rammer_rocm.placement import ROOM
from rammer_rocm.resources import measure_resources
from rammer_rocm.table_executor import TableProgram
from rammer_rocm.trace import TracedLaunches, TracedPersistent, TracedTable, record_trace
from rammer_rocm.units import make_hardware, virtual_device


def open_backend(options: OpenOptions, executor: str, winograd: bool, cores: int, kernels: str) -> Backend:
    """Open the unit that ``options`` name; the others are options of the device. Raises DeviceUnavailable if the unit is missing
    or of another kind, and BadInput if ``cores`` are given for a GPU."""
    found = units()
    if options.index >= len(found):
        raise DeviceUnavailable(
            f"rocm:{options.index} does not exist, {len(found)} OpenCL unit(s) found",
            hint="on a machine without a GPU driver: pip install intel-opencl-rt intel-cmplr-lib-rt",
        )
    device = found[options.index]
    if options.require and kind_of(device) != options.require:
        raise DeviceUnavailable(
            f"rocm:{options.index} is a {kind_of(device)} ({device.name.strip()}), not a {options.require}",
            hint="leave out --require, or name another unit (rammer devices lists them)",
        )
    return OpenClBackend(part_of(device, cores), options.index, executor, () if winograd else ("winograd",), kernels)


def part_of(device: Any, cores: int) -> Any:
    """Return a part of a CPU with at most so many cores, or the device itself for 0. Raises BadInput for a GPU."""
    if not cores or (kind_of(device) == "cpu" and cores >= device.max_compute_units):
        return device
    if kind_of(device) != "cpu":
        raise BadInput(f"cores={cores}: {device.name.strip()} is not a CPU", "--option cores", "leave it out")
    cl = import_opencl()
    try:
        (part,) = device.create_sub_devices([cl.device_partition_property.BY_COUNTS, cores])
    except cl.Error as problem:
        raise DeviceUnavailable(
            f"{device.name.strip()} cannot be divided: {problem}", hint="leave out the option cores"
        ) from problem
    return part


class OpenClBackend(OpenClKernels):
    """An OpenCL unit with a context and an in-order queue."""

    def __init__(self, device: Any, index: int, executor: str, excluded: tuple[str, ...], kernels: str = "") -> None:
        cl = import_opencl()
        vdevice = virtual_device(device, kernels)
        if vdevice.threads > 1:  # groups of a device that is no GPU may run one after another
            self.single = executor == "single" or (not executor and kind_of(device) == "gpu")
        else:
            self.single = _is_single_launch(executor, language_version(device) >= (2, 0))
        super().__init__(vdevice, excluded, RESIDENT if vdevice.threads > 1 and self.single else 0)
        self.hardware: Hardware = make_hardware(index, device)
        try:
            self.context = cl.Context([device])
            self.queue = cl.CommandQueue(self.context)
            self.builder = Builder(self.context, build_options(device))
            self.constants = DeviceConstants(self.queue, self.vdevice.threads == 1)
        except cl.Error as problem:
            raise DeviceUnavailable(f"{device.name.strip()} cannot be opened: {problem}") from problem

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

    @cached_property
    def iteration_cost(self) -> IterationCost:
        """The cost between iterations, which are queued in order, or all run in one launch that copies in steps that are not
        skipped.

        Measured on a core of an EPYC: 3 us between two iterations, 1.2 us for a step of an LSTM of 64 units. A row of its product
        with the inputs, which is not skipped, took 0.4 us."""
        return IterationCost(4, 4) if self.single and self.vdevice.threads == 1 else IterationCost()

    @cached_property
    def host_room(self) -> HostRoom:
        """The alignment and readable tail of arrays that kernels use in place, on a CPU."""
        return ROOM

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Return the program, compiled and resident."""
        if self.vdevice.threads > 1 and self.single:
            return PersistentProgram(self.builder, self.constants, self, program, constants)
        if self.vdevice.threads > 1:
            return LaunchProgram(self.builder, self.constants, self, program, constants)
        return TableProgram(self.builder, self.constants, self, program, constants, self.single)

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """Return the start and end of each task of a run, by row; kernels are built again with recording."""
        loaded: TracedLaunches | TracedPersistent | TracedTable
        if self.vdevice.threads > 1 and self.single:
            loaded = TracedPersistent(self.builder, self.constants, self, program, constants)
        elif self.vdevice.threads > 1:
            loaded = TracedLaunches(self.builder, self.constants, self, program, constants)
        else:
            loaded = TracedTable(self.builder, self.constants, self, program, constants, self.single)
        try:
            return Recorded(program, record_trace(loaded, inputs))
        finally:
            loaded.close()

    def close(self) -> None:
        """Free the queue, built kernels and the context, which this object owns."""
        self.queue.finish()
        del self.constants, self.builder, self.queue, self.context


def _is_single_launch(executor: str, able: bool) -> bool:
    """Return True if one launch runs the whole program: on CPUs whose OpenCL C has acquire and release (2.0)."""
    executor = executor or ("single" if able else "waves")
    if executor == "single" and not able:
        raise BadInput("executor=single needs a CPU with OpenCL C 2.0", hint="use executor=waves")
    return executor == "single"


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
            return statistics.median(loaded.run(inputs).seconds for _ in range(max(1, iterations)))
        finally:
            loaded.close()
