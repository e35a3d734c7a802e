"""Kernels of a program for a range of lengths: blocks of a task beyond the length leave at once."""

from __future__ import annotations

from dataclasses import replace

from rammer.codegen.ended import EndText
from rammer.codegen.text import Text
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.lengths import length_names, with_lengths
from rammer_cuda.kernels.task import TaskKernel


def ended(operator: ROperator, kernel: TaskKernel, binding: Binding) -> TaskKernel:
    """``kernel`` behind a test of where the operator ends; itself where that is nowhere. The lengths are words in device memory.

    Who leaves early has waited for earlier kernels all the same: their memory may be what it writes, and kernels that depend on
    this one take its end for theirs."""
    if not operator.endings or not kernel.body:
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
