"""Tasks of a program for a range of lengths: one that lies beyond the length is not called."""

from __future__ import annotations

from rammer.codegen.ended import EndText
from rammer.codegen.target import CTarget
from rammer.codegen.task import Argument, hash_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.task import TaskFunction


def ended(operator: ROperator, function: TaskFunction, binding: Binding, dialect: CTarget) -> TaskFunction:
    """``function`` behind a test of where the operator ends; itself where that is nowhere."""
    if not operator.endings:
        return function
    lengths = {n: f"n{k}" for k, n in enumerate(operator.lengths)}
    pointers = {a.tensor: f"p{k}" for k, a in enumerate(function.arguments) if a.written}
    ends = EndText(operator, binding, dialect, pointers, lengths)
    lines = ends.beginning()
    types = (*function.types, *("const long" for _ in lengths))
    names = [f"p{k}" for k in range(len(function.types))]
    memory = "__global" if dialect.single else "__local"
    parameters = [f"__global {kind} *{name}" for kind, name in zip(types, [*names, *lengths.values()], strict=True)]
    lines.append(f"  {function.entry}({', '.join([*names, 'scratch', 'task'])});")
    if function.stops:
        lines += ends.rest()
    rest = f"({', '.join([*parameters, f'{memory} char *scratch', 'int task'])})\n{{\n" + "\n".join(lines) + "\n}\n"
    entry = f"ended_{hash_of(rest)}"
    arguments = (*function.arguments, *(Argument(n, written=False) for n in lengths))
    return TaskFunction(entry, f"void {entry}{rest}", arguments, types, function.scratch, inner=function)
