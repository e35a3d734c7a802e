"""Machine code of a program in a compiled file: writing it for a loaded program, and loading it without the kernel families.

The record names the function of every operator, its pointers and the arrangements of its constants. Packed constants are stored
as values, since only the kernel families can compute them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.device.manifest import Array, MachineCode
from rammer.errors import DeviceFailure
from rammer.ir.device import VDevice
from rammer.ir.program import RProgram
from rammer.ir.types import SHORT

from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.program_kernels import Write
from rammer_rocm.resident import OpenClProgram

#: Greater than any number of scratch bytes, functions and elements of a packed constant.
LARGEST = 1 << 40


@dataclass(frozen=True, slots=True)
class ShippedPacking:
    """An arrangement of a constant whose elements are in the file."""

    key: str
    size: int
    dtype: str
    values: Array

    @property
    def make(self) -> Callable[[Array], Array]:
        """The function that arranges the constant: it returns the stored elements."""
        return lambda given: self.values


@dataclass(frozen=True, slots=True)
class ShippedPointer:
    """A pointer that a function takes."""

    tensor: str
    packing: ShippedPacking | None


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
    entries, packed = dict[str, int](), dict[tuple[str, str], int]()
    arrays = {"binary": np.frombuffer(loaded.binary.get_info(import_opencl().program_info.BINARIES)[0], np.uint8)}
    functions, packings = list[list[Any]](), list[list[Any]]()
    operators = dict[str, list[Any]]()
    for name, function in loaded.functions.items():
        if function.entry not in entries:
            entries[function.entry] = len(functions)
            functions.append([function.entry, function.scratch, function.threads, function.blocks, function.partials])
        pointers = list[list[Any]]()
        for argument in function.arguments:
            packing, number = argument.packing, -1
            if packing is not None:
                number = packed.setdefault((argument.tensor, packing.key), len(packed))
                if number == len(packings):
                    values = np.asarray(packing.make(constants[argument.tensor]), packing.dtype)
                    arrays[str(number)] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
                    packings.append([packing.key, packing.size, packing.dtype])
            pointers.append([argument.tensor, number])
        operators[name] = [entries[function.entry], pointers]
    return MachineCode(target, {"functions": functions, "packings": packings, "operators": operators}, arrays)


def shipped_kernels(
    code: MachineCode, program: RProgram, vdevice: VDevice, context: Any, options: tuple[str, ...]
) -> ShippedKernels:
    """Return the kernels in ``code``. Raises ValueError or a similar error if they do not fit the program."""
    record = code.record
    packings = [_read_packing(row, code.arrays[str(n)]) for n, row in enumerate(record["packings"])]
    functions = [(str(entry), [_read_number(n) for n in numbers]) for entry, *numbers in record["functions"]]
    operators = dict[str, ShippedFunction]()
    for name, (number, pointers) in record["operators"].items():
        entry, (scratch, threads, blocks, partials) = functions[_read_number(number)]
        arguments = tuple(ShippedPointer(_known(program, tensor), _pick(packings, n)) for tensor, n in pointers)
        operators[_known_operator(program, name)] = ShippedFunction(entry, arguments, scratch, threads, blocks, partials)
    missing = {task.operator for row in program.rows for task in row} - operators.keys()
    if missing:
        raise ValueError(f"operator {min(missing)} has no kernel")
    return ShippedKernels(vdevice, context, options, operators, code.arrays["binary"].tobytes())


def _read_packing(row: Sequence[Any], values: Array) -> ShippedPacking:
    key, size, dtype = row
    if dtype not in SHORT or not isinstance(key, str) or values.size != _read_number(size) * np.dtype(dtype).itemsize:
        raise ValueError("a packed constant has another size than its record")
    return ShippedPacking(key, size, dtype, values.view(dtype))


def _read_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError("a number in the record of machine code is out of range")
    return value


def _pick(packings: Sequence[ShippedPacking], number: Any) -> ShippedPacking | None:
    return None if number == -1 else packings[_read_number(number)]


def _known(program: RProgram, tensor: Any) -> str:
    if tensor not in program.storage:
        raise ValueError("a kernel reads a tensor that the program does not store")
    return str(tensor)


def _known_operator(program: RProgram, name: str) -> str:
    if name not in program.operator:
        raise ValueError("a kernel belongs to an operator that the program does not have")
    return name
