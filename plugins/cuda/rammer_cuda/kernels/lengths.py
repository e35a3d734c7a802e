"""Lengths of a run, stored as words in device memory: bounds of reductions, and early exits of blocks past a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rammer.codegen import Argument, EndText, Text, format_sum
from rammer.device.manifest import Binding
from rammer.ir.compute import Axis, Compute
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


@dataclass(frozen=True)
class Stopped:
    """A reduced axis that ends early: the variable of its end, from 1 to the bound, and the definition."""

    axis: Axis
    name: str
    definition: str


def stopped_axes(operator: ROperator, c: Compute, axes: Sequence[Axis]) -> dict[str, Stopped]:
    """Return the ``axes`` of the reduction ``c`` that stop at a length, by name."""
    lengths, found = length_names(operator), dict[str, Stopped]()
    extents = {s.axis: s.extent for s in operator.reduce_bounds if s.compute == c.name}
    for number, axis in enumerate(axes):
        if axis.name in extents and axis.extent > 1:
            extent, name = extents[axis.name], f"stop{number}"
            value = format_sum([(f"{lengths[n]}[0]", f) for n, f in extent.terms], extent.offset)
            text = f"const int {name} = (int)rm_min_i64(rm_max_i64({value}, 1ll), {axis.extent}ll);"
            found[axis.name] = Stopped(axis, name, text)
    return found


def ceiling_quotient(value: str, block: int) -> str:
    """Return C text for the number of blocks of size ``block`` that hold ``value``."""
    return value if block == 1 else f"({value} + {block - 1}) / {block}"


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
