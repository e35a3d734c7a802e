"""Machine code of a program in a compiled file: writing it for a loaded program, and loading it without the kernel families."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.device.manifest import Array, MachineCode
from rammer.device.shipped_kernels import ShippedPointer, record_kernels, restore_kernels
from rammer.errors import DeviceFailure
from rammer.ir.device import VDevice
from rammer.ir.program import RProgram

from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.program_kernels import Write
from rammer_rocm.resident import OpenClProgram


@dataclass(frozen=True, slots=True)
class ShippedFunction:
    """A function in the machine code."""

    entry: str
    arguments: tuple[ShippedPointer, ...]
    scratch: int
    threads: int
    blocks: int
    partials: int


@dataclass(frozen=True)
class ShippedKernels:
    """The kernels of one program in a compiled file: its functions by operator, and the binary."""

    vdevice: VDevice
    context: Any
    options: tuple[str, ...]
    operators: Mapping[str, ShippedFunction]
    binary: bytes

    def functions(self, program: RProgram, constants: Mapping[str, Array]) -> Mapping[str, ShippedFunction]:
        """Return the function of every operator with tasks."""
        return self.operators

    def build(self, write: Write) -> Any:
        """Return the program in the binary. Raises DeviceFailure if the driver refuses it."""
        cl = import_opencl()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # runtimes print a banner into every build log
                return cl.Program(self.context, self.context.devices, [self.binary]).build(list(self.options))
        except cl.Error as problem:
            raise DeviceFailure(f"the OpenCL driver refuses the machine code of a compiled file: {problem}") from problem


def machine_code(loaded: OpenClProgram, constants: Mapping[str, Array], target: str) -> MachineCode:
    """Return the machine code of a loaded program, whose constants are in one buffer."""
    record, arrays = record_kernels(loaded.functions, ("scratch", "threads", "blocks", "partials"), constants)
    binary = loaded.binary.get_info(import_opencl().program_info.BINARIES)[0]
    return MachineCode(target, record, {**arrays, "binary": np.frombuffer(binary, np.uint8)})


def shipped_kernels(
    code: MachineCode, program: RProgram, vdevice: VDevice, context: Any, options: tuple[str, ...]
) -> ShippedKernels:
    """Return the kernels in ``code``. Raises ValueError or a similar error if they do not fit the program."""
    found = restore_kernels(code, program, 4)
    missing = {task.operator for row in program.rows for task in row} - found.keys()
    if missing:
        raise ValueError(f"operator {min(missing)} has no kernel")
    operators = {name: ShippedFunction(k.entry, k.arguments, *k.sizes) for name, k in found.items()}
    return ShippedKernels(vdevice, context, options, operators, code.arrays["binary"].tobytes())
