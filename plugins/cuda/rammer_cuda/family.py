"""Kernel families of this device: each lives in a folder of its own and is a line of ``rammer_cuda.families``. Nothing else
knows it by name: what others must know of it, it says (``rammer.codegen.kernel_family``)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from rammer.codegen.kernel_family import KernelFamily
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


def size_keys(*keys: str) -> dict[str, range]:
    """Config keys that count something."""
    return dict.fromkeys(keys, range(1, 1025))
