"""IOS's policy (MLSys'21): stages of operator groups, found by exact dynamic programming over endings."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.clock import Signature, StageClock, stage_kernels
from rammer.schedule.endings import Dag, Found, Latency, Least, TooLarge, bits, blocks, search
from rammer.schedule.place import Row, levels_of, side_by_side
from rammer.schedule.policy import OperatorGraph, Schedule, rows_of

#: Transitions searched in one block before it is cut in two. The published Inception block has 5,040; of eleven random graphs
#: WS(32, 4, 0.75), RandWire's, the largest has 10.1 million with r=3 and s=8.
MAX_TRANSITIONS = 16_000_000
#: Operators in a block that is searched at all: larger ones never stay under MAX_TRANSITIONS unless nearly chains.
MAX_OPERATORS = 64
#: Transitions searched in one model, in vain or not: about two minutes of it.
MAX_TOTAL = 48_000_000

#: Rounds of measuring: each runs the stages of the best schedule so far that were not run yet.
MAX_ROUNDS = 12

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IOSResult:
    """Stages of operator names in order, the predicted seconds, and the size of the search.

    ``exact`` is False when a block was cut where it has no cut vertex, because it exceeded the search limits.
    """

    stages: tuple[tuple[str, ...], ...]
    seconds: float
    transitions: int
    schedules: int
    exact: bool


@dataclass(frozen=True, slots=True)
class IOS:
    """At most ``s`` groups (connected components) in a stage, at most ``r`` operators in a group.

    Exact within blocks: no stage reaches across a place where all that follows waits for all before it, which costs nothing as
    long as the groups behind it number at most ``s``.
    The search of a model ends after MAX_TOTAL transitions or ``seconds`` of its own processor time; what was not
    searched by then is put in stages greedily, and a warning says so.
    The latency of a stage comes from the kernel times through ``place.side_by_side``: its groups share the vEUs. It is
    asked for only where a stage could be the best by what its groups take at the least. Where ``graph.timed`` runs stages,
    each operator is run alone and then every stage of the best schedule, until all stages of the best one were run: it is
    not slower than any schedule of which that holds, one operator after another among them.
    """

    r: int = 3
    s: int = 8
    seconds: int = 60

    def __post_init__(self) -> None:
        if self.r < 1 or self.s < 1:
            raise ValueError(f"r and s must be at least 1, got r={self.r}, s={self.s}")
        if self.seconds < 0:
            raise ValueError(f"seconds must be at least 0, got {self.seconds}")

    @property
    def name(self) -> str:
        """Spelling for ``--policy``."""
        return str(self)

    def __str__(self) -> str:
        limit = "" if self.seconds == 60 else f",seconds={self.seconds}"
        return f"ios{{r={self.r},s={self.s}{limit}}}"

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Predicts the sum of stage latencies."""
        found = self.search(graph, device)
        chosen: dict[str, RKernel] = {}
        rows: list[Row] = [[] for _ in range(device.veus)]
        for stage in found.stages:
            kernels = stage_kernels(graph, stage, device)
            side_by_side(kernels, graph.after, device, rows)
            chosen |= {k.operator.name: k for k in kernels}
        return Schedule(tuple(chosen[n] for n in graph.names), found.stages, rows_of(rows), True, found.seconds)

    def search(self, graph: OperatorGraph, device: VDevice) -> IOSResult:
        """The best stages of each block, and how large the search was."""
        clock = StageClock(graph, device)
        if graph.timed is None:
            return self._searched(clock)
        clock.measure([(n,) for n in graph.names])
        found = best = IOSResult(tuple((n,) for n in graph.names), sum(clock.seconds((n,)) for n in graph.names), 0, 1, False)
        for _ in range(MAX_ROUNDS):
            found = self._searched(clock)
            fresh = clock.measure(found.stages)
            found = replace(found, seconds=sum(map(clock.seconds, found.stages)))
            best = min(found, best, key=lambda result: result.seconds)
            if not fresh:
                break
        return best

    def _searched(self, clock: StageClock) -> IOSResult:
        names, search = clock.graph.names, _Search(self, clock)
        found = _joined([search.block(names[b.start : b.stop]) for b in blocks(names, clock.graph.after)])
        if search.greedy:
            _log.warning(
                "%s: the search for stages was cut after %.0f s and %d transitions; %d of %d operators are in "
                "stages that were not searched (ios{seconds=N} sets the time)",
                self,
                search.clock() - search.begun,
                search.transitions,
                search.greedy,
                len(names),
            )
        return found


