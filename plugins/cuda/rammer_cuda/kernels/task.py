"""TaskKernel: the CUDA text of one operator's kernel and its launch shape, whatever family wrote it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rammer.codegen import Argument, Place, hash_of, split_digits
from rammer.device.manifest import Binding
from rammer.ir.expr import integer
from rammer.ir.operator import ROperator

from rammer_cuda.device import device_source


@dataclass(frozen=True, slots=True)
class TaskKernel:
    """The kernel of one operator: entry point, text in parts, pointer arguments and launch shape.

    ``device`` is the text before the kernel, ``parameters`` declare its pointers. ``body`` are its statements, "" without an
    entry point. A block has ``threads`` and ``shared`` bytes, of which ``dynamic`` are requested at launch. A task has
    ``blocks``: a task whose sum is split runs as one thread-block cluster. Registers must suffice for ``resident`` blocks per SM
    (0: ptxas decides). With ``traced``, blocks record when they worked. With ``stops``, elements past a run's lengths are left
    unwritten, also within a task.
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
        """The kernel and its dependencies besides the preamble. ``order`` is null if a launch has consecutive tasks, from
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
        # Functions of a fused launch read the records' address from the block's shared memory: concurrent launches of one module
        # have separate records.
        known = "static __shared__ RmRecord *rm_records;\n"
        return f"{device_source('trace')}{known}{self.device}{head} {{\n::rm_records = rm_records;\n{self.body}}}\n"

    def named(self, prefix: str) -> TaskKernel:
        """Return the kernel with a name of ``prefix`` and a hash of the text."""
        return replace(self, entry=prefix + hash_of(self.text))


@dataclass(frozen=True, slots=True)
class HeldKernel(TaskKernel):
    """A kernel in two parts: ``{name}_hold`` loads a task's constants into registers, ``{name}_step`` computes the task.

    ``held`` is the number of floats per thread. ``words`` are the tensors that travel as words: one more pointer each, after the
    ``arguments``. A kernel with words has an empty entry point."""

    name: str = ""
    held: int = 0
    words: tuple[str, ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The C types that its pointers point to."""
        return (*(p.rpartition(" *")[0] for p in self.parameters), *["unsigned"] * len(self.words))


def declare_parameter(kind: str, argument: Argument, number: int, binding: Binding) -> str:
    """Return the declaration of pointer parameter ``number`` to elements of the C type ``kind``.

    Pointers to other kernels' results are not ``const __restrict__``. Those loads may be moved before the wait for the kernels,
    and use a cache that may miss later writes."""
    if argument.written:
        return f"{kind} *__restrict__ p{number}"
    return f"const {kind} *{'__restrict__ ' if argument.tensor in binding.constants else ''}p{number}"


def place_of(tensor: str, pointer: str, binding: Binding) -> Place:
    """Return the storage of the tensor that begins at ``pointer``."""
    kind = binding.types[tensor]
    zeros = (integer(0),) * len(kind.shape)
    return Place(pointer, kind.dtype, binding.storages[tensor].strides, zeros, kind.shape)


def origin_lines(operator: ROperator) -> list[str]:
    """Return the lines that define ``o0, o1, ...``, the first element of task ``task`` along each axis."""
    places = zip(split_digits("task", operator.grid), operator.tile, operator.grid, strict=True)
    starts = ("0" if count == 1 else place if tile == 1 else f"{place} * {tile}" for place, tile, count in places)
    return [f"const int o{d} = {start};" for d, start in enumerate(starts)]
