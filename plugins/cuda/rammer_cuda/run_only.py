"""A GPU that was opened for the machine code of compiled files. ``backend`` has the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Thread
from typing import Any

import numpy as np

from rammer.device.manifest import Array, Backend, Binding, Hardware, IterationCost, Loaded, MachineCode, OpenOptions
from rammer.errors import DeviceFailure, DeviceUnavailable, require_compiler
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import RProgram

from rammer_cuda.gpu import Gpu
from rammer_cuda.hardware import create_context, gpu_of, probe_gpus


def load_code(program: RProgram, constants: Mapping[str, Array], code: MachineCode, gpu: Gpu, index: int) -> Loaded:
    """Load a program with machine code on GPU ``index``. Raises DeviceFailure if the code is malformed."""
    from rammer_cuda.executor import CudaProgram, Room
    from rammer_cuda.shipped_launches import shipped_launches

    try:
        shipped = shipped_launches(code, program)
    except (ValueError, TypeError, LookupError, AttributeError) as problem:
        raise DeviceFailure(f"the machine code of program {program.name} is malformed: {problem}") from problem
    return CudaProgram(program, constants, Room(gpu, index), shipped=shipped)


class RunOnlyGpu(Backend):
    """A GPU without the kernel families."""

    def __init__(self, options: OpenOptions) -> None:
        if options.require and options.require != "gpu":
            raise DeviceUnavailable(f"cuda:{options.index} is a gpu, not a {options.require}")
        self.hardware: Hardware = probe_gpus()[options.index]
        self.gpu = gpu_of(self.hardware)
        self.iteration_cost = IterationCost()
        self.context: Thread = create_context(options.index)

    @cached_property
    def vdevice(self) -> VDevice:
        """The virtual device."""
        return self.gpu.vdevice

    @cached_property
    def fingerprint(self) -> str:
        """The target: no kernel is compiled."""
        return f"cuda {self.code_target}"

    @cached_property
    def code_target(self) -> str:
        """The architecture."""
        return self.gpu.architecture

    def load_code(self, program: RProgram, constants: Mapping[str, Array], code: MachineCode) -> Loaded:
        """Return the program with the kernels in ``code``."""
        return load_code(program, constants, code, self.gpu, self.hardware.index)

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Raise DeviceUnavailable."""
        raise _no_compiler()

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Raise DeviceUnavailable."""
        raise _no_compiler()

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Raise DeviceUnavailable."""
        raise _no_compiler()

    def device_array(self, values: Array) -> Any:
        """Return a CuPy array with these values."""
        import cupy as cp

        with cp.cuda.Device(self.hardware.index):
            return cp.asarray(values)

    def host_array(self, array: Any) -> Array:
        """Return a copy of a CuPy array, or of an array with its interface, after all work of the GPU."""
        import cupy as cp

        with cp.cuda.Device(self.hardware.index) as device:
            device.synchronize()
            return np.asarray(cp.asnumpy(array))

    def close(self) -> None:
        """Wait for the context's creation. The GPU's context is the process's."""
        self.context.join()


def _no_compiler() -> DeviceUnavailable:
    require_compiler("compiling kernels for device cuda")
    return DeviceUnavailable("device cuda was opened for machine code alone")
