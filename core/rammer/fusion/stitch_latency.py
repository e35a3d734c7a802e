"""The latency evaluator of stitching: the time of a region's operators under a plan, in the device's schedule.

A group is compared with its parts as they would run. Independent parts are concurrent, and small ones share a launch. Readers of
one member, however, wait for the whole group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import TypeAlias

from rammer.ir.operator import RKernel, ROperator

#: Numbers of fused operators in the tile graph.
Members: TypeAlias = frozenset[int]


@dataclass(frozen=True)
class Evaluator:
    """Callbacks that price operators.

    ``kernels`` returns an operator's predicted kernels, () if none fits. ``seconds`` returns the scheduled time of operators in
    topological order, launches included. Its arguments map names to kernels, and to the names that they wait for. ``together``
    measures operators in one run and returns None if that is impossible. ``together`` is None if plans are not run."""

    kernels: Callable[[ROperator], tuple[RKernel, ...]]
    seconds: Callable[[Mapping[str, tuple[RKernel, ...]], Mapping[str, tuple[str, ...]]], float]
    together: Callable[[Sequence[ROperator]], float | None] | None = None

    def alone(self, operator: ROperator) -> float:
        """Return seconds of one operator with its launch, infinite if no kernel fits."""
        kernels = self.kernels(operator)
        return self.seconds({operator.name: kernels}, {}) if kernels else math.inf


@dataclass(frozen=True)
class RegionTimes:
    """The times of regions of a tile graph under groupings of their operators; ungrouped operators run separately.

    ``operator`` returns a group as one operator, or None. ``after`` lists the operators that wait for each operator. ``ordered``
    sorts operators topologically."""

    latency: Evaluator
    operator: Callable[[Members], ROperator | None]
    after: Sequence[set[int]]
    ordered: Callable[[Sequence[ROperator]], Sequence[ROperator]]
    _kernels: dict[Members, tuple[str, tuple[RKernel, ...]]] = field(default_factory=dict)
    _times: dict[frozenset[Members], float] = field(default_factory=dict)
    _reached: dict[tuple[int, Members], set[int]] = field(default_factory=dict)

    def run(self, groups: Iterable[Members], region: Members) -> float:
        """Return measured seconds of a region's operators, infinite if they cannot run alone."""
        made = [o for g in sorted(_complete_groups(groups, region), key=sorted) if (o := self.operator(g)) is not None]
        seconds = self.latency.together(self.ordered(made)) if self.latency.together else None
        return math.inf if seconds is None else seconds

    def predicted(self, groups: Iterable[Members], region: Members) -> float:
        """Return predicted seconds of a region's operators, infinite if one has no kernel."""
        whole = _complete_groups(groups, region)
        if whole not in self._times:
            after = self._group_waits(whole, region)
            known = {g: k for g in TopologicalSorter(after).static_order() if (k := self._known(g))[1]}
            waits = {n: tuple(known[b][0] for b in sorted(after[g], key=sorted) if b in known) for g, (n, _) in known.items()}
            missing = len(known) < len(whole)
            self._times[whole] = math.inf if missing else self.latency.seconds(dict(known.values()), waits)
        return self._times[whole]

    def _known(self, group: Members) -> tuple[str, tuple[RKernel, ...]]:
        """Return the name and kernels of a group's operator, ("", ()) if it cannot be fused."""
        if group not in self._kernels:
            operator = self.operator(group)
            self._kernels[group] = (operator.name, self.latency.kernels(operator)) if operator is not None else ("", ())
        return self._kernels[group]

    def _group_waits(self, groups: Iterable[Members], region: Members) -> dict[Members, set[Members]]:
        """Return the groups that each group waits for, in order."""
        of = {i: g for g in groups for i in g}
        found: dict[Members, set[Members]] = {g: set() for g in sorted(groups, key=sorted)}
        for i in sorted(region):
            for reader in {of[j] for j in self._waiting_operators(i, region)} - {of[i]}:
                found[reader].add(of[i])
        return found

    def _waiting_operators(self, i: int, region: Members) -> set[int]:
        """Return the operators of ``region`` that wait for its operator ``i``, directly or through other regions."""
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
    """Return ``groups`` plus one group for each remaining operator of ``region``."""
    of = {i: g for g in groups for i in g}
    return frozenset(of.get(i) or frozenset((i,)) for i in region)
