"""The CUDA text of operators, by kernel family; ``generic`` is the core's emitter and computes everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rammer.codegen.dialects import CUDA
from rammer.codegen.emit import emit
from rammer.codegen.target import CFunction
from rammer.codegen.task import Argument, Unsuited
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator

from rammer_cuda.attention.kernel import attention
from rammer_cuda.cell.kernel import cell
from rammer_cuda.chain.kernel import gemm_chain
from rammer_cuda.contraction.families import FAMILIES
from rammer_cuda.contraction.kernel import INSTRUCTIONS, contraction
from rammer_cuda.gpu import THREADS
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.rows.gemv import gemv
from rammer_cuda.rows.rowwise import rowwise
from rammer_cuda.window.kernel import window

#: ``rm_trigger`` lets dependent kernels start, ``rm_after`` waits until those this one depends on have finished and their
#: results are visible (programmatic dependent launch, from compute capability 9.0 on). Every kernel calls the second.
#: ``rm_early`` is the switch of ``rammer_cuda.early``.
ORDER = """
extern "C" { __constant__ int rm_early = 0; }
__device__ __forceinline__ void rm_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void rm_after() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (rm_early) rm_trigger();
#endif
}
"""
#: What writes the kernels of each family.
MAKERS = dict.fromkeys(INSTRUCTIONS, contraction) | {
    "gemv": gemv, "rowwise": rowwise, "window": window, "cell": cell, "gemm_chain": gemm_chain, "attention": attention,
}  # fmt: skip

_SMALL = range(0, 1025)
_PRODUCT = dict.fromkeys(("tm", "tn", "bk", "split", "slices", "stages"), _SMALL)
_WIDE = dict.fromkeys(("bk", "stages", "split", "patch", "copiers", "down"), _SMALL)
#: The values of every config key, by family. What of them goes together each family decides (``Unsuited``).
CONFIGS = {
    "": {"threads": range(32, 1025)}, **dict.fromkeys(FAMILIES, _PRODUCT),
    **dict.fromkeys(("gemm_wgmma3", "gemm_wgmma1", "gemm_wgmma_f16"), _WIDE),
    "gemv": {"lanes": range(1, 1025), "columns": range(1, 1025)}, "rowwise": {"lanes": range(1, 1025), "vector": range(1, 17)},
    "window": {"high": range(1, 1025), "wide": range(1, 1025)}, "cell": {},
    "gemm_chain": {"groups": range(1, 1025), "stages": range(1, 1025)},
    "attention": dict.fromkeys(("groups", "warps", "chunk", "stages"), range(1, 1025)),
}  # fmt: skip

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


def task_kernel(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled operator; equal operators have equal texts. An unknown family is computed by the generic
    kernel; DeviceFailure where a known one cannot compute the operator."""
    make = MAKERS.get(operator.family)
    if make is None:
        return _generic(operator, binding)
    try:
        return make(operator, binding)
    except Unsuited as problem:
        raise DeviceFailure(
            f"operator {operator.name} is none for family {operator.family}: {problem}",
            where=operator.anchor.origin, hint="choose another tile, or no family",
        ) from problem  # fmt: skip


def task_kernels(operators: Iterable[ROperator], binding: Binding) -> dict[str, TaskKernel]:
    """The kernel of every operator by name; equal operators share one emission (an unrolled LSTM has thousands)."""
    listed = list(operators)
    kinds = kinds_of(listed, binding)
    made: dict[int, tuple[ROperator, TaskKernel]] = {}
    result: dict[str, TaskKernel] = {}
    for operator in listed:
        kind = kinds[operator.name]
        if kind not in made:
            made[kind] = operator, task_kernel(operator, binding)
        first, kernel = made[kind]
        result[operator.name] = replace(kernel, arguments=moved(kernel.arguments, renaming(first, operator)))
    return result


def kinds_of(operators: Iterable[ROperator], binding: Binding) -> dict[str, int]:
    """A number for every operator by name, equal for operators whose kernels have equal texts."""
    numbers: dict[str, int] = {}
    return {o.name: numbers.setdefault(binding.key(o), len(numbers)) for o in operators}


def renaming(first: ROperator, operator: ROperator) -> dict[str, str]:
    """The tensors of ``operator`` by those of the equal operator ``first``."""
    return dict(zip((*first.inputs, *first.outputs), (*operator.inputs, *operator.outputs), strict=True))


def moved(arguments: Iterable[Argument], names: Mapping[str, str]) -> tuple[Argument, ...]:
    """``arguments`` of an equal operator, with this one's tensors."""
    return tuple([Argument(names[a.tensor], a.written, a.packing) for a in arguments])


def _generic(operator: ROperator, binding: Binding) -> TaskKernel:
    function = emit(operator, binding, CUDA)
    threads = dict(operator.config).get("threads", THREADS)
    arguments = tuple(Argument(t, written) for t, written in function.arguments)
    dynamic = function.scratch if function.scratch > STATIC_SHARED else 0
    return TaskKernel(f"k_{function.name}", function.text + _wrapper(function, binding, threads),
                      arguments, threads, function.scratch, dynamic)  # fmt: skip


def _wrapper(function: CFunction, binding: Binding, threads: int) -> str:
    names = [f"p{i}" for i in range(len(function.arguments))]
    types = [CUDA.types[binding.types[t].dtype] for t, _ in function.arguments]
    parameters = ", ".join(f"{t} *{n}" for t, n in zip(types, names, strict=True))
    scratch = f"__shared__ __align__(16) char scratch[{max(function.scratch, 16)}];"
    if function.scratch > STATIC_SHARED:
        scratch = "extern __shared__ __align__(16) char scratch[];"
    return _KERNEL.format(threads=threads, name=function.name, parameters=parameters, scratch=scratch,
                          arguments=", ".join(names))  # fmt: skip


def translation_unit(kernels: Iterable[TaskKernel]) -> str:
    """One source of all distinct kernels, the preamble first."""
    distinct = {k.entry: k.text for k in kernels}
    return CUDA.preamble + ORDER + "\n".join(distinct[entry] for entry in sorted(distinct))
