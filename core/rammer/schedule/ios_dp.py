"""IOS's dynamic programme over endings (MLSys'21, section 4), on bit masks and independent of any device.

An ending of a set S is a subset of S with no edge into the rest; it can be the last stage of S, so cost[S] = min over endings E
of cost[S - E] + latency(E)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import TypeAlias

#: Groups examined in one search, over all sets of remaining operators (about two seconds).
MAX_STEPS = 50_000_000
#: Sets of operators that could be groups. With ``r`` above a dozen their number doubles with each operator.
MAX_GROUPS = 50_000

#: Endings of one set of remaining operators. With more, the total exceeds any limit.
MAX_ENDINGS = 100_000

#: Lower bound on the time of a stage with a group (seconds): its launches, its longest path, its share of all vEUs' time.
Least: TypeAlias = tuple[float, float, float]


class TooLarge(Exception):
    """The exception for a search with too many transitions; ``tried`` is the number visited."""

    def __init__(self, what: str, tried: int = 0) -> None:
        super().__init__(what)
        self.tried = tried


@dataclass(frozen=True)
class Dag:
    """A graph of operators ``0 .. size-1`` in topological order. Bit j of ``succ[i]``: j reads i; ``pred`` is the reverse."""

    size: int
    succ: tuple[int, ...]
    pred: tuple[int, ...]

    @staticmethod
    def of(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> Dag:
        """Return the subgraph on ``names`` (in topological order); edges from outside are dropped."""
        place = {name: i for i, name in enumerate(names)}
        pred = [sum(1 << place[p] for p in set(after.get(n, ())) if p in place) for n in names]
        succ = [0] * len(names)
        for i, mask in enumerate(pred):
            for p in iter_bits(mask):
                succ[p] |= 1 << i
        return Dag(len(names), tuple(succ), tuple(pred))

    @cached_property
    def near(self) -> tuple[int, ...]:
        """The operands and readers of each operator."""
        return tuple(map(or_, self.succ, self.pred))


@dataclass(frozen=True, slots=True)
class Found:
    """The best stages (bit masks in order), their cost, the transitions (S, S') visited and the number of schedules that these
    allow."""

    stages: tuple[int, ...]
    cost: float
    transitions: int
    schedules: int


def iter_bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def connected_sets(dag: Dag, r: int) -> list[int]:
    """Return every connected set of at most ``r`` operators. Raises TooLarge beyond MAX_GROUPS."""
    found = grown = {1 << i for i in range(dag.size)}
    for _ in range(min(r, dag.size) - 1):
        grown = {part | 1 << i for part in grown for i in iter_bits(_union_masks(dag.near, part) & ~part)}
        found = found | grown
        if len(found) > MAX_GROUPS:
            raise TooLarge(f"more than {MAX_GROUPS} groups of at most {r} among {dag.size} operators")
    return sorted(found)


def connected_components(dag: Dag, part: int) -> Iterator[int]:
    """Yield the connected components of a set of operators."""
    while part:
        found = edge = part & -part
        while edge:
            edge = _union_masks(dag.near, edge) & part & ~found
            found |= edge
        part &= ~found
        yield found


def _union_masks(masks: Sequence[int], part: int) -> int:
    return reduce(or_, (masks[i] for i in iter_bits(part)), 0)


def _zero_cost(group: int) -> Least:
    return 0.0, 0.0, 0.0


@dataclass(frozen=True, slots=True)
class Latency:
    """The time functions of a search. ``of`` returns the seconds of a stage (a bit mask). It is called only if the lower bounds
    (``least``) of the stage's groups allow it to be the best. ``tick`` is called regularly, and may raise."""

    of: Callable[[int], float]
    least: Callable[[int], Least] = _zero_cost
    tick: Callable[[], None] = lambda: None


def search_stages(dag: Dag, latency: Latency, r: int, s: int, limit: int) -> Found:
    """Return the cheapest sequence of stages of at most ``s`` groups of at most ``r`` operators. Raises TooLarge beyond ``limit``
    transitions."""
    return _Programme(dag, latency, r, s, limit).found((1 << dag.size) - 1)


class _Programme:
    """The state of a search: costs of each set of remaining operators and of each ending."""

    def __init__(self, dag: Dag, latency: Latency, r: int, s: int, limit: int) -> None:
        self.size, self.latency, self.s, self.limit = dag.size, latency, s, limit
        #: Every set that can be a group of an ending, with its readers outside the set.
        self.groups = [(part, _union_masks(dag.succ, part) & ~part) for part in connected_sets(dag, r)]
        self.least: dict[int, Least] = {0: _zero_cost(0), **{part: latency.least(part) for part, _ in self.groups}}
        #: Seconds of an ending: the lower bound, until its latency is computed.
        self.seconds = {part: _at_least(self.least[part]) for part, _ in self.groups}
        self.exact: set[int] = set()
        self.cost, self.ways, self.choice = {0: 0.0}, {0: 1}, dict[int, int]()
        self.transitions = self.steps = 0

    def found(self, whole: int) -> Found:
        """Settle ``whole`` after every set that an ending leaves of it, depth first."""
        stack = [self._make_frame(whole)] if whole else []
        while stack:
            state, ends, untried = stack[-1]
            for ending in untried:
                if state ^ ending not in self.cost:
                    stack.append(self._make_frame(state ^ ending))
                    break
            else:
                stack.pop()
                self._settle_state(state, ends)
        stages, state = [], whole
        while state:
            stages.append(self.choice[state])
            state ^= self.choice[state]
        return Found(tuple(reversed(stages)), self.cost[whole], self.transitions, self.ways[whole])

    def _make_frame(self, state: int) -> tuple[int, list[int], Iterator[int]]:
        ends = self._enumerate_endings(state)
        return state, ends, iter(ends)

    def _enumerate_endings(self, state: int) -> list[int]:
        """Return every ending of ``state`` with at most ``s`` groups, without duplicates.

        Each group of an ending is an ending itself. Two adjacent endings overlap, because an ending contains its readers. So the
        endings are the unions of disjoint groups."""
        self.latency.tick()
        self.steps += len(self.groups)
        if self.steps > MAX_STEPS:
            raise TooLarge(f"more than {MAX_STEPS} steps to the endings of {self.size} operators", self.transitions)
        least, seconds, count = self.least, self.seconds, 0
        layers: list[list[int]] = [[0], *([] for _ in range(self.s))]
        for group in [part for part, readers in self.groups if part & state == part and not readers & state]:
            for fewer in range(self.s - 1, -1, -1):
                for ending in layers[fewer]:
                    if not ending & group:
                        both = ending | group
                        if both not in least:
                            least[both] = _combine_costs(least[ending], least[group])
                            seconds[both] = _at_least(least[both])
                        layers[fewer + 1].append(both)
            count = sum(map(len, layers)) - 1
            if self.transitions + count > self.limit:
                raise TooLarge(f"more than {self.limit} transitions for {self.size} operators", self.limit)
            if count > MAX_ENDINGS:
                raise TooLarge(f"more than {MAX_ENDINGS} endings of one set of {self.size} operators", self.transitions + count)
        self.transitions += count
        return [ending for layer in layers[1:] for ending in layer]

    def _settle_state(self, state: int, ends: Sequence[int]) -> None:
        """Store the cheapest ending of ``state``, after all sets that its endings leave are settled."""
        cost, seconds = self.cost, self.seconds
        before = [cost[state ^ e] for e in ends]
        values = [value + seconds[e] for value, e in zip(before, ends, strict=True)]
        while True:
            best = values.index(min(values))
            ending = ends[best]
            if ending in self.exact:
                break
            seconds[ending] = self.latency.of(ending)
            self.exact.add(ending)
            values[best] = before[best] + seconds[ending]
        cost[state], self.choice[state] = values[best], ending
        self.ways[state] = sum(self.ways[state ^ e] for e in ends)


def _combine_costs(first: Least, second: Least) -> Least:
    return max(first[0], second[0]), max(first[1], second[1]), first[2] + second[2]


def _at_least(least: Least) -> float:
    launches, path, share = least
    return launches + max(path, share)
