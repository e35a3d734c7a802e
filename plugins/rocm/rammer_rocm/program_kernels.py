"""The kernels of a program as its executor sees them. They are written by the kernel families (``kernel_writing``), or come from
a compiled file (``shipped_kernels``), which needs no compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from rammer.device.manifest import Array
from rammer.ir.device import VDevice
from rammer.ir.program import RProgram

#: A writer of a program's text, for a dialect (``rammer.codegen.c_target.CTarget``).
Write: TypeAlias = Callable[[Any], str]


class Packed(Protocol):
    """An arrangement of a constant (``rammer.codegen.Packing``)."""

    @property
    def key(self) -> str:
        """The name of the arrangement."""
        ...

    @property
    def size(self) -> int:
        """The number of elements."""
        ...

    @property
    def dtype(self) -> str:
        """The type of the elements."""
        ...

    @property
    def make(self) -> Callable[[Array], Array]:
        """The function that arranges the constant's values."""
        ...


class Pointer(Protocol):
    """A pointer that a kernel takes: to a tensor, or to a packed copy of a constant (``rammer.codegen.Argument``)."""

    @property
    def tensor(self) -> str:
        """The tensor."""
        ...

    @property
    def packing(self) -> Packed | None:
        """The arrangement of the copy, or None for the tensor itself."""
        ...


class Function(Protocol):
    """The function of an operator's tasks."""

    @property
    def entry(self) -> str:
        """The name of the function, equal for equal texts."""
        ...

    @property
    def arguments(self) -> Sequence[Pointer]:
        """The pointers that it takes."""
        ...

    @property
    def scratch(self) -> int:
        """The bytes of scratch memory that it needs."""
        ...

    @property
    def threads(self) -> int:
        """The work-items of a group."""
        ...

    @property
    def blocks(self) -> int:
        """The groups that share a task."""
        ...

    @property
    def partials(self) -> int:
        """The floats of global memory in which groups of a task exchange sums."""
        ...


class ProgramKernels(Protocol):
    """The kernels of one program, or of any program of a device."""

    @property
    def vdevice(self) -> VDevice:
        """The virtual device that the kernels were written for."""
        ...

    def functions(self, program: RProgram, constants: Mapping[str, Array]) -> Mapping[str, Function]:
        """Return the function of every operator with tasks, by operator name."""
        ...

    def build(self, write: Write) -> Any:
        """Return the OpenCL program that ``write`` writes in the device's dialect (``rammer_rocm.source``)."""
        ...
