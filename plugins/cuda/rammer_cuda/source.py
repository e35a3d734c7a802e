"""The CUDA text of operators, by kernel family; ``generic`` is the core's emitter and supports every operator."""

from __future__ import annotations

from collections.abc import Iterable

from rammer.codegen import Unsuited
from rammer.codegen.writer import KernelWriter, make_refusal
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.device import device_source
from rammer_cuda.dialect import CUDA
from rammer_cuda.families import family_of
from rammer_cuda.kernels.task import TaskKernel


def task_kernel(operator: ROperator, binding: Binding) -> TaskKernel:
    """Return the kernel of a tiled operator; equal operators have equal texts. An unknown family uses the generic kernel. Raises
    DeviceFailure if a known family cannot compute the operator."""
    try:
        return family_of(operator).kernel(operator, binding)
    except Unsuited as problem:
        raise make_refusal(operator, problem) from problem


class Writer(KernelWriter[TaskKernel]):
    """A writer of this device's kernels, each once."""

    def __init__(self) -> None:
        super().__init__(lambda operator, binding: task_kernel(operator, binding))


def translation_unit(kernels: Iterable[TaskKernel]) -> str:
    """Return one source of all distinct kernels, the preamble first."""
    distinct = {k.entry: k.text for k in kernels}
    return CUDA.preamble + device_source("order") + "\n".join(distinct[entry] for entry in sorted(distinct))
