"""The kernels of a program, written by the kernel families and compiled by the OpenCL runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rammer.codegen.program_values import CachedValue, KernelForm, of_generators
from rammer.device.manifest import Array, Binding
from rammer.ir.device import VDevice
from rammer.ir.program import RProgram

from rammer_rocm.dialect import dialect_of
from rammer_rocm.families import OpenClKernels
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.kernels.task_guards import ended, skip_unchanged_task
from rammer_rocm.program_kernels import Write

#: Form of cached task functions, excluding functions that call another.
FORM: Final = KernelForm(TaskFunction, "types", lambda function: function.inner is None)
#: Below this number of operators, writing them is fast and caching is skipped: kernel measurement loads thousands of programs
#: with one operator.
CACHED_FROM: Final = 8


def task_functions(kernels: OpenClKernels, program: RProgram, binding: Binding) -> dict[str, TaskFunction]:
    """Return the function of every operator with tasks, by name. Functions of large models are cached for later processes."""
    used = {task.operator for row in program.rows for task in row}
    operators = [o for o in program.operators if o.name in used]
    if len(operators) < CACHED_FROM:
        return kernels.writer.all(operators, binding)
    versions = of_generators("rammer_rocm", binding)
    return FORM.cached(
        CachedValue("rocm", program, "kernels", *versions, repr(kernels.vdevice)), operators, binding, kernels.writer
    )


@dataclass(frozen=True)
class WrittenKernels:
    """The kernels of a device's programs, written by its families ``kernels`` and compiled by ``builder``."""

    kernels: OpenClKernels
    builder: Callable[[str], Any]

    @property
    def vdevice(self) -> VDevice:
        """The virtual device that the kernels are written for."""
        return self.kernels.vdevice

    def functions(self, program: RProgram, constants: Mapping[str, Array]) -> dict[str, TaskFunction]:
        """Return the function of every operator, guarded by tests of lengths and of new work."""
        binding = Binding.of(program, constants)
        dialect, operator = dialect_of(self.vdevice), program.operator
        found = task_functions(self.kernels, program, binding)
        found = {o: ended(operator[o], f, binding, dialect) for o, f in found.items()}
        if program.repeat is not None:  # the last iteration has fewer steps
            writer = self.kernels.writer
            found = {o: skip_unchanged_task(operator[o], f, writer, binding, dialect) for o, f in found.items()}
        return found

    def build(self, write: Write) -> Any:
        """Return the compiled OpenCL program."""
        return self.builder(write(dialect_of(self.vdevice)))
