"""What was worked out or measured for a program, cached for the next process. Best effort."""

from __future__ import annotations

from rammer.compiled.program_values import CachedValue, KernelForm, of_generators
from rammer.device.manifest import Binding
from rammer.ir.program import RProgram

from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import Writer

#: What is cached of kernels.
FORM = KernelForm(TaskKernel, "parameters")


class Cached(CachedValue):
    """One JSON value about ``program``: ``what`` it is, and the ``versions`` of what else it depends on."""

    def __init__(self, program: RProgram, what: str, *versions: str) -> None:
        super().__init__("cuda", program, what, *versions)


def cached_kernels(program: RProgram, binding: Binding, writer: Writer) -> dict[str, TaskKernel]:
    """The kernels of a program by operator, cached for the next process. Best effort."""
    return FORM.cached(make_cache_entry(program, binding, "kernels"), program.operators, binding, writer)


def make_cache_entry(program: RProgram, binding: Binding, what: str) -> Cached:
    """A place for what follows from a program, its constants' names and the text of the generators."""
    return Cached(program, what, *of_generators("rammer_cuda", binding))
