"""TaskKernel: the CUDA text of one operator's kernel and how to launch it, whichever family wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rammer.codegen.c_text import split_digits
from rammer.codegen.context import Place
from rammer.codegen.task_parameters import Argument, hash_of
from rammer.device.manifest import Binding
from rammer.ir.expr import integer
from rammer.ir.operator import ROperator

from rammer_cuda.device import device_source


@dataclass(frozen=True, slots=True)
class TaskKernel:
    """One operator's kernel: entry point, text in parts, pointer arguments and launch shape.

    ``device`` is what stands before the kernel, ``parameters`` declare its pointers, ``body`` are its statements, "" where it has
    no entry point. ``threads`` a block, ``shared`` bytes in all of which ``dynamic`` are asked for at launch, ``blocks`` a task:
    a task whose sum is split runs as one thread-block cluster of so many. So many ``resident`` blocks an SM are to have registers
    (0: as ptxas likes). ``traced``: blocks leave records of when they worked. One that ``stops`` leaves what lies beyond a
    run's lengths, also within its task.
    """

    entry: str
    device: str
    parameters: tuple[str, ...]
    body: str
    arguments: tuple[Argument, ...]
    threads: int
    shared: int
    dynamic: int = 0
    blocks: int = 1
    resident: int = 0
    traced: bool = False
    stops: bool = False

    @property
    def text(self) -> str:
        """The kernel, and what it needs besides the preamble. ``order`` is null where a launch has consecutive tasks, from
        ``first`` on."""
        if not self.body:
            return self.device
        cluster = f"__cluster_dims__({self.blocks}, 1, 1) " if self.blocks > 1 else ""
        bounds = f"__launch_bounds__({self.threads}{f', {self.resident}' if self.resident else ''})"
        records = ["RmRecord *rm_records"] if self.traced else []
        parameters = ", ".join((*self.parameters, "const int *order", "int first", *records))
        head = f'extern "C" __global__ void {cluster}{bounds} {self.entry}({parameters})'
        if not self.traced:
            return f"{self.device}{head} {{\n{self.body}}}\n"
        if "rm_after();" in self.body:
            return f"{device_source('trace')}{self.device}{head} {{\n{self.body}}}\n"
        # The functions of several launches in one find the records where their block keeps the address: launches of one module
        # that run at the same time have records of their own.
        known = "static __shared__ RmRecord *rm_records;\n"
        return f"{device_source('trace')}{known}{self.device}{head} {{\n::rm_records = rm_records;\n{self.body}}}\n"

    def named(self, prefix: str) -> TaskKernel:
        """The kernel under a name that is ``prefix`` and a hash of the text."""
        return replace(self, entry=prefix + hash_of(self.text))


@dataclass(frozen=True, slots=True)
class HeldKernel(TaskKernel):
    """A kernel in two parts: ``{name}_hold`` fetches a task's constants, ``held`` floats a thread, into registers;
    ``{name}_step`` computes the task with them.

    ``words`` are the tensors that travel as words: one more pointer each, behind the ``arguments``. A kernel with words has
    no entry point of its own.
    """

    name: str = ""
    held: int = 0
    words: tuple[str, ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The C types of what its pointers point to."""
        return (*("float" if a.written else "const float" for a in self.arguments), *["unsigned"] * len(self.words))


def declare_parameter(kind: str, argument: Argument, number: int, binding: Binding) -> str:
    """The declaration of pointer parameter ``number`` to elements of the C type ``kind``. What other kernels write is not
    ``const __restrict__``: such loads may be moved before the wait for those kernels, and go by a cache that need not see
    what they wrote meanwhile."""
    if argument.written:
        return f"{kind} *__restrict__ p{number}"
    return f"const {kind} *{'__restrict__ ' if argument.tensor in binding.constants else ''}p{number}"


def place_of(tensor: str, pointer: str, binding: Binding) -> Place:
    """Where the tensor lies that begins at ``pointer``."""
    kind = binding.types[tensor]
    zeros = (integer(0),) * len(kind.shape)
    return Place(pointer, kind.dtype, binding.storages[tensor].strides, zeros, kind.shape)


def origin_lines(operator: ROperator) -> list[str]:
    """Lines that define ``o0, o1, ...``, the first element of the task numbered ``task`` along each axis."""
    places = zip(split_digits("task", operator.grid), operator.tile, operator.grid, strict=True)
    starts = ("0" if count == 1 else place if tile == 1 else f"{place} * {tile}" for place, tile, count in places)
    return [f"const int o{d} = {start};" for d, start in enumerate(starts)]


def contiguous_tile(shape: Sequence[int], size: int, multiples: Sequence[int] = ()) -> tuple[int, ...]:
    """A tile of about ``size`` elements that lie together: inner axes whole, one split evenly, outer ones 1.

    The split axis gets a multiple of its entry in ``multiples`` (or the whole extent).
    """
    tile, below = [1] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        if below * shape[d] <= size:
            tile[d] = shape[d]
            below *= shape[d]
            continue
        part, step = -(-shape[d] // -(-shape[d] * below // size)), multiples[d] if multiples else 1
        tile[d] = min(shape[d], -(-part // step) * step)
        break
    return tuple(tile)
