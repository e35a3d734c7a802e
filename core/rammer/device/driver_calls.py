"""Driver calls of a loaded program, recorded in its machine code for callers without Python.

A record names the memory to allocate, its contents, the kernels with their arguments, and the ports. ``core/runtime_c/rammer.c``
repeats the calls: it needs neither the program's text nor the plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.device.manifest import Array
from rammer.ir.program import Port, RProgram
from rammer.ir.types import itemsize

__all__ = [
    "CALLS",
    "EPOCH",
    "LAUNCH",
    "LOOP",
    "Argument",
    "DriverCalls",
    "address",
    "buffer_argument",
    "int32",
    "int64",
    "refuse_calls",
]

#: The key of the record in that of the machine code.
CALLS: Final = "calls"
#: An argument of a kernel: its kind, and the numbers of that kind.
Argument: TypeAlias = "list[str | int]"
#: The number of the run and of the launch, both counted from 1, as 32-bit integers.
EPOCH: Final[Argument] = ["epoch"]
LAUNCH: Final[Argument] = ["launch"]
#: In a launch that runs all iterations of a loop: the number of moves before, and the iterations that run and that do not.
LOOP: Final[tuple[Argument, ...]] = (["moved"], ["turns"], ["skipped"])
#: Bytes past the end of an allocation that kernels may read.
SLACK: Final = 512


def buffer_argument(number: int) -> Argument:
    """Return a buffer as an argument; -1 is the null pointer."""
    return ["buffer", number]


def address(number: int, place: int) -> Argument:
    """Return the address of byte ``place`` of a buffer as an argument."""
    return ["address", number, place]


def int32(value: int) -> Argument:
    """Return a 32-bit integer as an argument."""
    return ["int32", value]


def int64(value: int) -> Argument:
    """Return a 64-bit integer as an argument."""
    return ["int64", value]


def refuse_calls(why: str) -> dict[str, Any]:
    """Return the record of a program that only Python runs, with the reason."""
    return {"refused": why}


@dataclass
class DriverCalls:
    """The recorder of a program's calls. ``arrays`` are its tables by name, for the machine code."""

    program: RProgram
    arrays: dict[str, Array] = field(default_factory=dict)
    buffers: list[list[Any]] = field(default_factory=list)
    kernels: list[list[Any]] = field(default_factory=list)
    launches: list[list[Any]] = field(default_factory=list)
    _numbers: dict[tuple[str, str], int] = field(default_factory=dict)

    def allocate(self, nbytes: int, fills: Sequence[tuple[int, str, str]] = ()) -> int:
        """Record an allocation and return its number. Each fill has a byte, ``constant`` or ``array``, and the name of that."""
        self.buffers.append([nbytes + SLACK, [list(fill) for fill in fills]])
        return len(self.buffers) - 1

    def allocate_table(self, values: Array) -> int:
        """Record an allocation with these values."""
        name = f"calls {len(self.buffers)}"
        self.arrays[name] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self.allocate(values.nbytes, [(0, "array", name)])

    def launch(
        self, kernel: tuple[str, str], groups: int, threads: int, arguments: Sequence[Argument], local_bytes: int = 0
    ) -> None:
        """Record a launch. ``kernel`` is the array with its machine code, and its entry."""
        if kernel not in self._numbers:
            self._numbers[kernel] = len(self.kernels)
            self.kernels.append([*kernel, local_bytes])
        self.launches.append([self._numbers[kernel], groups, threads, list(arguments)])

    def record(self, places: Mapping[str, tuple[int, int]], **other: object) -> dict[str, Any]:
        """Return the record. ``places`` are the allocation and the first byte of the buffers of ports; ``other`` are facts that
        one device needs."""
        ports = {
            kind: [self._port_record(port, places) for port in some]
            for kind, some in (("inputs", self.program.inputs), ("outputs", self.program.outputs))
        }
        return {"buffers": self.buffers, "kernels": self.kernels, "launches": self.launches, **ports, **other}

    def _port_record(self, port: Port, places: Mapping[str, tuple[int, int]]) -> list[Any]:
        """Return tensor, type, allocation, first byte, bytes of an element, extents, and strides in bytes."""
        storage = self.program.storage[port.tensor]
        number, start = places[storage.buffer]
        kind = self.program.types[port.tensor]
        width = itemsize(self.program.buffer[storage.buffer].dtype)
        strides = [s * width for s in storage.strides]
        return [port.tensor, str(kind), number, start + storage.offset * width, width, list(storage.shape), strides]
