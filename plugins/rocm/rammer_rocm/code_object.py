"""Machine code for an AMD target whose card is absent: the launches of a program, and a code object that clang compiles.

A code object is for one architecture and needs no driver. AMD's OpenCL runtime loads it as a binary: an ELF of type ET_DYN with a
text section is an executable program, and options of its build are ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rammer.device.manifest import Array, MachineCode
from rammer.ir.program import RProgram

from rammer_rocm.constants import LINE, SLACK, PlacedConstants, round_up
from rammer_rocm.families import OpenClKernels
from rammer_rocm.kernel_writing import WrittenKernels
from rammer_rocm.memory import lay_out
from rammer_rocm.planned_program import PlannedLaunches
from rammer_rocm.shipped_kernels import machine_code
from rammer_rocm.source import launch_text


@dataclass(frozen=True)
class ConstantBuffer:
    """A buffer of constants that the loader of the file allocates."""

    size: int


class PlannedCode(PlannedLaunches):
    """A program of launches for a target. ``written`` compiles text to a code object."""

    def __init__(self, kernels: WrittenKernels, program: RProgram, constants: Mapping[str, Array]) -> None:
        self.program, self.memory = program, lay_out(program)
        self.functions = kernels.functions(program, constants)
        self.plan_launches(kernels.vdevice.veus)
        places, end = dict[tuple[str, str], tuple[int, int]](), 0
        for name, wanted in self.wanted_forms(constants).items():
            places[name] = 1, end
            end += round_up(wanted.form.nbytes, LINE)
        self.constants = PlacedConstants((ConstantBuffer(end + SLACK),) if places else (), places, ())
        self.binary: bytes = kernels.build(lambda dialect: launch_text(self.written, dialect))


def target_code(
    kernels: OpenClKernels, compile_text: Callable[[str], Any], target: str, program: RProgram, constants: Mapping[str, Array]
) -> MachineCode:
    """Return the machine code of a program for ``target``. ``compile_text`` returns the code object of a text."""
    planned = PlannedCode(WrittenKernels(kernels, compile_text), program, constants)
    return machine_code(planned, kernels.vdevice.veus, planned.binary, constants, target, ())
