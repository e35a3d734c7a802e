"""Where the reductions of a program for a range of lengths stop in a run: the lengths are words in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rammer.codegen.task import Argument
from rammer.codegen.text import total
from rammer.ir.compute import Axis, Compute
from rammer.ir.operator import ROperator

from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.task import TaskKernel


def length_names(operator: ROperator) -> dict[str, str]:
    """The pointer parameters of the lengths that an operator's extents are functions of."""
    return {n: f"rm_n{k}" for k, n in enumerate(operator.lengths)}


def with_lengths(operator: ROperator, kernel: TaskKernel) -> TaskKernel:
    """``kernel`` with a parameter for each length of ``operator`` behind its own; itself where it has them."""
    names = length_names(operator)
    made = tuple(f"const {CUDA.types['int64']} *__restrict__ {n}" for n in names.values())
    if not made or kernel.parameters[-len(made) :] == made:
        return kernel
    arguments = (*kernel.arguments, *(Argument(n, written=False) for n in names))
    return replace(kernel, parameters=(*kernel.parameters, *made), arguments=arguments)


@dataclass(frozen=True)
class Stopped:
    """A reduced axis that ends early: the variable that says where, from 1 to what it is at the bound, and its definition."""

    axis: Axis
    name: str
    definition: str


def stopped(operator: ROperator, c: Compute, axes: Sequence[Axis]) -> dict[str, Stopped]:
    """Those of ``axes`` of the reduction ``c`` that stop at a length, by name."""
    lengths, found = length_names(operator), dict[str, Stopped]()
    extents = {s.axis: s.extent for s in operator.stops if s.compute == c.name}
    for number, axis in enumerate(axes):
        if axis.name in extents and axis.extent > 1:
            extent, name = extents[axis.name], f"stop{number}"
            value = total([(f"{lengths[n]}[0]", f) for n, f in extent.terms], extent.offset)
            text = f"const int {name} = (int)rm_min_i64(rm_max_i64({value}, 1ll), {axis.extent}ll);"
            found[axis.name] = Stopped(axis, name, text)
    return found


def ceiling(value: str, block: int) -> str:
    """How many blocks of so many hold ``value``."""
    return value if block == 1 else f"({value} + {block - 1}) / {block}"
