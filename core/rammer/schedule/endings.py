"""IOS's dynamic programme over endings (MLSys'21, section 4), on bit masks and free of any device.

An ending of a set S is a part of S with no edge into the rest; it can be the last stage of S, so
cost[S] = min over endings E of cost[S - E] + latency(E).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass


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
        while frontier:
            reach = 0
            for i in bits(frontier):
                reach |= self.succ[i] | self.pred[i]
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


def endings(dag: Dag, ancestors: Sequence[int], whole: int, r: int, s: int) -> Iterator[int]:
    """Every non-empty ending of ``whole`` with at most ``s`` groups of at most ``r`` operators, once each."""
    # Decide operators from the last one backwards; leaving one out leaves out all that it depends on.
    stack = [(whole, 0)]
    while stack:
        undecided, ending = stack.pop()
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


def search(dag: Dag, latency: Callable[[int], float], r: int, s: int, limit: int) -> Found:
    """The cheapest sequence of stages. Raises TooLarge beyond ``limit`` transitions."""
    whole = (1 << dag.size) - 1
    moves = _transitions(dag, whole, r, s, limit)
    cost, count, choice = {0: 0.0}, {0: 1}, dict[int, int]()
    known: dict[int, float] = {}
    for state in sorted(moves, key=int.bit_count):
        for ending in moves[state]:
            if ending not in known:
                known[ending] = latency(ending)
            value = cost[state & ~ending] + known[ending]
            if state not in cost or value < cost[state]:
                cost[state], choice[state] = value, ending
        count[state] = sum(count[state & ~ending] for ending in moves[state])
    stages, state = [], whole
    while state:
        stages.append(choice[state])
        state &= ~choice[state]
    return Found(tuple(reversed(stages)), cost[whole], sum(map(len, moves.values())), count[whole])


def _transitions(dag: Dag, whole: int, r: int, s: int, limit: int) -> dict[int, list[int]]:
    """Every reachable non-empty state with its endings."""
    ancestors = dag.ancestors()
    moves: dict[int, list[int]] = {}
    todo, total = [whole] if whole else [], 0
    while todo:
        state = todo.pop()
        if state in moves:
            continue
        moves[state] = []
        for ending in endings(dag, ancestors, state, r, s):
            total += 1
            if total > limit:
                raise TooLarge(f"more than {limit} transitions for {dag.size} operators")
            moves[state].append(ending)
            if state != ending:
                todo.append(state & ~ending)
    return moves


def blocks(dag: Dag) -> list[int]:
    """Cut after every operator that is on one path with all others: unpruned, no stage gains by reaching across."""
    ancestors = dag.ancestors()
    descendants = [0] * dag.size
    for i in range(dag.size):
        for p in bits(ancestors[i]):
            descendants[p] |= 1 << i
    rest, result = (1 << dag.size) - 1, []
    for i in range(dag.size):
        if (ancestors[i] | descendants[i]).bit_count() == dag.size - 1:
            part = (ancestors[i] | 1 << i) & rest
            result.append(part)
            rest &= ~part
    return [*result, rest] if rest else result
