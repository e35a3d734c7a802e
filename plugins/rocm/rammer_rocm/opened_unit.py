"""An opened OpenCL unit that runs machine code. ``backend`` adds the kernel families, which compile programs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from rammer.device.arrays import HostRoom
from rammer.device.execution_forms import ExecutionForm
from rammer.device.manifest import Array, Backend, Binding, Hardware, IterationCost, Loaded, MachineCode, OpenOptions
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable, require_compiler
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import RProgram

from rammer_rocm.build import Builder, build_options, language_version
from rammer_rocm.constants import DeviceConstants
from rammer_rocm.launch_executor import LaunchProgram
from rammer_rocm.launch_forms import FORMS, MIXED, WAVES, form_of
from rammer_rocm.opencl_runtime import import_opencl, kind_of, units
from rammer_rocm.persistent_executor import PersistentProgram
from rammer_rocm.placement import ROOM
from rammer_rocm.program_kernels import ProgramKernels
from rammer_rocm.resident import OpenClProgram
from rammer_rocm.shipped_kernels import shipped_kernels
from rammer_rocm.table_executor import TableProgram
from rammer_rocm.units import amd_code_target, make_hardware, virtual_device

#: Extensions of x86 that a compiler of kernels may use, among the flags in /proc/cpuinfo.
_EXTENSIONS: Final = re.compile(r"(avx|amx|fma|f16c|bmi|sse)\w*")


def find_unit(options: OpenOptions, cores: int) -> Any:
    """Return the OpenCL device that ``options`` name, or a part with at most so many ``cores``. Raises DeviceUnavailable if it is
    missing or of another kind, and BadInput if ``cores`` are given for a GPU."""
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
    return part_of(device, cores)


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


class OpenClUnit(Backend):
    """An OpenCL unit with a context and an in-order queue. ``executor`` is an option of the device. ``single`` is True if
    programs without an execution form run in one launch."""

    def __init__(self, device: Any, index: int, executor: str, vdevice: VDevice) -> None:
        cl = import_opencl()
        self.device, self.vdevice, self.executor = device, vdevice, executor
        self.hardware: Hardware = make_hardware(index, device)
        self.single = is_single_launch(executor, device, vdevice)
        try:
            self.context = cl.Context([device])
            self.queue = cl.CommandQueue(self.context)
            self.builder = Builder(self.context, build_options(device))
            self.constants = DeviceConstants(self.queue, vdevice.threads == 1)
        except cl.Error as problem:
            raise DeviceUnavailable(f"{device.name.strip()} cannot be opened: {problem}") from problem

    @cached_property
    def code_target(self) -> str:
        """Platform, driver and device, the extensions of a CPU, and all that decides the kernels that walk a table. For an AMD
        GPU, its architecture and these kernels."""
        device, text, walk = self.device, "", f"{'single' if self.single else WAVES.name} {self.vdevice.threads}"
        if kind_of(device) == "gpu" and (target := amd_code_target(device.name.strip(), walk)):
            return target
        if self.vdevice.threads == 1:
            text = " ".join(_cpu_extensions())
        names = (device.platform.name, device.platform.version, device.name, device.version, device.driver_version)
        return " ".join([*(n.strip() for n in names), *self.builder.options, walk, text])

    def load_code(self, program: RProgram, constants: Mapping[str, Array], code: MachineCode) -> Loaded:
        """Return the program with the kernels in ``code``. Raises DeviceFailure if it is malformed or the driver refuses it."""
        try:
            kernels = shipped_kernels(code, program, self.vdevice, self.context, self.builder.options)
        except (ValueError, TypeError, LookupError, AttributeError) as problem:
            raise DeviceFailure(f"the machine code of program {program.name} is malformed: {problem}") from problem
        # The kernels take the number of constant buffers that they were built for: one of their own.
        return self.open_program(kernels, DeviceConstants(self.queue, self.vdevice.threads == 1), program, constants)

    def open_program(
        self, kernels: ProgramKernels, shared: DeviceConstants, program: RProgram, constants: Mapping[str, Array]
    ) -> OpenClProgram:
        """Return the program with its executor: a table on CPUs, launches or one persistent launch on GPUs. Raises DeviceFailure
        for a form that the unit does not have."""
        if self.vdevice.threads == 1:
            return TableProgram(kernels, shared, program, constants, self.single)
        form = form_of(program, self.forms)
        if form == WAVES:
            return LaunchProgram(kernels, shared, program, constants)
        return PersistentProgram(kernels, shared, program, constants, form == MIXED)

    @cached_property
    def forms(self) -> Sequence[ExecutionForm]:
        """The execution forms of the chosen executor. A CPU that runs a GPU's kernels has one: its groups wait for each other by
        polling, which other processes delay."""
        if self.vdevice.threads == 1:
            return super().forms
        return FORMS[self.executor][: None if kind_of(self.device) == "gpu" else 1]

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

    def close(self) -> None:
        """Free the queue, built kernels and the context, which this object owns."""
        self.queue.finish()
        del self.constants, self.builder, self.queue, self.context


class RunOnlyUnit(OpenClUnit):
    """An OpenCL unit that was opened for machine code alone."""

    def __init__(self, options: OpenOptions, executor: str, cores: int, kernels: str) -> None:
        device = find_unit(options, cores)
        super().__init__(device, options.index, executor, virtual_device(device, kernels))

    @cached_property
    def fingerprint(self) -> str:
        """The target: no kernel is compiled."""
        return f"rocm {self.code_target}"

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Raise DeviceUnavailable."""
        raise _no_compiler()

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Raise DeviceUnavailable."""
        raise _no_compiler()

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Raise DeviceUnavailable."""
        raise _no_compiler()


def _no_compiler() -> DeviceUnavailable:
    require_compiler("compiling kernels for device rocm")
    return DeviceUnavailable("device rocm was opened for machine code alone")


def is_single_launch(executor: str, device: Any, vdevice: VDevice) -> bool:
    """Return True if one launch runs a program without an execution form: on CPUs whose OpenCL C has acquire and release (2.0),
    and on GPUs if a user chooses it."""
    if vdevice.threads > 1:
        return executor == "single"
    if executor == "mixed":
        raise BadInput("executor=mixed is for kernels of GPUs", hint="leave it out")
    able = language_version(device) >= (2, 0)
    executor = executor or ("single" if able else "waves")
    if executor == "single" and not able:
        raise BadInput("executor=single needs a CPU with OpenCL C 2.0", hint="use executor=waves")
    return executor == "single"


def _cpu_extensions() -> list[str]:
    """Return the vector extensions of this processor, or [] if they are unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return sorted({f for f in flags.group(1).split() if _EXTENSIONS.fullmatch(f)}) if flags else []
