"""The input and the output of a scheduling policy. Policies only propose; the verifier decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.split_reductions import PartedSum

__all__ = ["Memory", "OperatorGraph", "Policy", "Schedule", "rows_of"]


@dataclass
class Memory:
    """The search state that a policy shares between the programs of one model.

    Parts of a model are priced, and layouts compared, with programs that have most in common. ``spent`` is the processor time of
    searches (seconds), ``transitions`` the number tried, ``known`` their results."""

    spent: float = 0.0
    transitions: int = 0
    known: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorGraph:
    """Operators in topological order, each with its candidate kernels (fastest first).

    All candidates of an operator share its name. ``after`` maps an operator to its producers. ``constants`` are the tensors whose
    values never change. ``timed``, if measurement is possible, runs kernels concurrently as one stage and returns the seconds, or
    None if that stage cannot run alone. ``memory`` is shared by the model's programs. ``sums``, if given, returns sums in
    parts, by the operator that a policy may replace by such a sum and its rest.
    """

    kernels: Mapping[str, tuple[RKernel, ...]]
    after: Mapping[str, tuple[str, ...]]
    constants: frozenset[str] = frozenset()
    timed: Callable[[Sequence[RKernel]], float | None] | None = None
    memory: Memory = field(default_factory=Memory, compare=False)
    sums: Callable[[], Mapping[str, Sequence[PartedSum]]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The operators in topological order."""
        return tuple(self.kernels)

    def shared_static(self) -> dict[str, tuple[str, ...]]:
        """Return the constant operands of each operator that shares all of them with another operator."""
        static = {n: tuple(t for t in ks[0].operator.inputs if t in self.constants) for n, ks in self.kernels.items()}
        count = Counter(static.values())
        return {name: operands for name, operands in static.items() if operands and count[operands] > 1}

    def levels(self) -> list[list[str]]:
        """Return waves by breadth-first search: an operator's wave is one after its latest predecessor's."""
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
    """A proposed schedule: the kernel of each operator, stages of operators, and every task's placement.

    ``rows[vEU]`` lists (operator, task index) in order. With ``barriers`` each stage waits for the whole previous stage; without,
    only data dependences make a task wait. ``predicted`` is seconds."""

    kernels: tuple[RKernel, ...]
    stages: tuple[tuple[str, ...], ...]
    rows: tuple[tuple[tuple[str, int], ...], ...]
    barriers: bool
    predicted: float


class Policy(ABC):
    """A scheduling policy: a frozen value whose ``str`` is its spelling on the command line. ``auto`` also tries policies of
    plugins that are ``in_auto``."""

    in_auto: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The spelling of this policy for ``--policy``. The default is ``str`` of it."""
        return str(self)

    @abstractmethod
    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Place every task of every operator exactly once."""

    def proposals(self, graph: OperatorGraph, device: VDevice) -> Sequence[tuple[Policy, Schedule]]:
        """Return schedules, each with its policy, from which the fastest whole program is chosen. Without measurements the first
        one is used. The default is the policy's only schedule."""
        return [(self, self(graph, device))]


def rows_of(placed: Sequence[Sequence[tuple[str, int]]]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Convert mutable rows to tuples."""
    return tuple(tuple(row) for row in placed)
