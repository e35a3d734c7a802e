"""The kernel families of this device: each is a folder and a line in ``rammer_cuda.families``. Other modules never name a family;
they use its description (``rammer.codegen.kernel_family``)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from rammer.codegen import KernelFamily
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.task import HeldKernel, TaskKernel


@dataclass(frozen=True)
class Held:
    """A family's part in a persistent kernel, in which one block runs task after task and ``threads`` keep constants.

    ``kernel`` returns the kernel in two parts, from the tensors that travel as words and the outputs that are also stored.
    ``vectors`` returns the inputs that a task only reads completely, before its first product; they may travel as words."""

    threads: int
    kernel: Callable[[ROperator, Binding, Collection[str], Collection[str]], HeldKernel]
    vectors: Callable[[ROperator, Binding], frozenset[str]]


#: A kernel family of this device.
Family: TypeAlias = KernelFamily[Gpu, TaskKernel, Held]


def size_keys(*keys: str) -> dict[str, range]:
    """Return config keys that count something, with their ranges."""
    return dict.fromkeys(keys, range(1, 1025))
