"""Kernels in the machine code of a compiled file: their record, and their pointers to tensors and packed constants.

The record names the kernel of every operator or launch, its pointers, and the arrangements of its constants. Packed constants are
stored as values, since only the kernel families can compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from rammer.device.manifest import Array, MachineCode
from rammer.ir.program import RProgram
from rammer.ir.types import SHORT

__all__ = ["ShippedKernel", "ShippedPacking", "ShippedPointer", "read_number", "record_kernels", "restore_kernels"]

#: Greater than any number of threads, bytes, kernels and elements of a packed constant.
LARGEST: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class ShippedPacking:
    """An arrangement of a constant whose elements are in the file (``rammer.codegen.Packing``)."""

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
    """A pointer that a kernel takes: to a tensor, or to a packed constant (``rammer.codegen.Argument``)."""

    tensor: str
    packing: ShippedPacking | None


@dataclass(frozen=True, slots=True)
class ShippedKernel:
    """A kernel in the machine code. ``sizes`` are the numbers that the device recorded."""

    entry: str
    arguments: tuple[ShippedPointer, ...]
    sizes: tuple[int, ...]


class Kernel(Protocol):
    """A kernel that is recorded; its sizes are attributes."""

    @property
    def entry(self) -> str:
        """The name of the function, equal for equal texts."""
        ...

    @property
    def arguments(self) -> Sequence[Any]:
        """The pointers that it takes."""
        ...


def record_kernels(
    kernels: Mapping[str, Kernel], sizes: Sequence[str], constants: Mapping[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the record of kernels by operator or launch with their attributes ``sizes``, and the bytes of packed constants."""
    entries, packed = dict[str, int](), dict[tuple[str, str], int]()
    functions, packings = list[list[Any]](), list[list[Any]]()
    users, arrays = dict[str, list[Any]](), dict[str, Array]()
    for name, kernel in kernels.items():
        if kernel.entry not in entries:
            entries[kernel.entry] = len(functions)
            functions.append([kernel.entry, *(getattr(kernel, size) for size in sizes)])
        pointers = list[list[Any]]()
        for argument in kernel.arguments:
            packing, number = argument.packing, -1
            if packing is not None:
                number = packed.setdefault((argument.tensor, packing.key), len(packed))
                if number == len(packings):
                    values = np.asarray(packing.make(constants[argument.tensor]), packing.dtype)
                    arrays[str(number)] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
                    packings.append([packing.key, packing.size, packing.dtype])
            pointers.append([argument.tensor, number])
        users[name] = [entries[kernel.entry], pointers]
    return {"kernels": functions, "packings": packings, "users": users}, arrays


def restore_kernels(code: MachineCode, program: RProgram, sizes: int) -> dict[str, ShippedKernel]:
    """Return the recorded kernels, each with so many ``sizes``, by operator or launch. Raises ValueError or a similar error if
    the record is malformed or names tensors that the program does not store."""
    record = code.record
    packings = [_read_packing(row, code.arrays[str(n)]) for n, row in enumerate(record["packings"])]
    kernels = [(str(entry), tuple(map(read_number, numbers))) for entry, *numbers in record["kernels"]]
    if any(len(numbers) != sizes for _, numbers in kernels):
        raise ValueError("a kernel has another number of sizes")
    found = dict[str, ShippedKernel]()
    for name, (number, pointers) in record["users"].items():
        entry, numbers = kernels[read_number(number)]
        arguments = tuple(ShippedPointer(_known_tensor(program, t), _pick_packing(packings, n)) for t, n in pointers)
        found[name] = ShippedKernel(entry, arguments, numbers)
    return found


def read_number(value: Any) -> int:
    """Return a number of a record. Raises ValueError unless it is a count or a size."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError("a number in the record of machine code is out of range")
    return value


def _read_packing(row: Sequence[Any], values: Array) -> ShippedPacking:
    key, size, dtype = row
    if dtype not in SHORT or not isinstance(key, str) or values.size != read_number(size) * np.dtype(dtype).itemsize:
        raise ValueError("a packed constant has another size than its record")
    return ShippedPacking(key, size, dtype, values.view(dtype))


def _pick_packing(packings: Sequence[ShippedPacking], number: Any) -> ShippedPacking | None:
    return None if number == -1 else packings[read_number(number)]


def _known_tensor(program: RProgram, tensor: Any) -> str:
    if tensor not in program.storage:
        raise ValueError("a kernel reads a tensor that the program does not store")
    return str(tensor)
