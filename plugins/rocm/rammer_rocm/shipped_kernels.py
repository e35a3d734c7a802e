"""Machine code of a program in a compiled file: writing it for a loaded program, and loading it without the kernel families."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rammer.device.driver_calls import CALLS, LOOP, DriverCalls, refuse_calls
from rammer.device.manifest import Array, MachineCode
from rammer.device.shipped_kernels import ShippedPointer, read_number, record_kernels, restore_kernels
from rammer.errors import DeviceFailure
from rammer.ir.device import VDevice
from rammer.ir.program import RProgram

from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.planned_program import BINARY, PlannedProgram
from rammer_rocm.program_kernels import Write
from rammer_rocm.repeat import loop_record


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


def machine_code(
    planned: PlannedProgram, veus: int, binary: bytes, constants: Mapping[str, Array], target: str, options: Sequence[str]
) -> MachineCode:
    """Return the machine code of a program. ``veus`` are those of the device that its kernels were written for, and ``options``
    those of its build."""
    record, arrays = record_kernels(planned.functions, ("scratch", "threads", "blocks", "partials"), constants)
    calls = DriverCalls(planned.program)
    record["veus"] = veus
    record[CALLS] = _record_calls(planned, calls, constants, record, options)
    return MachineCode(target, record, {**arrays, **calls.arrays, BINARY: np.frombuffer(binary, np.uint8)})


def _record_calls(
    planned: PlannedProgram,
    calls: DriverCalls,
    constants: Mapping[str, Array],
    record: Mapping[str, Any],
    options: Sequence[str],
) -> dict[str, Any]:
    """Return the record of a program's calls, or the reason why it has none."""
    packed = {
        (tensor, record["packings"][number][0]): ("array", str(number))
        for _, pointers in record["users"].values()
        for tensor, number in pointers
        if number >= 0
    }
    plain = {planned.program.storage[n].buffer: ("constant", n) for n in constants if n in planned.program.storage}
    own = [(planned.memory.buffers[name], *source) for name, source in plain.items() if name in planned.memory.buffers]
    memory, filled = calls.allocate(planned.memory.nbytes, own), list[int]()
    for number, buffer in enumerate(planned.constants.buffers, 1):
        here = [(name, start) for name, (place, start) in planned.constants.places.items() if place == number]
        fills = [(start, *(packed[name] if name[1] else plain[name[0]])) for name, start in here]
        filled.append(calls.allocate(buffer.size, fills))
    more = planned.record_calls(calls, memory, filled)
    if more is None:
        return refuse_calls("programs in one persistent launch on a GPU")
    if (repeat := planned.program.repeat) is not None:
        in_kernel = any(argument in LOOP for *_, arguments in calls.launches for argument in arguments)
        more["loop"] = loop_record(planned.program, repeat, memory, planned.memory.buffers, in_kernel)
    places = {name: (memory, start) for name, start in planned.memory.buffers.items()}
    return calls.record(places, options=" ".join(options), **more)


def shipped_kernels(
    code: MachineCode, program: RProgram, vdevice: VDevice, context: Any, options: tuple[str, ...]
) -> ShippedKernels:
    """Return the kernels in ``code``. Raises ValueError or a similar error if they do not fit the program."""
    found = restore_kernels(code, program, 4)
    missing = {task.operator for row in program.rows for task in row} - found.keys()
    if missing:
        raise ValueError(f"operator {min(missing)} has no kernel")
    operators = {name: ShippedFunction(k.entry, k.arguments, *k.sizes) for name, k in found.items()}
    # Another card of the same architecture may have another number of units, but its kernels have the same launches.
    vdevice = replace(vdevice, veus=read_number(code.record.get("veus", vdevice.veus)))
    return ShippedKernels(vdevice, context, options, operators, code.arrays[BINARY].tobytes())