class _OutOfTime(Exception):
    """The search has used up its seconds."""


@dataclass
class _Search:
    """One search over one graph. Blocks that look alike (a network's repeated cells) are searched once."""

    policy: IOS
    stages: StageClock
    known: dict[Signature, Found | TooLarge] = field(default_factory=dict)
    clock: Callable[[], float] = time.thread_time
    begun: float = field(default_factory=time.thread_time)
    transitions: int = 0
    greedy: int = 0

    def block(self, names: Sequence[str]) -> IOSResult:
        """Search one block; one beyond the limits is cut in two at a breadth-first level."""
        found = self._found(names)
        if isinstance(found, Found):
            stages = tuple(tuple(names[i] for i in bits(mask)) for mask in found.stages)
            return IOSResult(stages, found.cost, found.transitions, found.schedules, True)
        if found is None:
            return self._unsearched(names)
        _log.info("%s: a block from %s is cut in two (%s)", self.policy, names[0], found)
        joined = _joined([self.block(half) for half in _halves(names, self.stages.graph)])
        return replace(joined, exact=False)

    def _found(self, names: Sequence[str]) -> Found | TooLarge | None:
        """None once the model's search has used up its transitions or time."""
        if len(names) > MAX_OPERATORS:
            return None if self._spent() else TooLarge(f"{len(names)} operators")
        dag, key = Dag.of(names, self.stages.graph.after), self.stages.signature(names)
        if key not in self.known:
            if len(names) > 1 and self._spent():
                return None
            try:
                self.known[key] = found = self._exact(names, dag)
                self.transitions += found.transitions
            except TooLarge as limit:
                self.known[key] = limit
                self.transitions += limit.tried
            except _OutOfTime:
                return None
        return self.known[key]

    def _spent(self) -> bool:
        return self.transitions >= MAX_TOTAL or self.clock() - self.begun > self.policy.seconds

    def _unsearched(self, names: Sequence[str]) -> IOSResult:
        """Waves of at most ``s`` operators, side by side or one by one, whichever is faster."""
        self.greedy += len(names)
        stages: list[tuple[str, ...]] = []
        seconds, tried = 0.0, 0
        for level in levels_of(names, self.stages.graph.after):
            for first in range(0, len(level), self.policy.s):
                wave = tuple(level[first : first + self.policy.s])
                together = self.stages.seconds(wave)
                alone = sum(self.stages.seconds((n,)) for n in wave)
                stages += [wave] if together <= alone else [(n,) for n in wave]
                seconds += min(together, alone)
                tried += 1
        return IOSResult(tuple(stages), seconds, tried, 1, False)

    def _exact(self, names: Sequence[str], dag: Dag) -> Found:
        def tick() -> None:
            if len(names) > 1 and self.clock() - self.begun > self.policy.seconds:
                raise _OutOfTime

        def latency(ending: int) -> float:
            tick()
            return self.stages.seconds([names[i] for i in bits(ending)])

        def least(group: int) -> Least:
            return self.stages.least([names[i] for i in bits(group)])

        limit = max(1, min(MAX_TRANSITIONS, MAX_TOTAL - self.transitions))
        return search(dag, Latency(latency, least, tick), self.policy.r, self.policy.s, limit)


def _joined(parts: Sequence[IOSResult]) -> IOSResult:
    """Blocks one after another."""
    return IOSResult(
        tuple(stage for p in parts for stage in p.stages),
        sum(p.seconds for p in parts),
        sum(p.transitions for p in parts),
        math.prod(p.schedules for p in parts),
        all(p.exact for p in parts),
    )


def _halves(names: Sequence[str], graph: OperatorGraph) -> tuple[list[str], list[str]]:
    """Two parts of about equal size with no edge from the second into the first."""
    levels = [name for level in levels_of(names, graph.after) for name in level]
    middle = len(levels) // 2
    place = {name: i for i, name in enumerate(names)}
    return sorted(levels[:middle], key=place.__getitem__), sorted(levels[middle:], key=place.__getitem__)
