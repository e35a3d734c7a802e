"""Guards before a task's function: for tasks past a run's length, and for tasks without new work."""

from __future__ import annotations

from dataclasses import replace

from rammer.codegen import Argument, EndText, hash_of, rest_of
from rammer.codegen.c_target import CTarget
from rammer.codegen.writer import KernelWriter
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.task import TaskFunction


def ended(operator: ROperator, function: TaskFunction, binding: Binding, dialect: CTarget) -> TaskFunction:
    """Return ``function`` guarded by a test of the operator's dynamic end, or unchanged if the operator has no endings."""
    if not operator.skips:
        return function
    lengths = {n: f"n{k}" for k, n in enumerate(operator.lengths)}
    pointers = {a.tensor: f"p{k}" for k, a in enumerate(function.arguments) if a.written}
    ends = EndText(operator, binding, dialect, pointers, lengths)
    lines = ends.beginning()
    types = (*function.types, *("const long" for _ in lengths))
    names = [f"p{k}" for k in range(len(function.types))]
    parameters = [f"__global {kind} *{name}" for kind, name in zip(types, [*names, *lengths.values()], strict=True)]
    lines.append(f"  {function.entry}({', '.join([*names, *_last_names(function)])});")
    if function.stops:
        lines += ends.rest()
    rest = f"({', '.join([*parameters, *_last_parameters(function, dialect)])})\n{{\n" + "\n".join(lines) + "\n}\n"
    entry = f"ended_{hash_of(rest)}"
    arguments = (*function.arguments, *(Argument(n, written=False) for n in lengths))
    return replace(function, entry=entry, text=f"void {entry}{rest}", arguments=arguments, types=types, inner=function)


def skip_unchanged_task(
    operator: ROperator, function: TaskFunction, writer: KernelWriter[TaskFunction], binding: Binding, dialect: CTarget
) -> TaskFunction:
    """Return ``function`` guarded by a test for new work, or unchanged if every task always has new work."""
    rest = rest_of(operator)
    if rest is None:
        return function
    kept = writer.written(rest.kept, binding)
    arguments, types = list(function.arguments), list(function.types)
    tests = (Argument(n, written=False) for n in rest.tensors)
    kinds = (f"const {dialect.types[binding.types[n].dtype]}" for n in rest.tensors)
    for argument, kind in (*zip(kept.arguments, kept.types, strict=True), *zip(tests, kinds, strict=True)):
        if argument not in arguments:
            arguments.append(argument)
            types.append(kind)
    names = {a: f"p{k}" for k, a in enumerate(arguments)}
    pointers = {n: names[Argument(n, written=False)] for n in rest.tensors}
    parameters = [f"__global {kind} *{name}" for kind, name in zip(types, names.values(), strict=True)]
    lines = [*rest.lines(operator, binding, pointers)]
    for test, called in (("if (on) ", function), ("else if (rank == 0) " if function.blocks > 1 else "else ", kept)):
        lines.append(f"{test}{called.entry}({', '.join([*(names[a] for a in called.arguments), *_last_names(called)])});")
    last = _last_parameters(function, dialect)
    rest_text = f"({', '.join([*parameters, *last])})\n{{\n  " + "\n  ".join(lines) + "\n}\n"
    entry = f"rested_{hash_of(rest_text)}"
    inner, scratch = replace(function, inner=kept), max(function.scratch, kept.scratch)
    made = replace(function, arguments=tuple(arguments), types=tuple(types), scratch=scratch, inner=inner)
    return replace(made, entry=entry, text=f"void {entry}{rest_text}")


def _last_names(function: TaskFunction) -> list[str]:
    """Return the arguments of a call that follow the pointers."""
    return ["scratch", "task", *(("partials", "arrived", "slot", "rank") if function.blocks > 1 else ())]


def _last_parameters(function: TaskFunction, dialect: CTarget) -> list[str]:
    """Return the parameters that follow the pointers."""
    shared = ["__global float *partials", "__global int *arrived", "int slot", "int rank"] if function.blocks > 1 else []
    return [f"{'__global' if dialect.single else '__local'} char *scratch", "int task", *shared]
