"""The IOS policy (MLSys'21): stages of operator groups, by exact dynamic programming over endings."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, TypeAlias, cast

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.ios_blocks import find_chains, split_blocks, split_windows
from rammer.schedule.ios_dp import Dag, Found, Latency, Least, TooLarge, connected_components, iter_bits, search_stages
from rammer.schedule.policy import Memory, OperatorGraph, Policy, Schedule, rows_of
from rammer.schedule.stage_clock import StageClock, stage_kernels
from rammer.schedule.task_placement import Row, levels_of, side_by_side

#: Transitions searched in one block before it is cut. The published Inception block has 5,040. The largest of eleven random
#: graphs WS(32, 4, 0.75), as in RandWire, has 10.1 million with r=3 and s=8.
MAX_TRANSITIONS = 16_000_000
#: Transitions searched at first, until all operators of a model have stages: half a second.
FIRST_TRANSITIONS = 300_000
#: Operators in a block that is searched at all: larger blocks never stay under MAX_TRANSITIONS unless nearly chains.
MAX_OPERATORS = 64
#: Operators in a part of a block that was cut.
PART = 32
#: Transitions searched in one model, including failed searches: about a minute.
MAX_TOTAL = 48_000_000

#: Default number of groups in a stage (the paper's), unless more operators can run concurrently.
MOST_GROUPS = 8
#: Measurement rounds. Each runs the unmeasured stages of the current best schedule.
MAX_ROUNDS = 12

#: The scope of a search's proof of optimality, strongest first.
Proof: TypeAlias = Literal["exact", "chains", "none"]
PROOFS: tuple[Proof, ...] = ("exact", "chains", "none")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IOSResult:
    """Stages of operator names in order, the predicted seconds, and the size of the search.

    ``proved`` names the schedules over which the result is optimal by prediction:

    - ``exact``: all schedules (within blocks, with at most ``s`` groups of ``r`` operators).
    - ``chains``: schedules that do not split a chain of operators of a block (``ios_blocks.find_chains``), with ``r``
      chains a group. Blocks were too large for more.
    - ``none``: a block was searched in parts, or with smaller groups.
    """

    stages: tuple[tuple[str, ...], ...]
    seconds: float
    transitions: int
    schedules: int
    proved: Proof

    @property
    def exact(self) -> bool:
        """Return True if no schedule is predicted to be faster."""
        return self.proved == "exact"


@dataclass(frozen=True, slots=True)
class IOS(Policy):
    """A policy with at most ``s`` groups (connected components) in a stage and at most ``r`` operators in a group. ``s`` of 0 is
    the number of operators in the widest wave of a block, at least MOST_GROUPS: a wave of more would take several stages.

    The result is exact within blocks: no stage spans a point where all later operators wait for all earlier ones. This
    restriction costs nothing as long as at most ``s`` groups follow the point.

    A block with too many transitions is cut where the fewest concurrent pairs are separated (``ios_blocks.split_windows``), until
    every part is searched. The remaining time is spent on searching cut blocks whole, smallest first. The last attempt counts
    each chain (``ios_blocks.find_chains``) as one operator for ``r``. The paper's separable convolutions are chains.

    The search of a model ends after MAX_TOTAL transitions or ``seconds`` of processor time, shared by all programs of the model.
    Operators not searched by then are scheduled greedily, with a warning.

    The latency of a stage comes from the kernel times through ``task_placement.side_by_side``: its groups share the vEUs. It is
    computed only if the lower bound of the stage could be the best.

    If ``graph.timed`` runs stages, each operator is run alone, then every stage of the best schedule. This repeats until all
    stages of the best schedule are measured. The result is not slower than any fully measured schedule, including the sequential
    one.

    A stage that runs repeatedly alone finds its constants in the caches and has no neighbouring stages. So the best schedule by
    these times may not be the fastest. On an H100 Inception V3 took 659 us with measured stages, 632 with predicted ones. Both
    are proposed, and whole programs are measured.
    """

    r: int = 3
    s: int = 0
    seconds: int = 60

    def __post_init__(self) -> None:
        if self.r < 1 or self.s < 0:
            raise ValueError(f"r must be at least 1 and s at least 0, got r={self.r}, s={self.s}")
        if self.seconds < 0:
            raise ValueError(f"seconds must be at least 0, got {self.seconds}")

    def __str__(self) -> str:
        groups = f",s={self.s}" if self.s else ""
        limit = "" if self.seconds == 60 else f",seconds={self.seconds}"
        return f"ios{{r={self.r}{groups}{limit}}}"

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return a schedule; the predicted time is the sum of stage latencies."""
        found = self.search(graph, device)
        chosen: dict[str, RKernel] = {}
        rows: list[Row] = [[] for _ in range(device.veus)]
        for stage in found.stages:
            kernels = stage_kernels(graph, stage, device)
            side_by_side(kernels, graph.after, device, rows)
            chosen |= {k.operator.name: k for k in kernels}
        return Schedule(tuple(chosen[n] for n in graph.names), found.stages, rows_of(rows), True, found.seconds)

    def proposals(self, graph: OperatorGraph, device: VDevice) -> list[tuple[Policy, Schedule]]:
        """Return the schedule by measured stages, if they are run, and the schedule by prediction if it differs."""
        found = [self(graph, device)]
        if graph.timed is not None:
            found += [s for s in [self(replace(graph, timed=None), device)] if s.stages != found[0].stages]
        return [(self, schedule) for schedule in found]

    def search(self, graph: OperatorGraph, device: VDevice) -> IOSResult:
        """Return the best stages of each block and the size of the search."""
        clock, time = StageClock(graph, device), SearchTime(self.seconds - graph.memory.spent)
        try:
            if graph.timed is None:
                return self._search_graph(clock, time, graph.memory)
            return self._search_measured(clock, time)
        finally:
            graph.memory.spent += time.spent()

    def _search_measured(self, clock: StageClock, time: SearchTime) -> IOSResult:
        """Return the best schedule whose stages are all measured."""
        graph, names = clock.graph, clock.graph.names
        clock.measure([(n,) for n in names])
        found = best = IOSResult(tuple((n,) for n in names), sum(clock.seconds((n,)) for n in names), 0, 1, "none")
        for _ in range(MAX_ROUNDS):
            found = self._search_graph(clock, time, replace(graph.memory, known={}))
            fresh = clock.measure(found.stages)
            found = replace(found, seconds=sum(map(clock.seconds, found.stages)))
            best = min(found, best, key=lambda result: result.seconds)
            if not fresh:
                break
        return best

    def _search_graph(self, clock: StageClock, time: SearchTime, memory: Memory) -> IOSResult:
        search = _Search(self, clock, time, memory)
        found = search.model()
        if search.greedy:
            _log.warning(
                "%s: the search for stages was cut after %.0f s and %d transitions; %d of %d operators are in "
                "stages that were not searched (ios{seconds=N} sets the time)",
                self,
                time.spent(),
                memory.transitions,
                search.greedy,
                len(clock.graph.names),
            )
        return found


