"""The generic kernel: the core's emitter, which supports every operator, one block per task."""

from __future__ import annotations

from dataclasses import replace

from rammer.codegen import Argument, Text
from rammer.codegen.c_target import CFunction
from rammer.codegen.emit import emit_operator
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.dialect import CUDA
from rammer_cuda.gpu import THREADS
from rammer_cuda.kernels.task import TaskKernel

#: Shared memory available without a request; larger scratch memory is dynamic.
STATIC_SHARED = 48 << 10


def generic_kernel(operator: ROperator, binding: Binding) -> TaskKernel:
    """Return the kernel of any operator, with the block's threads from its config."""
    function = emit_operator(operator, binding, CUDA, within=True)
    threads = dict(operator.config).get("threads", THREADS)
    arguments = tuple(Argument(t, written) for t, written in function.arguments)
    dynamic = function.scratch if function.scratch > STATIC_SHARED else 0
    parameters = tuple(f"{CUDA.types[binding.types[a.tensor].dtype]} *p{k}" for k, a in enumerate(arguments))
    shape = threads, function.scratch, dynamic
    made = TaskKernel(f"k_{function.name}", function.text, parameters, str(_task_body(function)), arguments, *shape)
    return replace(made, stops=function.stops)


def _task_body(function: CFunction) -> Text:
    text, pointers = Text(), "".join(f"p{k}, " for k in range(len(function.arguments)))
    if function.scratch > STATIC_SHARED:
        text.line("extern __shared__ __align__(16) char scratch[];")
    else:
        text.line(f"__shared__ __align__(16) char scratch[{max(function.scratch, 16)}];")
    text.line("rm_after();")
    text.line("const int task = order ? order[blockIdx.x] : first + (int)blockIdx.x;")
    text.line(f"{function.name}({pointers}scratch, task);")
    return text
