"""Lengths of a run, stored as words in device memory: bounds of reductions, and early exits of blocks past a length."""

from __future__ import annotations

from dataclasses import replace

from rammer.codegen import Argument, EndText, Text
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.task import TaskKernel


def length_names(operator: ROperator) -> dict[str, str]:
    """Return the pointer parameters of the lengths that determine an operator's extents."""
    return {n: f"rm_n{k}" for k, n in enumerate(operator.lengths)}


def with_lengths(operator: ROperator, kernel: TaskKernel) -> TaskKernel:
    """Return ``kernel`` with a parameter appended for each length of ``operator``, unless it has them."""
    names = length_names(operator)
    made = tuple(f"const {CUDA.types['int64']} *__restrict__ {n}" for n in names.values())
    if not made or kernel.parameters[-len(made) :] == made:
        return kernel
    arguments = (*kernel.arguments, *(Argument(n, written=False) for n in names))
    return replace(kernel, parameters=(*kernel.parameters, *made), arguments=arguments)


def ended(operator: ROperator, kernel: TaskKernel, binding: Binding) -> TaskKernel:
    """Return ``kernel`` after a test of the operator's end, or unchanged without one. The lengths are words in device memory.

    Blocks that exit early still wait for earlier kernels first. The kernel may write to memory that those use, and dependent
    kernels assume that those have finished."""
    if not operator.skips or not kernel.body:
        return kernel
    lengths = length_names(operator)
    pointers = {a.tensor: f"p{k}" for k, a in enumerate(kernel.arguments) if a.written}
    slot = f"(int)blockIdx.x{f' / {kernel.blocks}' if kernel.blocks > 1 else ''}"
    text, ends = Text(), EndText(operator, binding, CUDA, pointers, lengths)
    with text.block(""):
        text.lines += [f"  const int slot = {slot};", "  const int task = order ? order[slot] : first + slot;"]
        text.lines += ends.beginning(before="rm_after();")
    rest = "".join(f"{line}\n" for line in ends.rest()) if kernel.stops else ""
    return replace(with_lengths(operator, kernel), entry="", body=f"{text}{kernel.body}{rest}").named("ended_")