class _OutOfTime(Exception):
    """The exception for a search that has used up its seconds."""


@dataclass
class _Search:
    """A search over one graph. Equal blocks (a network's repeated cells) are searched once, through ``memory``."""

    policy: IOS
    stages: StageClock
    time: SearchTime
    memory: Memory
    greedy: int = 0

    def model(self) -> IOSResult:
        """Search every block, in parts if needed; then search cut blocks whole while the budget lasts."""
        names = self.stages.graph.names
        parts = [names[b.start : b.stop] for b in split_blocks(names, self.stages.graph.after)]
        found = [self._part(part, PART) for part in parts]
        for i in sorted((i for i, f in enumerate(found) if not f.exact), key=lambda i: len(parts[i])):
            found[i] = self._search_pruned(parts[i], self._prunings(parts[i]), MAX_TRANSITIONS, found[i])
            if not found[i].exact:
                found[i] = self._in_chains(parts[i], found[i])
        return _join_results(found)

    def _part(self, names: Sequence[str], most: int) -> IOSResult:
        """Search a block, or a part of one. With too many transitions, return the better of two searches: in parts of at most
        ``most`` operators, or with smaller or fewer groups. So a larger ``r`` or ``s`` is not worse."""
        first, *narrower = self._prunings(names)
        whole = self._whole(names, first, FIRST_TRANSITIONS)
        if isinstance(whole, Found):
            return _make_result([(n,) for n in names], whole, "exact")
        if whole is None:
            self.greedy += len(names)
            return self._schedule_waves(names)
        most = min(most, (len(names) + 1) // 2)
        _log.info("%s: a block from %s is cut into parts of at most %d (%s)", self.policy, names[0], most, whole)
        parts = split_windows(names, self.stages.graph.after, most)
        joined = replace(_join_results([self._part(part, most) for part in parts]), proved="none")
        other = min(joined, self._schedule_waves(names), key=lambda f: f.seconds)
        return self._search_pruned(names, narrower, FIRST_TRANSITIONS, other)

    def _prunings(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Return the limits (r, s) of the searches of a block, from the policy's own down."""
        most = self.policy.s or max(MOST_GROUPS, self._width(names))
        return [(r, s) for r in range(self.policy.r, 0, -1) for s in sorted({most, min(most, MOST_GROUPS)}, reverse=True)]

    def _width(self, names: Sequence[str]) -> int:
        """Return the number of operators in the widest wave."""
        return max(map(len, levels_of(names, self.stages.graph.after)))

    def _search_pruned(
        self, names: Sequence[str], prunings: Sequence[tuple[int, int]], limit: int, other: IOSResult
    ) -> IOSResult:
        """Search a whole block with the first feasible one of ``prunings``; return ``other`` if it is not better."""
        for pruning in prunings:
            whole = self._whole(names, pruning, limit)
            if isinstance(whole, Found):
                exact = pruning == self._prunings(names)[0]
                found = _make_result([(n,) for n in names], whole, "exact" if exact else "none")
                return found if exact or whole.cost < other.seconds else other
        return other

    def _in_chains(self, names: Sequence[str], other: IOSResult) -> IOSResult:
        """Search a whole block with each chain as one operator; return ``other`` if it is not slower."""
        units = find_chains(names, self.stages.graph.after)
        for size, groups in self._prunings(names) if len(units) < len(names) else ():
            whole = self._whole([n for unit in units for n in unit], (size, groups), MAX_TRANSITIONS, units)
            if isinstance(whole, Found):
                found = _make_result(units, whole, "none")
                best = found if found.seconds < other.seconds else other
                return replace(best, proved="chains") if (size, groups) == self._prunings(names)[0] else best
        return other

    def _whole(
        self, names: Sequence[str], pruning: tuple[int, int], limit: int, units: Sequence[tuple[str, ...]] = ()
    ) -> Found | TooLarge | None:
        """Search a whole block with a ``pruning`` (r, s); return None once the model's transitions or time are used up. The
        operators of each of ``units``, if present, stay together."""
        size = len(units or names)
        if size > MAX_OPERATORS:
            return None if self._is_budget_spent() else TooLarge(f"{size} operators")
        device = self.stages.device
        key = *pruning, device.veus, device.launch, limit, tuple(map(len, units)), self.stages.signature(names)
        if key not in self.memory.known:
            if size > 1 and self._is_budget_spent():
                return None
            try:
                self.memory.known[key] = found = self._search_exact(units or [(n,) for n in names], pruning, limit)
                self.memory.transitions += found.transitions
            except TooLarge as problem:
                self.memory.known[key] = problem
                self.memory.transitions += problem.tried
            except _OutOfTime:
                return None
        return cast("Found | TooLarge", self.memory.known[key])

    def _is_budget_spent(self) -> bool:
        return self.memory.transitions >= MAX_TOTAL or self.time.over()

    def _schedule_waves(self, names: Sequence[str]) -> IOSResult:
        """Return waves of at most ``s`` operators, concurrent or sequential, whichever is faster."""
        stages, most = list[tuple[str, ...]](), self.policy.s or self._width(names)
        seconds, tried = 0.0, 0
        for level in levels_of(names, self.stages.graph.after):
            for first in range(0, len(level), most):
                wave = tuple(level[first : first + most])
                together = self.stages.seconds(wave)
                alone = sum(self.stages.seconds((n,)) for n in wave)
                stages += [wave] if together <= alone else [(n,) for n in wave]
                seconds += min(together, alone)
                tried += 1
        return IOSResult(tuple(stages), seconds, tried, 1, "none")

    def _search_exact(self, units: Sequence[tuple[str, ...]], pruning: tuple[int, int], limit: int) -> Found:
        unit_of = {n: u[0] for u in units for n in u}
        after = self.stages.graph.after
        dag = Dag.of([u[0] for u in units], {u[0]: [unit_of[p] for p in after.get(u[0], ()) if p in unit_of] for u in units})

        def tick() -> None:
            if len(units) > 1 and self.time.over():
                raise _OutOfTime

        def of(part: int) -> list[str]:
            return [n for i in iter_bits(part) for n in units[i]]

        @cache
        def kind(group: int) -> int:
            return self.stages.kind(of(group))

        def latency(ending: int) -> float:
            tick()
            return self.stages.together(map(kind, connected_components(dag, ending)), of(ending))

        def least(group: int) -> Least:
            return self.stages.least(of(group))

        limit = max(1, min(limit, MAX_TOTAL - self.memory.transitions))
        return search_stages(dag, Latency(latency, least, tick), *pruning, limit)


def _make_result(units: Sequence[tuple[str, ...]], found: Found, proved: Proof) -> IOSResult:
    stages = tuple(tuple(n for i in iter_bits(mask) for n in units[i]) for mask in found.stages)
    return IOSResult(stages, found.cost, found.transitions, found.schedules, proved)


def _join_results(parts: Sequence[IOSResult]) -> IOSResult:
    """Join the results of consecutive blocks."""
    return IOSResult(
        tuple(stage for p in parts for stage in p.stages),
        sum(p.seconds for p in parts),
        sum(p.transitions for p in parts),
        math.prod(p.schedules for p in parts),
        max((p.proved for p in parts), key=PROOFS.index, default="exact"),
    )


@dataclass
class SearchTime:
    """Timer for ``seconds`` of this thread's processor time, cheap to query.

    Reading the processor's clock is a system call, a millisecond on some machines. It is read only if the wall clock, which the
    processor's clock cannot outrun, has passed the deadline."""

    seconds: float
    _begun: float = field(default_factory=time.thread_time)
    _ask: float = field(init=False)

    def __post_init__(self) -> None:
        self._ask = time.perf_counter() + self.seconds

    def spent(self) -> float:
        """Return the processor seconds since the start."""
        return time.thread_time() - self._begun

    def over(self) -> bool:
        """Return True if all seconds are spent."""
        if time.perf_counter() < self._ask:
            return False
        left = self.seconds - self.spent()
        self._ask = time.perf_counter() + left
        return left <= 0
