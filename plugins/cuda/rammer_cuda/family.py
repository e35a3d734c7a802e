"""Kernel families of this device: each lives in a folder of its own and is a line of ``rammer_cuda.families``. Nothing else
knows it by name: what others must know of it, it says (``rammer.codegen.family``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from rammer.codegen.family import Choice, KernelFamily
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.task import HeldKernel, TaskKernel


@dataclass(frozen=True)
class Held:
    """What a family does in a persistent kernel, where one block runs task after task: blocks of ``threads`` keep constants.

    ``kernel`` is the kernel in two parts, with the tensors that travel as words and those outputs that are stored besides;
    ``vectors`` are the inputs of which a task needs every element before its first product, and which it reads in no other
    way: those may travel as words.
    """

    threads: int
    kernel: Callable[[ROperator, Binding, Collection[str], Collection[str]], HeldKernel]
    vectors: Callable[[ROperator, Binding], frozenset[str]]


#: A family of this device's kernels.
Family: TypeAlias = KernelFamily[Gpu, TaskKernel, Held]


class Formed(Protocol):
    """What a family sees in an operator."""

    @property
    def operator(self) -> ROperator: ...


Form = TypeVar("Form", bound=Formed)


def by_seconds(choices: Iterable[Choice]) -> Sequence[Choice]:
    """Best predicted first; equal ones in an order that repeats."""
    return sorted(choices, key=lambda c: (c.seconds, c.operator.tile, c.operator.config))


@dataclass(frozen=True)
class Forms(Generic[Form]):
    """How a family goes about the operators that have its form, tiled or not.

    ``recognise`` finds it, or says by Unsuited why there is none; ``tilings`` are those of tiled copies that are worth trying, in
    any order; ``price`` predicts the seconds of all tasks of a tiled one, without the launch; ``write`` writes its kernel, or
    raises Unsuited where its config is no possible one. ``order`` is that in which choices are offered.
    """

    recognise: Callable[[ROperator, Binding], Form]
    tilings: Callable[[Form, Gpu], Iterable[Form]]
    price: Callable[[Form, Binding, Gpu], float]
    write: Callable[[Form, Binding], TaskKernel]
    order: Callable[[Iterable[Choice]], Sequence[Choice]] = by_seconds

    def family(self, name: str, *keys: str) -> Family:
        """The family of these forms, whose configs have ``keys``."""
        return Family(name, dict.fromkeys(keys, range(1, 1025)), self._candidates, self._seconds, self._kernel)

    def _candidates(self, operator: ROperator, binding: Binding, gpu: Gpu) -> Sequence[Choice]:
        try:
            form = self.recognise(operator, binding)
        except Unsuited:
            return []
        return self.order(Choice(self.price(f, binding, gpu) + gpu.launch, f.operator) for f in self.tilings(form, gpu))

    def _seconds(self, operator: ROperator, binding: Binding, gpu: Gpu) -> float:
        return self.price(self.recognise(operator, binding), binding, gpu)

    def _kernel(self, operator: ROperator, binding: Binding) -> TaskKernel:
        return self.write(self.recognise(operator, binding), binding)
