"""The CUDA text of operators, by kernel family; ``generic`` is the core's emitter and computes everything."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from rammer.codegen.task import Argument, Unsuited
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator

from rammer_cuda.device import source
from rammer_cuda.dialect import CUDA
from rammer_cuda.families import family_of
from rammer_cuda.kernels.task import TaskKernel

#: Texts that a writer keeps, of some 10 KB each.
MOST_KEPT = 2048


def task_kernel(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled operator; equal operators have equal texts. An unknown family is computed by the generic
    kernel; DeviceFailure where a known one cannot compute the operator."""
    try:
        return family_of(operator).kernel(operator, binding)
    except Unsuited as problem:
        raise refusal(operator, problem) from problem


def refusal(operator: ROperator, problem: Unsuited) -> DeviceFailure:
    """What to say of an operator that its family cannot compute."""
    return DeviceFailure(
        f"operator {operator.name} is none for family {operator.family}: {problem}",
        where=operator.anchor.origin,
        hint="choose another tile, or no family",
    )


class Writer:
    """Kernels by what they compute, each written once: whether there is one, how much shared memory it needs and its text are
    one answer, which serves all equal operators (an unrolled LSTM has thousands)."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[ROperator, TaskKernel | Unsuited]] = OrderedDict()

    def written(self, operator: ROperator, binding: Binding) -> TaskKernel:
        """``task_kernel`` of the operator. DeviceFailure where its family cannot compute it."""
        key = binding.key(operator)
        if key not in self._known:
            self._known[key] = operator, _attempt(operator, binding)
            if len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        first, made = self._known[key]
        if isinstance(made, Unsuited):
            raise refusal(operator, made) from made
        return made if first is operator else replace(made, arguments=moved(made.arguments, renaming(first, operator)))

    def all(self, operators: Iterable[ROperator], binding: Binding) -> dict[str, TaskKernel]:
        """The kernel of every operator by name."""
        return {o.name: self.written(o, binding) for o in operators}


def _attempt(operator: ROperator, binding: Binding) -> TaskKernel | Unsuited:
    try:
        return task_kernel(operator, binding)
    except DeviceFailure as problem:
        if isinstance(problem.__cause__, Unsuited):
            return problem.__cause__
        raise


def kinds_of(operators: Iterable[ROperator], binding: Binding) -> dict[str, int]:
    """A number for every operator by name, equal for operators whose kernels have equal texts."""
    numbers: dict[str, int] = {}
    return {o.name: numbers.setdefault(binding.key(o), len(numbers)) for o in operators}


def renaming(first: ROperator, operator: ROperator) -> dict[str, str]:
    """The tensors of ``operator`` by those of the equal operator ``first``."""
    return dict(zip((*first.inputs, *first.outputs), (*operator.inputs, *operator.outputs), strict=True))


def moved(arguments: Iterable[Argument], names: Mapping[str, str]) -> tuple[Argument, ...]:
    """``arguments`` of an equal operator, with this one's tensors."""
    return tuple([Argument(names[a.tensor], a.written, a.packing) for a in arguments])


def translation_unit(kernels: Iterable[TaskKernel]) -> str:
    """One source of all distinct kernels, the preamble first."""
    distinct = {k.entry: k.text for k in kernels}
    return CUDA.preamble + source("order") + "\n".join(distinct[entry] for entry in sorted(distinct))
