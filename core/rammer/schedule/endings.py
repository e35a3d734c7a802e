"""IOS's dynamic programme over endings (MLSys'21, section 4), on bit masks and free of any device.

An ending of a set S is a part of S with no edge into the rest; it can be the last stage of S, so
cost[S] = min over endings E of cost[S - E] + latency(E).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import or_

#: Steps of one search for endings; most of them may lead to none, so that transitions do not bound them.
MAX_STEPS = 1_000_000


class TooLarge(Exception):
    """The search would visit more transitions than allowed."""


@dataclass(frozen=True)
class Dag:
    """Operators ``0 .. size-1`` in topological order; bit j of ``succ[i]``: j reads i; ``pred`` the reverse."""

    size: int
    succ: tuple[int, ...]
    pred: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> Dag:
        """The part of a graph on ``names`` (in topological order); edges from outside are dropped."""
        place = {name: i for i, name in enumerate(names)}
        pred = [sum(1 << place[p] for p in set(after.get(n, ())) if p in place) for n in names]
        succ = [0] * len(names)
        for i, mask in enumerate(pred):
            for p in bits(mask):
                succ[p] |= 1 << i
        return Dag(len(names), tuple(succ), tuple(pred))

    @cached_property
    def near(self) -> tuple[int, ...]:
        """What each one reads or is read by."""
        return tuple(map(or_, self.succ, self.pred))

    def ancestors(self) -> list[int]:
        """All operators on a path to each one."""
        result: list[int] = []
        for mask in self.pred:
            reach = mask
            for p in bits(mask):
                reach |= result[p]
            result.append(reach)
        return result

    def groups(self, part: int) -> list[int]:
        """Connected components of ``part``, edges taken both ways."""
        found = []
        while part:
            group = self._component(part & -part, part)
            found.append(group)
            part &= ~group
        return found

    def _component(self, start: int, part: int) -> int:
        group = frontier = start
        near = self.near
        while frontier:
            reach = 0
            while frontier:  # ``bits``, written out: half of a search is spent here
                low = frontier & -frontier
                reach |= near[low.bit_length() - 1]
                frontier ^= low
            frontier = reach & part & ~group
            group |= frontier
        return group


@dataclass(frozen=True, slots=True)
class Found:
    """The best stages (bit masks in order), their cost, the transitions (S, S') visited and how many
    schedules those allow."""

    stages: tuple[int, ...]
    cost: float
    transitions: int
    schedules: int


def bits(mask: int) -> Iterator[int]:
    """Positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def endings(dag: Dag, ancestors: Sequence[int], whole: int, r: int, s: int, steps: Iterator[int]) -> Iterator[int]:
    """Every non-empty ending of ``whole`` with at most ``s`` groups of at most ``r`` operators, once each.

    ``steps`` counts from 1. Raises TooLarge beyond MAX_STEPS.
    """
    # Decide operators from the last one backwards; leaving one out leaves out all that it depends on.
    stack = [(whole, 0)]
    while stack:
        undecided, ending = stack.pop()
        if next(steps) > MAX_STEPS:
            raise TooLarge(f"more than {MAX_STEPS} steps to the endings of {dag.size} operators")
        if ending.bit_count() > s and _apart(dag, undecided, ending) > s:
            continue
        if not undecided:
            if ending and len(dag.groups(ending)) <= s:
                yield ending
            continue
        last = undecided.bit_length() - 1
        bit = 1 << last
        stack.append((undecided & ~(bit | ancestors[last]), ending))
        # Groups only grow as earlier operators join, so one that is too large never recovers.
        grown = ending | bit
        if dag._component(bit, grown).bit_count() <= r:
            stack.append((undecided & ~bit, grown))


def _apart(dag: Dag, undecided: int, ending: int) -> int:
    """Groups of ``ending`` that no undecided operator can join to another one."""
    return sum(1 for group in dag.groups(ending | undecided) if group & ending)


def search(dag: Dag, latency: Callable[[int], float], r: int, s: int, limit: int) -> Found:
    """The cheapest sequence of stages. Raises TooLarge beyond ``limit`` transitions."""
    whole = (1 << dag.size) - 1
    moves = _transitions(dag, whole, r, s, limit)
    cost, ways, choice = {0: 0.0}, {0: 1}, dict[int, int]()
    known: dict[int, float] = {}
    for state in sorted(moves, key=int.bit_count):
        for ending in moves[state]:
            if ending not in known:
                known[ending] = latency(ending)
            value = cost[state & ~ending] + known[ending]
            if state not in cost or value < cost[state]:
                cost[state], choice[state] = value, ending
        ways[state] = sum(ways[state & ~ending] for ending in moves[state])
    stages, state = [], whole
    while state:
        stages.append(choice[state])
        state &= ~choice[state]
    return Found(tuple(reversed(stages)), cost[whole], sum(map(len, moves.values())), ways[whole])


def _transitions(dag: Dag, whole: int, r: int, s: int, limit: int) -> dict[int, list[int]]:
    """Every reachable non-empty state with its endings."""
    ancestors = dag.ancestors()
    moves: dict[int, list[int]] = {}
    todo, total, steps = [whole] if whole else [], 0, count(1)
    while todo:
        state = todo.pop()
        if state in moves:
            continue
        moves[state] = []
        for ending in endings(dag, ancestors, state, r, s, steps):
            total += 1
            if total > limit:
                raise TooLarge(f"more than {limit} transitions for {dag.size} operators")
            moves[state].append(ending)
            if state != ending:
                todo.append(state & ~ending)
    return moves


def blocks(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[range]:
    """Cut after every operator that is on one path with all others: unpruned, no stage gains by reaching across.

    That is so where every operator before it has a reader no later than it, and every one behind it reads one no
    earlier: following those leads to it. ``names`` are in topological order.
    """
    place = {name: i for i, name in enumerate(names)}
    size = len(names)
    reader, read = [size] * size, [-1] * size  # the first that reads it, the last that it reads
    for i, name in enumerate(names):
        for p in (place[p] for p in after.get(name, ()) if p in place):
            reader[p], read[i] = min(reader[p], i), max(read[i], p)
    behind = [size] * size
    for i in range(size - 1, 0, -1):
        behind[i - 1] = min(behind[i], read[i])
    result, start, before = [], 0, 0
    for i in range(size):
        if before <= i <= behind[i] or i == size - 1:
            result.append(range(start, i + 1))
            start = i + 1
        before = max(before, reader[i])
    return result
