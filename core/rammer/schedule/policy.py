"""What a policy gets and what it returns. Policies only propose; the verifier decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel

__all__ = ["Choosing", "Memory", "OperatorGraph", "Policy", "Schedule", "rows_of"]


@dataclass
class Memory:
    """What a policy keeps of one program of a model for the next: parts of a model are priced, and layouts compared, by programs
    that have most in common. ``spent`` is the processor time that searches took (seconds), ``transitions`` how many they
    tried, ``known`` what they found."""

    spent: float = 0.0
    transitions: int = 0
    known: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorGraph:
    """Operators in topological order, each with its candidate kernels (fastest first).

    All candidates of an operator share its name. ``after`` maps an operator to those whose results
    it reads; ``constants`` are the tensors whose values never change. ``timed``, where the device may be asked, runs kernels
    side by side as one stage and tells its seconds, None where that stage cannot be run alone. ``memory`` is the model's.
    """

    kernels: Mapping[str, tuple[RKernel, ...]]
    after: Mapping[str, tuple[str, ...]]
    constants: frozenset[str] = frozenset()
    timed: Callable[[Sequence[RKernel]], float | None] | None = None
    memory: Memory = field(default_factory=Memory, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Operators in topological order."""
        return tuple(self.kernels)

    def shared_static(self) -> dict[str, tuple[str, ...]]:
        """For each operator its constant operands, where another operator has the same ones."""
        static = {n: tuple(t for t in ks[0].operator.inputs if t in self.constants) for n, ks in self.kernels.items()}
        count = Counter(static.values())
        return {name: operands for name, operands in static.items() if operands and count[operands] > 1}

    def levels(self) -> list[list[str]]:
        """Waves by breadth-first search: an operator's wave is one after its latest predecessor's."""
        depth: dict[str, int] = {}
        result: list[list[str]] = []
        for name in self.kernels:
            depth[name] = max((depth[p] + 1 for p in self.after.get(name, ())), default=0)
            while len(result) <= depth[name]:
                result.append([])
            result[depth[name]].append(name)
        return result


@dataclass(frozen=True)
class Schedule:
    """A proposal: the kernel chosen for each operator, stages of operators, and every task's place.

    ``rows[vEU]`` lists (operator, task index) in order. With ``barriers`` each stage waits for the
    whole previous stage; without, only data dependences make a task wait. ``predicted`` is seconds.
    """

    kernels: tuple[RKernel, ...]
    stages: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[tuple[str, int], ...], ...]
    barriers: bool
    predicted: float


class Policy(Protocol):
    """A scheduling policy; a frozen value whose ``str`` is its spelling on the command line."""

    @property
    def name(self) -> str:
        """Spelling for ``--policy``."""
        ...

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Place every task of every operator exactly once."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """A policy with several proposals, of which the one whose whole program is the fastest is to be kept."""

    def proposals(self, graph: OperatorGraph, device: VDevice) -> Sequence[tuple[Policy, Schedule]]:
        """Each with the policy that made it; where nothing can be measured the first one is kept."""
        ...


def rows_of(placed: Sequence[Sequence[tuple[str, int]]]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Freeze mutable rows."""
    return tuple(tuple(row) for row in placed)
