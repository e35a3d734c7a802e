"""The OpenCL C function of one task, for any kernel family, and common parts of its writers on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rammer.codegen import Argument, KernelFamily, Packing, Text, format_sum, hash_of
from rammer.codegen.c_target import head_of
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.extent import AffineExtent

from rammer_rocm.dialect import CPU_DIALECT


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """A function ``void entry(global T0 *p0, ..., scratch, int task)`` with ``scratch`` in bytes; ``types`` are T0 ....

    ``helpers`` is the text that it needs besides the dialect's preamble, once per program. ``inner`` is the function that it
    calls. If ``stops``, it skips work past the dynamic lengths.

    A group of ``threads`` work-items computes a task. If ``blocks`` > 1, so many groups share a task: the function has four more
    parameters, ``global float *partials, global int *arrived, int slot, int rank``. ``partials`` is the number of floats that a
    task needs there. Word ``arrived[slot]`` is zero before and after each task."""

    entry: str
    text: str
    arguments: tuple[Argument, ...]
    types: tuple[str, ...]
    scratch: int
    helpers: str = ""
    inner: TaskFunction | None = None
    stops: bool = False
    threads: int = 1
    blocks: int = 1
    partials: int = 0


#: A kernel family of this device. Devices are described as VDevice.
Family: TypeAlias = KernelFamily[VDevice, TaskFunction, None]


class TaskText:
    """A task function under construction, with vectors of ``lanes``."""

    def __init__(self, binding: Binding, lanes: int) -> None:
        self.binding, self.lanes, self.text = binding, lanes, Text()
        self.arguments: dict[tuple[str, str], Argument] = {}

    def finished(self, family: str, scratch: int, helpers: str = "", stops: bool = False) -> TaskFunction:
        """Return the finished function with the written text."""
        arguments = tuple(self.arguments.values())
        types = tuple(CPU_DIALECT.types[self.stored(a.tensor, a.packing)] for a in arguments)
        pointers = [(t, a.written) for t, a in zip(types, arguments, strict=True)]
        body = f" {{\n{self.text}}}\n"
        name = f"{family}_" + hash_of(head_of(CPU_DIALECT, "", pointers) + body)
        text = head_of(CPU_DIALECT, name, pointers) + body
        return TaskFunction(name, text, arguments, types, scratch, helpers, stops=stops)

    def stored(self, tensor: str, packed: Packing | None = None) -> str:
        """Return the in-memory element type of a tensor, or of its packed form."""
        return packed.dtype if packed else self.binding.types[tensor].dtype

    def pointer(self, tensor: str, written: bool = False, packed: Packing | None = None) -> str:
        """Return the name of the parameter for ``tensor``."""
        key = (tensor, packed.key if packed else "")
        self.arguments.setdefault(key, Argument(tensor, written, packed))
        return f"p{list(self.arguments).index(key)}"


def extent_text(extent: AffineExtent, pointer: Callable[[str], str]) -> str:
    """Return the C text of a dynamic extent; ``pointer`` maps a length to its parameter name."""
    return f"({format_sum([(f'{pointer(n)}[0]', f) for n, f in extent.terms], extent.offset)})"
