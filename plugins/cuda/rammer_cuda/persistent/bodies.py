"""The distinct device functions that a program's operators need in the persistent kernel."""

from __future__ import annotations

from collections.abc import Callable

from rammer.codegen import Argument
from rammer.codegen.emit import emit_operator
from rammer.codegen.writer import rename_arguments, tensor_renaming
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator

from rammer_cuda.dialect import CUDA
from rammer_cuda.families import family_of
from rammer_cuda.gpu import THREADS
from rammer_cuda.kernels.part import dynamic_bytes
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent.dataflow import Dataflow
from rammer_cuda.persistent.kernel_text import Body
from rammer_cuda.source import task_kernel

#: Threads of the largest block whose kernels are called unchanged: as many as cells have.
MOST_THREADS = 512


def callable_part(
    operator: ROperator,
    binding: Binding,
    most: int = MOST_THREADS,
    written: Callable[[ROperator, Binding], TaskKernel] = task_kernel,
) -> TaskKernel | None:
    """Return the operator's kernel as ``written`` if a block of ``most`` threads can call it for a task, else None.

    Kernels of several blocks, with early exits, or with shared memory of both kinds are unsupported. Generic kernels are already
    functions."""
    if not family_of(operator).name:
        return None
    try:
        kernel = written(operator, binding)
    except DeviceFailure:
        return None
    statics = kernel.shared > kernel.dynamic > 0
    if not kernel.body or kernel.blocks > 1 or kernel.threads > most or operator.skips or statics:
        return None
    return kernel


def pointee_types(kernel: TaskKernel) -> tuple[str, ...]:
    """Return the C types that a kernel's pointers point to."""
    return tuple(p.rpartition("*")[0].strip() for p in kernel.parameters)


class KernelBodies:
    """The device functions, and each operator's function number, arguments and word tensors (sent or received). ``threads`` of a
    block and ``shared`` bytes suffice for all functions."""

    def __init__(self, flow: Dataflow, binding: Binding, most: int = MOST_THREADS) -> None:
        self.flow, self.binding = flow, binding
        self.bodies: list[Body] = []
        self.number: dict[str, int] = {}
        self.arguments: dict[str, tuple[Argument, ...]] = {}
        self.words: dict[str, tuple[str, ...]] = {}
        self.threads, self.shared, self.most = THREADS, 16, most
        self._known: dict[tuple[int, str, str], ROperator] = {}

    def add(self, operator: ROperator) -> None:
        """Add one operator; equal ones share a function."""
        first = self._known.setdefault(self._body_key(operator), operator)
        if first is operator:
            self.number[operator.name] = self._emit_body(operator)
            return
        names = tensor_renaming(first, operator)
        self.number[operator.name] = self.number[first.name]
        self.words[operator.name] = tuple(names[t] for t in self.words[first.name])
        self.arguments[operator.name] = rename_arguments(self.arguments[first.name], names)

    def held(self) -> dict[str, tuple[object, ...]]:
        """Return the identity of the constants that each operator's function holds on chip."""
        return {n: tuple((a.tensor, a.packing.key) for a in args if a.packing is not None) for n, args in self.arguments.items()}

    def _body_key(self, operator: ROperator) -> tuple[int, str, str]:
        words, plain = self.flow.words.get(operator.name, frozenset()), self.flow.stored
        sent = "".join("w" if n in words else "-" for n in (*operator.inputs, *operator.outputs))
        kept = "".join("s" if n in plain else "-" for n in operator.outputs)
        return self.flow.kinds[operator.name], sent, kept

    def _emit_body(self, operator: ROperator) -> int:
        """Record the operator's function and arguments; return the function's number."""
        if held := family_of(operator).persistent:
            kernel = held.kernel(operator, self.binding, self.flow.words.get(operator.name, ()), self.flow.stored)
            self.arguments[operator.name], self.words[operator.name] = kernel.arguments, kernel.words
            self.threads, self.shared = max(self.threads, held.threads), max(self.shared, kernel.shared)
            return self._number_body(Body(kernel.name, kernel.text, kernel.types, kernel))
        if part := callable_part(operator, self.binding, self.most):
            self.arguments[operator.name], self.words[operator.name] = part.arguments, ()
            self.threads, self.shared = max(self.threads, part.threads), max(self.shared, dynamic_bytes(part))
            return self._number_body(Body(part.entry, part.device, pointee_types(part), part=part))
        function = emit_operator(operator, self.binding, CUDA)
        types = [CUDA.types[self.binding.types[t].dtype] for t, _ in function.arguments]
        self.arguments[operator.name] = tuple(Argument(t, w) for t, w in function.arguments)
        self.words[operator.name] = ()
        self.shared = max(self.shared, function.scratch)
        return self._number_body(Body(function.name, function.text, tuple(types)))

    def _number_body(self, body: Body) -> int:
        """Return the number of ``body``, whose name is a hash of its text."""
        names = [b.name for b in self.bodies]
        if body.name in names:
            return names.index(body.name)
        self.bodies.append(body)
        return len(names)


def operator_bodies(flow: Dataflow, binding: Binding, most: int = MOST_THREADS) -> KernelBodies:
    """Return the device functions of a program for blocks of at most ``most`` threads. Operators with uncallable kernels get
    generic functions."""
    result = KernelBodies(flow, binding, most)
    for operator in flow.program.operators:
        result.add(operator)
    return result
