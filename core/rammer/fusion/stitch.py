"""Stitching: fusion of memory-bound operators on the same rows into one with several results (FusionStitching, sections 4 and 5).

Groups of ``connect`` grow along chains and mostly write one result. The remaining operators read the same tensor (two statistics
of one batch), or have other readers (a residual sum and its normalisation). A *plan* is a set of groups to fuse; a *move* joins
two groups. The delta evaluator prices a move by the bytes, operations and launches of three operators, as the core counts them. A
beam search keeps the best plans of each region, a component connected by possible moves. The latency evaluator chooses among them
and the unfused plan. It uses the predicted or measured times of the device's kernels in its schedule, so independent operators
are priced as concurrent.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, islice
from typing import Final
from weakref import proxy

from rammer.fusion.connect import LONGEST_CHAIN
from rammer.fusion.fusion_legality import (
    CHEAP,
    find_meeting_layer,
    join_connections,
    memory_bound,
    move_tiles,
    read_in_place,
    recompute_maps,
)
from rammer.fusion.group_prices import GroupPrices
from rammer.fusion.stitch_latency import Evaluator, Members, RegionTimes
from rammer.fusion.tile_graph import ConnectionTrial, TileGraph, regroup
from rammer.fusion.topological_order import sort_topologically
from rammer.ir import expr as ex
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

#: Beam width of the search, and the maximum number of results of one operator.
BEAM, MOST_RESULTS = 4, 8
#: Maximum slowdown of a move over its parts: two moves may pay where neither does alone.
UPHILL: Final = 1.3
#: Minimum fraction of its operators' time that a group must save if plans are measured: less is within the noise. For
#: predictions, the device states the error (``VDevice.doubt``).
LEAST_GAIN: Final = 0.01
#: Maximum number of subgroups that are priced instead of an unprofitable group.
PARTS: Final = 12
#: Maximum number of plans of a region that are measured besides the unfused plan.
RIVALS: Final = 2
#: Operators of a region from which on the beam width is 1. Larger regions are split, so that search time is linear in model size.
WIDE: Final = 24


def stitch(tile: TileGraph, device: VDevice, latency: Evaluator, prices: GroupPrices | None = None) -> TileGraph:
    """Return ``tile`` with memory-bound operators stitched unless the device is slower. Times are predicted or, if plans are run,
    measured."""
    search = _Stitcher(tile, device, latency, prices or GroupPrices.of(tile.graph, device))
    for part, width in search.regions():
        search.settle(search.best(part, width))
    joined = list(dict.fromkeys(search.settled.values()))
    if not joined:
        return replace(tile, decisions=(*tile.decisions, *search.decisions))
    inside = frozenset[int]().union(*joined)
    kept = [o for i, o in enumerate(tile.operators) if i not in inside]
    made = [o for o in map(search.operator, joined) if o is not None]
    operators = sort_topologically([*kept, *made], search.position, tile.roots)
    return replace(regroup(tile, operators, made, "stitched"), decisions=(*tile.decisions, *search.decisions))


@dataclass(frozen=True)
class _Plan:
    """The groups of more than one operator, and the change in seconds by the delta evaluator (negative if faster)."""

    groups: frozenset[Members] = frozenset()
    delta: float = 0.0

    @cached_property
    def of(self) -> dict[int, Members]:
        """The group of every fused operator."""
        return {i: g for g in self.groups for i in g}

    def group(self, i: int) -> Members:
        """Return the group of operator ``i``, which may contain only ``i``."""
        return self.of.get(i) or frozenset((i,))

    def rank(self) -> tuple[float, list[list[int]]]:
        """Return the sort key of plans: their delta, then their groups."""
        return self.delta, sorted(map(sorted, self.groups))

    def joined(self, a: Members, b: Members, delta: float) -> _Plan:
        """Return this plan with two groups joined."""
        return _Plan(self.groups - {a, b} | {a | b}, self.delta + delta)


class _Stitcher:
    def __init__(self, tile: TileGraph, device: VDevice, latency: Evaluator, prices: GroupPrices) -> None:
        self.tile, self.device, self.latency, self.roots, self.modelled = tile, device, latency, tile.roots, prices.modelled
        self.operators, self.decisions = tile.operators, list[ConnectionTrial]()
        self.position = {c.name: i for i, c in enumerate(tile.graph.computes)}
        self.owner = {c.name: i for i, o in enumerate(self.operators) for c in o.computes}
        self.escaping = set(tile.graph.outputs) | {t for sources in tile.aliases.values() for t in sources}
        self.readers: dict[str, set[int]] = {}
        self.after: list[set[int]] = [set() for _ in self.operators]
        for i, o in enumerate(self.operators):
            for name in o.inputs:
                self.readers.setdefault(name, set()).add(i)
                for root in self.roots(name):
                    if root in self.owner:
                        self.after[self.owner[root]].add(i)
        self.stitched: dict[Members, ROperator | None] = {}
        self.prices: dict[Members, float] = {}
        own: _Stitcher = proxy(self)  # a reference cycle would hold constants in memory until garbage collection
        ordered = partial(sort_topologically, position=self.position, roots=tile.roots)
        self.times = RegionTimes(latency, lambda group: own.operator(group), self.after, ordered)
        self.deltas: dict[tuple[Members, Members], float | None] = {}
        self.settled: dict[int, Members] = {}  #: Groups of the decided regions, by operator.
        self.doubt = max(LEAST_GAIN, device.doubt)  #: Minimum predicted gain of a group, relative to its parts' time.
        self.spans: list[tuple[int, int]] = []  #: Merged intervals of operator numbers of decided groups, in order.

    def settle(self, groups: Iterable[Members]) -> None:
        """Record decided groups, with which groups of other regions must not form a cycle."""
        for group in groups:
            self.settled |= dict.fromkeys(group, group)
            meet = [s for s in self.spans if s[0] <= max(group) and min(group) <= s[1]]
            first, last = zip((min(group), max(group)), *meet, strict=True)
            self.spans = sorted([*(s for s in self.spans if s not in meet), (min(first), max(last))])

    # --- moves ------------------------------------------------------------------------------------

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The memory-bound pairs of operators that may fuse: producer and consumer, or readers of one non-constant tensor."""
        bound = {i for i, o in enumerate(self.operators) if memory_bound(o)}
        found = dict[tuple[int, int], None]()
        for i in sorted(bound):
            for name in self.operators[i].outputs:
                found |= {(i, j): None for j in sorted(self.readers.get(name, set()) & bound)}
        for name, readers in self.readers.items():
            if name not in self.tile.graph.constants:
                alike = dict[tuple[int, ...], list[int]]()
                for i in sorted(readers & bound):
                    near = alike.setdefault(_row_shape(self.operators[i].anchor.shape), [])
                    found |= {(j, i): None for j in near[-WIDE:]}
                    near.append(i)
        return list(found)

    def operator(self, group: Members) -> ROperator | None:
        """Return the operators of ``group`` as one operator, or None if they cannot be fused."""
        if len(group) == 1:
            return self.operators[next(iter(group))]
        if group not in self.stitched:
            made = self._made(group)
            self.stitched[group] = self._fit_operator(made, group) if made is not None else None
        return self.stitched[group]

    def _fit_operator(self, operator: ROperator, group: Members) -> ROperator:
        """Return ``operator`` with its tiles at the highest layer that they fit, or a variant that recomputes maps whose rows fit
        none. The variant is chosen if the maps are cheap, or if its best kernels are faster."""
        lower = (move_tiles(operator, m.scope) for m in self.device.tile_layers[1:])
        for held in (operator, *lower):
            cost = self.modelled(held)
            if cost < math.inf:
                self.prices[group] = cost
                return held
        again = recompute_maps(operator)
        cheap = all(ex.count_flops(c.body) <= CHEAP for c in operator.computes if c.name in operator.held and not c.reduce)
        return again if cheap or self.latency.alone(again) < self.latency.alone(operator) else operator

    def _made(self, group: Members) -> ROperator | None:
        members = [self.operators[i] for i in sorted(group)]
        if sum(len(o.computes) for o in members) > LONGEST_CHAIN:
            return None
        computes = sorted((c for o in members for c in o.computes), key=lambda c: self.position[c.name])
        inside = {c.name for c in computes}
        outputs = tuple(c.name for c in computes if c.name in self.escaping or self.readers.get(c.name, set()) - group)
        if len(outputs) > MOST_RESULTS or computes[-1].name not in outputs:
            return None
        connections = join_connections(members, computes, self.roots, lambda name, c: find_meeting_layer(inside, c))
        if connections is None:
            return None
        made = ROperator(computes[-1].name, tuple(computes), connections, outputs)
        if not made.even and not _is_cuttable(made):
            return None
        return read_in_place(made) if self.device.spills else made

    def _is_circular(self, plan: _Plan, group: Members) -> bool:
        """Return True if a path leads from ``group`` through other groups of ``plan`` or decided groups back to it."""
        last = max(group.union(*plan.groups))
        reaching = bisect_right(self.spans, (last, len(self.operators))) - 1
        if reaching >= 0:  # operators are in order: only a group that begins before the last one can lead back
            last = max(last, self.spans[reaching][1])
        seen, ahead = set(group), [j for i in group for j in self.after[i] - group]
        while ahead:
            i = ahead.pop()
            if i in seen or i > last:
                continue
            for k in self.settled.get(i) or plan.group(i):
                seen.add(k)
                if self.after[k] & group:
                    return True
                ahead += self.after[k] - seen
        return False

    # --- search -----------------------------------------------------------------------------------

    def regions(self) -> list[tuple[list[tuple[int, int]], int]]:
        """Return the pairs by connected region, large regions in parts, each with its beam width."""
        region: dict[int, list[tuple[int, int]]] = {}
        for pair in self.pairs:
            a, b = (region.setdefault(i, []) for i in pair)
            if a is not b:
                a += b
                region |= {i: a for p in b for i in p}
            a.append(pair)
            region |= dict.fromkeys(pair, a)
        wholes = [_split_region(found) for found in {id(r): r for r in region.values()}.values()]
        return [(part, BEAM if len(parts) == 1 else 1) for parts in wholes for part in parts]

    def best(self, region: Sequence[tuple[int, int]], width: int) -> list[Members]:
        """Return the groups of the best plan for ``region``, by a beam search of ``width`` plans."""
        found, plans = [_Plan()], [_Plan()]
        while plans:
            moved = {p.groups: p for plan in plans for p in self._best_moves(plan, region, width)}
            plans = sorted(moved.values(), key=_Plan.rank)[:width]
            found += plans
        members = frozenset(i for pair in region for i in pair)
        paying = sorted((p for p in found if p.delta < 0), key=lambda p: p.delta)[:width]
        run = self._run(self._propose_plans(paying, found, members, LEAST_GAIN), members) if self.latency.together else {}
        runs = run or self._propose_plans(paying, found, members, self.doubt)
        chosen = min(runs, key=lambda p: runs[p] * (1 - LEAST_GAIN if run and not p.groups else 1))
        refused = {p: self.times.predicted(p.groups, members) for p in paying if p.groups not in {q.groups for q in runs}}
        self._log_plans([*runs.items(), *refused.items()], chosen)
        return sorted(chosen.groups, key=sorted)

    def _propose_plans(
        self, paying: Iterable[_Plan], found: Sequence[_Plan], region: Members, least: float
    ) -> dict[_Plan, float]:
        """Return the unfused plan and others, with predicted seconds. Groups that save less than the fraction ``least`` of their
        parts' time are removed."""
        plans = {p.groups: p for p in (_Plan(), *(self._thin_plan(p, found, region, least) for p in paying))}
        return {p: self.times.predicted(groups, region) for groups, p in plans.items()}

    def _run(self, plans: Mapping[_Plan, float], region: Members) -> dict[_Plan, float]:
        """Return measured seconds of plans, since kernels timed alone have other cache contents than in their program.

        The plans are the unfused plan, the best predicted plans, and the best of these without unprofitable groups. Returns {} if
        a plan cannot be run."""
        separate, *others = plans
        if not others:
            return dict(plans)
        runs = {p: self.times.run(p.groups, region) for p in (separate, *sorted(others, key=plans.__getitem__)[:RIVALS])}
        if math.inf in runs.values():
            return {}
        best = min(list(runs)[1:], key=runs.__getitem__)
        left, seconds = self._undo_groups(best, runs[best], region)
        return runs | {left: seconds}

    def _undo_groups(self, plan: _Plan, seconds: float, region: Members) -> tuple[_Plan, float]:
        """Remove the groups of ``plan`` without which a run is not slower; ``plan`` has a measured time of ``seconds``."""
        for group in sorted(plan.groups, key=sorted) if len(plan.groups) > 1 else ():
            less = _Plan(plan.groups - {group}, plan.delta)
            without = self.times.run(less.groups, region)
            if without <= seconds:
                plan, seconds = less, without
        return plan, seconds

    def _thin_plan(self, plan: _Plan, found: Iterable[_Plan], region: Members, least: float) -> _Plan:
        """Replace each group of ``plan`` that the latency evaluator rejects by profitable subgroups among those ``found``. A
        cycle through a subgroup would also be a cycle of the plan."""
        smaller = sorted({g for p in found for g in p.groups}, key=lambda g: (-len(g), sorted(g)))
        kept = frozenset[Members]()
        for whole in sorted(plan.groups, key=sorted):
            for group in (whole, *islice((g for g in smaller if g < whole), PARTS)):
                if not any(group & k for k in kept) and self._is_profitable(group, kept, region, least):
                    kept |= {group}
        while idle := next((g for g in sorted(kept, key=sorted) if not self._is_profitable(g, kept - {g}, region, least)), None):
            kept -= {idle}  # with the remaining groups it saves no time
        return _Plan(kept, plan.delta)

    def _is_profitable(self, group: Members, kept: frozenset[Members], region: Members, least: float) -> bool:
        """Return True if fusing a group saves the fraction ``least`` of its members' time in the region. The groups in ``kept``
        are also fused. Readers of one member wait for all members."""
        before, with_group = (self.times.predicted(groups, region) for groups in (kept, kept | {group}))
        return with_group < (before - least * self.times.predicted((), group) if before < math.inf else before)

    def _join_delta(self, a: Members, b: Members) -> float | None:
        """Return the change in seconds if two groups are joined, or None for an invalid move. Cached: plans share most groups."""
        if (a, b) not in self.deltas:
            together = self._price_group(a | b) if a != b else math.inf
            separate = self._price_group(a) + self._price_group(b) if together < math.inf else 0.0
            self.deltas[a, b] = together - separate if together < separate * UPHILL else None
        return self.deltas[a, b]

    def _best_moves(self, plan: _Plan, region: Iterable[tuple[int, int]], most: int) -> list[_Plan]:
        """Return the ``most`` best plans that join two groups of ``plan`` and save time, or may with further moves. Moves are
        tested for cycles in order of price, so only a few tests are needed."""
        moves = dict.fromkeys((plan.group(a), plan.group(b)) for a, b in region)
        priced = sorted(((d, a, b) for a, b in moves if (d := self._join_delta(a, b)) is not None), key=lambda move: move[0])
        result = list[_Plan]()
        for _, equal in groupby(priced, key=lambda move: move[0]):
            joined = sorted((plan.joined(a, b, d) for d, a, b in equal), key=_Plan.rank)
            result += islice(
                (p for p in joined if not self._is_circular(plan, next(iter(p.groups - plan.groups)))), most - len(result)
            )
            if len(result) == most:
                break
        return result

    def _price_group(self, group: Members) -> float:
        """Return seconds with the best tile, launch included, by the core's counts (the delta evaluator). Rows that do not fit on
        chip are recomputed here. Kernels may hold them in registers, which the latency evaluator considers."""
        operator = self.operator(group)
        if operator is None:
            return math.inf
        if group not in self.prices:
            cost = self.modelled(operator)
            self.prices[group] = cost if cost < math.inf else self.modelled(recompute_maps(operator))
        return self.prices[group]

    def _log_plans(self, plans: Sequence[tuple[_Plan, float]], chosen: _Plan) -> None:
        separate = next(seconds for plan, seconds in plans if not plan.groups)
        for plan, seconds in plans:
            if plan.groups:
                groups = sorted(plan.groups, key=sorted)
                subject = " | ".join(" + ".join(self.operators[i].name for i in sorted(g)) for g in groups)
                why = "another plan is faster" if chosen.groups else "the device's kernels are slower"
                kept = plan == chosen
                self.decisions.append(ConnectionTrial(subject, "stitch", separate, seconds, kept, "stitched" if kept else why))


def _row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape up to its first axis longer than 1, which the results of one operator share."""
    return shape[: next((d for d, n in enumerate(shape) if n > 1), len(shape)) + 1]


def _is_cuttable(operator: ROperator) -> bool:
    """Return True if the operator can have more than one task."""
    return any(n > 1 for d, n in enumerate(operator.anchor.shape) if d not in operator.uncut)


def _split_region(region: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split a region's pairs into parts of at most ``WIDE`` consecutive operators; pairs across parts are dropped."""
    place = {i: n // WIDE for n, i in enumerate(sorted({i for pair in region for i in pair}))}
    parts: list[list[tuple[int, int]]] = [[] for _ in range(max(place.values()) + 1)]
    for a, b in region:
        if place[a] == place[b]:
            parts[place[a]].append((a, b))
    return [part for part in parts if part]
