"""The latency evaluator of stitching: what the operators of a region take under a plan, as the device's schedule has them.

A group is compared with its parts as these would run: parts that do not wait for each other stand side by side, and small ones
share a launch. Who reads one of them, though, waits for all of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import TypeAlias

from rammer.ir.operator import RKernel, ROperator

#: Operators that are one, by their numbers in the tile-graph.
Members: TypeAlias = frozenset[int]


@dataclass(frozen=True)
class Evaluator:
    """An operator's ``kernels`` as predicted, none where none fits; ``seconds`` of operators with theirs in topological order as
    the device's schedule has them, launches included, by the names that each waits for; and seconds of operators ``together``
    in a run of their own (None for what cannot be run so), where plans are run."""

    kernels: Callable[[ROperator], tuple[RKernel, ...]]
    seconds: Callable[[Mapping[str, tuple[RKernel, ...]], Mapping[str, tuple[str, ...]]], float]
    together: Callable[[Sequence[ROperator]], float | None] | None = None

    def alone(self, operator: ROperator) -> float:
        """Seconds of one operator with its launch; infinite where no kernel fits."""
        kernels = self.kernels(operator)
        return self.seconds({operator.name: kernels}, {}) if kernels else math.inf


@dataclass(frozen=True)
class RegionTimes:
    """What regions of a tile-graph take under groups of their operators; what is in no group is alone.

    ``operator`` is a group as one, None where it is none; ``after`` are the operators that wait for each; ``ordered`` brings
    operators into topological order.
    """

    latency: Evaluator
    operator: Callable[[Members], ROperator | None]
    after: Sequence[set[int]]
    ordered: Callable[[Sequence[ROperator]], Sequence[ROperator]]
    _kernels: dict[Members, tuple[str, tuple[RKernel, ...]]] = field(default_factory=dict)
    _times: dict[frozenset[Members], float] = field(default_factory=dict)
    _reached: dict[tuple[int, Members], set[int]] = field(default_factory=dict)

    def run(self, groups: Iterable[Members], region: Members) -> float:
        """Seconds of a run of a region's operators; infinite where they cannot be run on their own."""
        made = [o for g in sorted(_complete_groups(groups, region), key=sorted) if (o := self.operator(g)) is not None]
        seconds = self.latency.together(self.ordered(made)) if self.latency.together else None
        return math.inf if seconds is None else seconds

    def predicted(self, groups: Iterable[Members], region: Members) -> float:
        """Seconds of a region's operators by their kernels; infinite where one has none."""
        whole = _complete_groups(groups, region)
        if whole not in self._times:
            after = self._group_waits(whole, region)
            known = {g: k for g in TopologicalSorter(after).static_order() if (k := self._known(g))[1]}
            waits = {n: tuple(known[b][0] for b in sorted(after[g], key=sorted) if b in known) for g, (n, _) in known.items()}
            missing = len(known) < len(whole)
            self._times[whole] = math.inf if missing else self.latency.seconds(dict(known.values()), waits)
        return self._times[whole]

    def _known(self, group: Members) -> tuple[str, tuple[RKernel, ...]]:
        """The name of a group's operator, with its kernels; none where it is no operator."""
        if group not in self._kernels:
            operator = self.operator(group)
            self._kernels[group] = (operator.name, self.latency.kernels(operator)) if operator is not None else ("", ())
        return self._kernels[group]

    def _group_waits(self, groups: Iterable[Members], region: Members) -> dict[Members, set[Members]]:
        """The groups that each of these waits for, in order."""
        of = {i: g for g in groups for i in g}
        found: dict[Members, set[Members]] = {g: set() for g in sorted(groups, key=sorted)}
        for i in sorted(region):
            for reader in {of[j] for j in self._waiting_operators(i, region)} - {of[i]}:
                found[reader].add(of[i])
        return found

    def _waiting_operators(self, i: int, region: Members) -> set[int]:
        """The operators of ``region`` that wait for its operator ``i``, directly or by way of operators of other regions."""
        if (i, region) not in self._reached:
            found, seen, ahead, last = set[int](), set[int](), [*self.after[i]], max(region)
            while ahead:
                j = ahead.pop()
                if j in region:
                    found.add(j)
                elif j not in seen and j < last:
                    seen.add(j)
                    ahead += self.after[j]
            self._reached[i, region] = found
        return self._reached[i, region]


def _complete_groups(groups: Iterable[Members], region: Members) -> frozenset[Members]:
    """``groups``, and the others of ``region`` each alone."""
    of = {i: g for g in groups for i in g}
    return frozenset(of.get(i) or frozenset((i,)) for i in region)
