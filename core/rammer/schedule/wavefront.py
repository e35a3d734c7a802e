"""Rammer's policy (OSDI'20, section 4.2): waves by breadth-first search, co-scheduled over the vEUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.policy import OperatorGraph, Policy, Schedule, rows_of
from rammer.schedule.split_reductions import PartedSum
from rammer.schedule.task_placement import Row, WeightAffinity, fastest_kernel, kernel_choices, leanest_kernel, side_by_side


@dataclass(frozen=True, slots=True)
class Wavefront(Policy):
    """A policy that runs all operators of a wave concurrently.

    It uses the fastest kernels until the wave fills the vEUs, then the better of these and the resource-efficient ones. If
    operators have more than these two kernels, or sums in parts, the kernels of a wave are chosen together. Only data dependences
    make a task wait.

    With ``lean=0`` kernels are always the fastest: co-scheduling alone, as in the paper's ablation.
    """

    lean: int = 1

    def __post_init__(self) -> None:
        if self.lean not in (0, 1):
            raise ValueError(f"lean must be 0 or 1, got {self.lean}")

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return a schedule; the predicted time is one launch a wave plus the time of the fullest vEU in each."""
        if self.lean and (graph.sums is not None or any(len(kernels) > 2 for kernels in graph.kernels.values())):
            graph = choose_together(graph, device)
        chosen: dict[str, RKernel] = {}
        rows: list[Row] = [[] for _ in range(device.veus)]
        levels, seconds, affinity = graph.levels(), 0.0, WeightAffinity(graph.shared_static())
        for level in levels:
            options = kernel_choices(graph, level, device)[: 1 + self.lean]
            best = min(options, key=lambda kernels: side_by_side(kernels, {}, device))
            seconds += side_by_side(best, {}, device, rows, affinity)
            chosen |= {k.operator.name: k for k in best}
        stages = tuple(map(tuple, levels))
        return Schedule(tuple(chosen[n] for n in graph.names), stages, rows_of(rows), False, seconds)

    def __str__(self) -> str:
        return "wavefront" if self.lean else "wavefront{lean=0}"


# --- kernels chosen together: those with which a wave ends earliest ----------------------------------------
# The fastest kernels fill the device, each for itself. During a long operator, a short one should have few tasks, on vEUs that
# would be idle. A search changes one choice at a time.

#: Weight of the total time of a wave's tasks, relative to its end. With many equal tasks a single change rarely moves the end.
CROWD: Final = 0.1
#: Most different operators of a wave whose choices are searched: the search takes some seconds of a core. A wave of more has the
#: better one of the fastest and the leanest kernels of all.
MOST_KINDS: Final = 48


def choose_together(graph: OperatorGraph, device: VDevice) -> OperatorGraph:
    """Return ``graph`` with one choice per operator, which ends each wave earliest.

    The search changes one choice at a time, starting from the fastest and from the leanest ones. An operator is replaced by one
    of its sums in parts if the two waves then end before the one did."""
    chosen: dict[str, tuple[RKernel, ...]] = {}
    after, waves, sums = dict(graph.after), _Waves(device), graph.sums() if graph.sums is not None else {}
    for level in graph.levels():
        taken: dict[str, PartedSum] = {}
        best = waves.of(graph, level, taken)
        while True:
            tried = [{**taken, **change} for change in _sum_changes(graph, level, sums) if not change.items() <= taken.items()]
            cost, kernels, others = min(
                ((*waves.of(graph, level, t), t) for t in tried), key=lambda o: o[0], default=(*best, taken)
            )
            if cost >= best[0]:
                break
            best, taken = (cost, kernels), others
        chosen |= {k.operator.name: (k,) for k in best[1]}
        for name, s in taken.items():
            part = s.split.partial.name
            after[part], after[name] = after[name], (*after[name], part)
    return replace(graph, kernels=chosen, after=after, sums=None)


def _sum_changes(
    graph: OperatorGraph, level: Sequence[str], sums: Mapping[str, Sequence[PartedSum]]
) -> Iterator[dict[str, PartedSum]]:
    """Yield changes that compute sums of a wave in parts, together for all equal operators, which branches often have."""
    alike: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name in level:
        alike.setdefault(_known_as(graph.kernels[name]), []).append(name)
    for names in alike.values():
        each = [sums.get(n, ()) for n in names]
        yield from (dict(zip(names, some, strict=True)) for some in zip(*each, strict=False) if some[0].first and some[0].rest)


def _known_as(kernels: Sequence[RKernel]) -> tuple[tuple[int, float], ...]:
    """Return a key that is equal for choices of equal cost."""
    return tuple([(k.operator.task_count, k.alone) for k in kernels])


@dataclass
class _Waves:
    """The choices of waves, computed once for equal ones."""

    device: VDevice
    known: dict[tuple[tuple[tuple[int, float], ...], ...], tuple[float, list[int]]] = field(default_factory=dict)

    def of(self, graph: OperatorGraph, level: Sequence[str], taken: Mapping[str, PartedSum]) -> tuple[float, list[RKernel]]:
        """Return the cost of a wave with the operators in ``taken`` in parts, and its kernels with those of the adding wave."""
        cost, first = self._choose_wave([taken[n].first if n in taken else graph.kernels[n] for n in level])
        more, rest = self._choose_wave([s.rest for s in taken.values()]) if taken else (0.0, [])
        return cost + more, [*first, *rest]

    def _choose_wave(self, choices: Sequence[Sequence[RKernel]]) -> tuple[float, list[RKernel]]:
        key = tuple(map(_known_as, choices))
        if key not in self.known:
            self.known[key] = _best_together(choices, self.device)
        cost, places = self.known[key]
        return cost, [some[i] for some, i in zip(choices, places, strict=True)]


def _best_together(choices: Sequence[Sequence[RKernel]], device: VDevice) -> tuple[float, list[int]]:
    """Return the cost of a wave and each operator's choice."""

    def cost(places: Sequence[int]) -> float:
        chosen = [some[i] for some, i in zip(choices, places, strict=True)]
        return side_by_side(chosen, {}, device) + CROWD * sum(k.busy_time() for k in chosen) / device.veus

    starts = [
        [some.index(kind(some)) for some in choices] for kind in (lambda some: fastest_kernel(some, device), leanest_kernel)
    ]
    best, places = min((cost(s), s) for s in starts)
    alike = [_known_as(some) for some in choices]
    while len(set(alike)) <= MOST_KINDS:
        found = min(((cost(o), o) for o in _changed_places(alike, places)), default=(best, places))
        if found[0] >= best:
            break
        best, places = found
    return best, places


def _changed_places(alike: Sequence[tuple[tuple[int, float], ...]], places: Sequence[int]) -> Iterator[list[int]]:
    """Yield ``places`` with one of them changed, once for equal operators that have equal places."""
    groups: dict[tuple[tuple[tuple[int, float], ...], int], list[int]] = {}
    for k, key in enumerate(zip(alike, places, strict=True)):
        groups.setdefault(key, []).append(k)
    for (kernels, place), members in groups.items():
        for i in range(len(kernels)):
            if i != place:
                k = members[-1] if i > place else members[0]
                yield [*places[:k], i, *places[k + 1 :]]
