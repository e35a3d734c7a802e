"""The generic family: the core's C emitter in the OpenCL dialect, for every operator there is."""

from __future__ import annotations

from dataclasses import replace

from rammer.codegen.dialects import one_thread
from rammer.codegen.emit import emit
from rammer.codegen.target import CTarget
from rammer.codegen.task import Argument
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_rocm.dialect import OPENCL
from rammer_rocm.kernels.task import TaskFunction

#: A CPU core's scratch memory is a slice of a global buffer: unlike local memory it has no limit of its own.
CPU_DIALECT = replace(one_thread(OPENCL), local="__global")
GPU_DIALECT = OPENCL


def generic(operator: ROperator, binding: Binding, dialect: CTarget) -> TaskFunction:
    """The task function of ``operator``; DeviceFailure where OpenCL C lacks an element type."""
    function = emit(operator, binding, dialect)
    arguments = tuple(Argument(name, written) for name, written in function.arguments)
    types = tuple(dialect.types[binding.types[name].dtype] for name, _ in function.arguments)
    text = function.text
    if dialect.single:
        # Inlining every task into the table walk would lengthen the build, and a call costs nanoseconds. On a GPU it
        # would cost registers: the calling convention reserves them.
        head = f"void {function.name}("
        text = text.replace(head, f"__attribute__((noinline)) {head}", 1)
    return TaskFunction(function.name, text, arguments, types, function.scratch)
