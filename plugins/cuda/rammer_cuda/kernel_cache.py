"""A cache of values computed or measured for a program, for the next process. Best effort."""

from __future__ import annotations

from rammer.codegen.program_values import CachedValue, KernelForm, of_generators
from rammer.device.manifest import Binding
from rammer.ir.program import RProgram

from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import Writer

#: The cached form of kernels.
FORM = KernelForm(TaskKernel, "parameters")


class Cached(CachedValue):
    """A JSON value about ``program``: its kind ``what``, and the ``versions`` of its other dependencies."""

    def __init__(self, program: RProgram, what: str, *versions: str) -> None:
        super().__init__("cuda", program, what, *versions)


def cached_kernels(program: RProgram, binding: Binding, writer: Writer) -> dict[str, TaskKernel]:
    """Return the kernels of a program by operator, cached for the next process. Best effort."""
    return FORM.cached(make_cache_entry(program, binding, "kernels"), program.operators, binding, writer)


def make_cache_entry(program: RProgram, binding: Binding, what: str) -> Cached:
    """Return a cache entry that depends on a program, its constants' names and the generators' text."""
    return Cached(program, what, *of_generators("rammer_cuda", binding))
