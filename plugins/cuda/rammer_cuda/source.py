"""The CUDA text of operators: task functions from the core's emitter, and the kernels around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rammer.codegen.dialects import CUDA
from rammer.codegen.emit import emit
from rammer.codegen.target import CFunction
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.targets import THREADS

#: One block a task. ``order`` is null where the launch covers consecutive tasks from ``first``.
_KERNEL = """
extern "C" __global__ void __launch_bounds__({threads}) k_{name}({parameters}, const int *order, int first)
{{
  {scratch}
  const int task = order ? order[blockIdx.x] : first + (int)blockIdx.x;
  {name}({arguments}, scratch, task);
}}
"""


@dataclass(frozen=True, slots=True)
class TaskKernel:
    """One operator's kernel: entry point, text, pointer arguments (tensor, written), block size and
    static shared bytes."""

    entry: str
    text: str
    arguments: tuple[tuple[str, bool], ...]
    threads: int
    shared: int


def task_kernel(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled operator; equal operators have equal texts."""
    function = emit(operator, binding, CUDA)
    threads = dict(operator.config).get("threads", THREADS)
    return TaskKernel(f"k_{function.name}", function.text + _wrapper(function, binding, threads),
                      function.arguments, threads, function.scratch)  # fmt: skip


def _wrapper(function: CFunction, binding: Binding, threads: int) -> str:
    names = [f"p{i}" for i in range(len(function.arguments))]
    types = [CUDA.types[binding.types[t].dtype] for t, _ in function.arguments]
    parameters = ", ".join(f"{t} *{n}" for t, n in zip(types, names, strict=True))
    scratch = f"__shared__ __align__(16) char scratch[{max(function.scratch, 16)}];"
    return _KERNEL.format(threads=threads, name=function.name, parameters=parameters, scratch=scratch,
                          arguments=", ".join(names))  # fmt: skip


def translation_unit(kernels: Iterable[TaskKernel]) -> str:
    """One source of all distinct kernels, the preamble first."""
    distinct = {k.entry: k.text for k in kernels}
    return CUDA.preamble + "\n".join(distinct[entry] for entry in sorted(distinct))
