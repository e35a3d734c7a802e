"""The generic kernel: the core's emitter, which computes everything, a block a task."""

from __future__ import annotations

from rammer.codegen.emit import emit
from rammer.codegen.target import CFunction
from rammer.codegen.task import Argument
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.dialect import CUDA
from rammer_cuda.gpu import THREADS
from rammer_cuda.kernels.task import TaskKernel

#: Shared memory that needs no asking for; larger scratch memory is dynamic.
STATIC_SHARED = 48 << 10

#: One block a task. ``order`` is null where the launch covers consecutive tasks from ``first``.
_KERNEL = """
extern "C" __global__ void __launch_bounds__({threads}) k_{name}({parameters}, const int *order, int first)
{{
  {scratch}
  rm_after();
  const int task = order ? order[blockIdx.x] : first + (int)blockIdx.x;
  {name}({arguments}, scratch, task);
}}
"""


def generic(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of any operator, in blocks of as many threads as its config says."""
    function = emit(operator, binding, CUDA)
    threads = dict(operator.config).get("threads", THREADS)
    arguments = tuple(Argument(t, written) for t, written in function.arguments)
    dynamic = function.scratch if function.scratch > STATIC_SHARED else 0
    return TaskKernel(
        f"k_{function.name}", function.text + _wrapper(function, binding, threads), arguments, threads, function.scratch, dynamic
    )


def _wrapper(function: CFunction, binding: Binding, threads: int) -> str:
    names = [f"p{i}" for i in range(len(function.arguments))]
    types = [CUDA.types[binding.types[t].dtype] for t, _ in function.arguments]
    parameters = ", ".join(f"{t} *{n}" for t, n in zip(types, names, strict=True))
    scratch = f"__shared__ __align__(16) char scratch[{max(function.scratch, 16)}];"
    if function.scratch > STATIC_SHARED:
        scratch = "extern __shared__ __align__(16) char scratch[];"
    return _KERNEL.format(threads=threads, name=function.name, parameters=parameters, scratch=scratch, arguments=", ".join(names))
