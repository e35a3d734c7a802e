"""What a kernel family is: which operators it sees, the tiles it would give them and what it expects of each, and its text.

A family lives in a folder of its own and is a line of ``rammer_cuda.families``. Nothing else knows it by name: what others
must know of it, it says here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.task import HeldKernel, TaskKernel


class Choice(NamedTuple):
    """A tiled operator with its predicted seconds for all tasks, launch included."""

    seconds: float
    operator: ROperator


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


@dataclass(frozen=True, eq=False)
class Family:
    """One family of kernels.

    ``configs`` are the values that a loaded file may have, by key; what of them goes together ``kernel`` decides.
    ``candidates`` are choices for an untiled operator, the most promising first; none where the family does not suit. Some
    of them ``kernel`` may refuse. ``seconds`` predicts all tasks of a tiled operator without the launch. ``kernel`` writes
    it. Both raise Unsuited where the operator is none of the family.

    ``needs`` says of a GPU whether it has what the kernels use. ``most`` choices are offered of it, of all matrix products
    together as many (``product``). ``first`` says of an operator whether only this family is offered where it has
    candidates. ``holds`` is true of families that keep a product's operand on chip. ``times`` predicts seconds of one
    round of tasks, alone and crowded, where that is no share of ``seconds``.
    """

    name: str
    configs: Mapping[str, range]
    candidates: Callable[[ROperator, Binding, Gpu], Iterable[Choice]]
    seconds: Callable[[ROperator, Binding, Gpu], float]
    kernel: Callable[[ROperator, Binding], TaskKernel]
    needs: Callable[[Gpu], bool] = lambda gpu: True
    most: int = 6
    product: bool = False
    first: Callable[[ROperator, Binding, Gpu], bool] | None = None
    holds: bool = False
    held: Held | None = None
    times: Callable[[ROperator, Binding, Gpu], tuple[float, float]] | None = None

    def round(self, operator: ROperator, binding: Binding, gpu: Gpu) -> tuple[float, float]:
        """Predicted seconds of one round of a tiled operator's tasks, alone and crowded."""
        if self.times is not None:
            return self.times(operator, binding, gpu)
        return (self.seconds(operator, binding, gpu) / -(-operator.task_count // gpu.sms),) * 2
