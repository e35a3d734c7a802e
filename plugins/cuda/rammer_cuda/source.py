"""The CUDA text of operators, by kernel family; ``generic`` is the core's emitter and computes everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rammer.codegen.dialects import CUDA
from rammer.codegen.task import Argument, Unsuited
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator

from rammer_cuda.families import family_of
from rammer_cuda.kernels.task import TaskKernel

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
def task_kernel(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled operator; equal operators have equal texts. An unknown family is computed by the generic
    kernel; DeviceFailure where a known one cannot compute the operator."""
    try:
        return family_of(operator).kernel(operator, binding)
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


def translation_unit(kernels: Iterable[TaskKernel]) -> str:
    """One source of all distinct kernels, the preamble first."""
    distinct = {k.entry: k.text for k in kernels}
    return CUDA.preamble + ORDER + "\n".join(distinct[entry] for entry in sorted(distinct))
