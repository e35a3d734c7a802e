"""Stitching: memory-bound operators on the same rows become one, with several results (FusionStitching, sections 4 and 5).

Groups of ``connect`` grow along chains and mostly write one result. What they leave are operators that read the same tensor
(two statistics of one batch), or that others need besides (a residual sum and its normalisation). A *plan* says which of
them become one; a *move* joins two groups. The delta evaluator prices a move by what it changes: bytes, operations and
launches of three operators, as the core counts them. A beam search keeps the plans of each region, of what possible
moves connect, that save most; the latency evaluator chooses among these and the plan without any move: the device's kernels,
predicted or measured, as its schedule has them, so that operators which do not wait for each other are priced side by side.
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

from rammer.device.manifest import Binding
from rammer.fusion.connect import LONGEST_CHAIN
from rammer.fusion.fusion_legality import CHEAP, find_meeting_layer, memory_bound, read_in_place, recompute_maps
from rammer.fusion.stitch_latency import Evaluator, Members, RegionTimes
from rammer.fusion.tile_graph import ConnectionTrial, TileGraph, device_edges
from rammer.fusion.tile_search import ranked_tiles
from rammer.fusion.topological_order import sort_topologically
from rammer.ir import expr as ex
from rammer.ir.device import VDevice
from rammer.ir.operator import Connection, ROperator

#: Plans that the search keeps, and the most results of one operator.
BEAM, MOST_RESULTS = 4, 8
#: By how much a move may be slower than its parts: two of them may pay where neither does alone.
UPHILL: Final = 1.3
#: Share of the time of its operators that a group saves at least where plans are run: less is within what measurements differ
#: by. Where they are predicted a device says by how much that may be wrong (``VDevice.doubt``).
LEAST_GAIN: Final = 0.01
#: Groups within one that does not pay that are priced in its place.
PARTS: Final = 12
#: Plans of a region that are run beside the one without any move, where plans are run.
RIVALS: Final = 2
#: Operators of a region from which on only the best plan is kept; larger regions are cut into such ones, so that a search takes
#: no longer than its model is large.
WIDE: Final = 24


def stitch(
    tile: TileGraph,
    device: VDevice,
    latency: Evaluator,
    aliases: Mapping[str, tuple[str, ...]],
    binding: Binding | None = None,
) -> TileGraph:
    """``tile`` with memory-bound operators stitched where the device is no slower for it, as predicted or, where plans are run,
    in a run. ``aliases`` as for ``connect``."""
    search = _Stitcher(tile, device, latency, aliases, binding or Binding(tile.graph.types, {}))
    for part, width in search.regions():
        search.settle(search.best(part, width))
    joined = list(dict.fromkeys(search.settled.values()))
    if not joined:
        return replace(tile, decisions=(*tile.decisions, *search.decisions))
    inside = frozenset[int]().union(*joined)
    kept = [o for i, o in enumerate(tile.operators) if i not in inside]
    made = [o for o in map(search.operator, joined) if o is not None]
    operators = sort_topologically([*kept, *made], search.position, search.roots)
    owner = {c.name: o.name for o in operators for c in o.computes}
    edges = tuple(e for o in operators for e in o.connections) + device_edges(tile.graph, owner)
    return replace(tile, operators=operators, decisions=(*tile.decisions, *search.decisions), edges=edges)


@dataclass(frozen=True)
class _Plan:
    """The groups of more than one operator, and the seconds that they save by the delta evaluator (negative)."""

    groups: frozenset[Members] = frozenset()
    delta: float = 0.0

    @cached_property
    def of(self) -> dict[int, Members]:
        """The group of every operator that is in one."""
        return {i: g for g in self.groups for i in g}

    def group(self, i: int) -> Members:
        """The group of operator ``i``: itself alone, or with others."""
        return self.of.get(i) or frozenset((i,))

    def rank(self) -> tuple[float, list[list[int]]]:
        """By which plans are compared: what they save, then their groups."""
        return self.delta, sorted(map(sorted, self.groups))

    def joined(self, a: Members, b: Members, delta: float) -> _Plan:
        """This plan with two groups as one."""
        return _Plan(self.groups - {a, b} | {a | b}, self.delta + delta)


class _Stitcher:
    def __init__(
        self,
        tile: TileGraph,
        device: VDevice,
        latency: Evaluator,
        aliases: Mapping[str, tuple[str, ...]],
        binding: Binding,
    ) -> None:
        self.tile, self.device, self.latency, self.aliases, self.binding = tile, device, latency, aliases, binding
        self.operators, self.decisions = tile.operators, list[ConnectionTrial]()
        self.position = {c.name: i for i, c in enumerate(tile.graph.computes)}
        self.owner = {c.name: i for i, o in enumerate(self.operators) for c in o.computes}
        self.escaping = set(tile.graph.outputs) | {t for sources in aliases.values() for t in sources}
        self.readers: dict[str, set[int]] = {}
        self.after: list[set[int]] = [set() for _ in self.operators]
        for i, o in enumerate(self.operators):
            for name in o.inputs:
                self.readers.setdefault(name, set()).add(i)
                for root in self.roots(name):
                    if root in self.owner:
                        self.after[self.owner[root]].add(i)
        self.stitched: dict[Members, ROperator | None] = {}
        self.costs: dict[str, float] = {}
        self.prices: dict[Members, float] = {}
        own: _Stitcher = proxy(self)  # a circle would keep constants in memory until the garbage collector runs
        ordered = partial(sort_topologically, position=self.position, roots=lambda tensor: own.roots(tensor))
        self.times = RegionTimes(latency, lambda group: own.operator(group), self.after, ordered)
        self.deltas: dict[tuple[Members, Members], float | None] = {}
        self.settled: dict[int, Members] = {}  #: The groups of regions that are decided, by operator.
        self.doubt = max(LEAST_GAIN, device.doubt)  #: What a group must save of its parts' time where that is only predicted.
        self.spans: list[tuple[int, int]] = []  #: From which operator to which those reach, in order; what overlaps is one.

    def settle(self, groups: Iterable[Members]) -> None:
        """Decide for these, which other regions' groups must not make a circle with."""
        for group in groups:
            self.settled |= dict.fromkeys(group, group)
            meet = [s for s in self.spans if s[0] <= max(group) and min(group) <= s[1]]
            first, last = zip((min(group), max(group)), *meet, strict=True)
            self.spans = sorted([*(s for s in self.spans if s not in meet), (min(first), max(last))])

    def roots(self, tensor: str) -> tuple[str, ...]:
        """The tensors whose memory ``tensor`` reads: itself unless it is a view."""
        return self.aliases.get(tensor, (tensor,))

    # --- moves ------------------------------------------------------------------------------------

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Operators that could be one: memory-bound, and one reads the other's result, or both a tensor that is no constant."""
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
        """The operators of ``group`` as one; None where that is no operator."""
        if len(group) == 1:
            return self.operators[next(iter(group))]
        if group not in self.stitched:
            made = self._made(group)
            self.stitched[group] = self._fit_operator(made, group) if made is not None else None
        return self.stitched[group]

    def _fit_operator(self, operator: ROperator, group: Members) -> ROperator:
        """``operator``; where rows of its maps do not fit on chip one whose readers compute them again, if these are cheap or the
        device's kernels keep such rows no faster some other way."""
        cost = self._operator_cost(operator)
        if cost < math.inf:
            self.prices[group] = cost
            return operator
        again, kept = recompute_maps(operator), {e.producer for e in operator.connections if e.layer == "veu"}
        cheap = all(ex.count_flops(c.body) <= CHEAP for c in operator.computes if c.name in kept and not c.reduce)
        return again if cheap or self.latency.alone(again) < self.latency.alone(operator) else operator

    def _made(self, group: Members) -> ROperator | None:
        members = [self.operators[i] for i in sorted(group)]
        if sum(len(o.computes) for o in members) > LONGEST_CHAIN:
            return None
        computes = sorted((c for o in members for c in o.computes), key=lambda c: self.position[c.name])
        inside = {c.name for c in computes}
        outputs = tuple(c.name for c in computes if self._used_outside(c.name, group))
        if len(outputs) > MOST_RESULTS or computes[-1].name not in outputs:
            return None
        links = {(e.producer, e.consumer): e.layer for o in members for e in o.connections}
        connections = list[Connection]()
        for c in computes:
            if any(r in inside for n in c.reads if n not in inside for r in self.roots(n)):
                return None  # it reads a view of what the others write, which is in memory only behind them
            for name in (n for n in c.reads if n in inside):
                kept = links.get((name, c.name)) or find_meeting_layer(inside, c)
                if kept is None:
                    return None
                connections.append(Connection(name, c.name, kept))
        made = ROperator(computes[-1].name, tuple(computes), tuple(connections), outputs)
        if not made.even and not _is_cuttable(made):
            return None
        return read_in_place(made) if self.device.spills else made

    def _used_outside(self, name: str, group: Members) -> bool:
        return name in self.escaping or bool(self.readers.get(name, set()) - group)

    def _is_circular(self, plan: _Plan, group: Members) -> bool:
        """Whether a way leads from ``group`` over other groups of ``plan``, or of what is settled, back to it."""
        last = max(group.union(*plan.groups))
        reaching = bisect_right(self.spans, (last, len(self.operators))) - 1
        if reaching >= 0:  # operators are in order: only a group that begins before the last leads back from behind it
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
        """The pairs by what they connect, large regions in parts; and how many plans to keep for each."""
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
        """The groups of the best plan for ``region``, of a search that keeps ``width`` plans."""
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
        """The plan without any move, and others without the groups that do not save that share of their parts' time; with their
        seconds as predicted."""
        plans = {p.groups: p for p in (_Plan(), *(self._thin_plan(p, found, region, least) for p in paying))}
        return {p: self.times.predicted(groups, region) for groups, p in plans.items()}

    def _run(self, plans: Mapping[_Plan, float], region: Members) -> dict[_Plan, float]:
        """The first plan, the others predicted fastest, and the best of these without the groups that do not pay, with seconds of
        a run of each: kernels that are timed alone find other things in the caches than in their program. None where one
        cannot be run."""
        apart, *others = plans
        if not others:
            return dict(plans)
        runs = {p: self.times.run(p.groups, region) for p in (apart, *sorted(others, key=plans.__getitem__)[:RIVALS])}
        if math.inf in runs.values():
            return {}
        best = min(list(runs)[1:], key=runs.__getitem__)
        left, seconds = self._undo_groups(best, runs[best], region)
        return runs | {left: seconds}

    def _undo_groups(self, plan: _Plan, seconds: float, region: Members) -> tuple[_Plan, float]:
        """``plan``, which takes ``seconds`` in one run, without the groups without which a run takes no longer."""
        for group in sorted(plan.groups, key=sorted) if len(plan.groups) > 1 else ():
            less = _Plan(plan.groups - {group}, plan.delta)
            without = self.times.run(less.groups, region)
            if without <= seconds:
                plan, seconds = less, without
        return plan, seconds

    def _thin_plan(self, plan: _Plan, found: Iterable[_Plan], region: Members, least: float) -> _Plan:
        """``plan`` with each group that does not pay by the latency evaluator replaced by what does within it, of the groups that
        were ``found`` on the way. A cycle there would be one of the plan's, too."""
        smaller = sorted({g for p in found for g in p.groups}, key=lambda g: (-len(g), sorted(g)))
        kept = frozenset[Members]()
        for whole in sorted(plan.groups, key=sorted):
            for group in (whole, *islice((g for g in smaller if g < whole), PARTS)):
                if not any(group & k for k in kept) and self._is_profitable(group, kept, region, least):
                    kept |= {group}
        while idle := next((g for g in sorted(kept, key=sorted) if not self._is_profitable(g, kept - {g}, region, least)), None):
            kept -= {idle}  # beside the others it saves nothing
        return _Plan(kept, plan.delta)

    def _is_profitable(self, group: Members, kept: frozenset[Members], region: Members, least: float) -> bool:
        """Whether a group's one operator saves that share of what its members take side by side of the region's time, beside the
        groups that are ``kept``: what reads one of its members waits for all of them then."""
        before, behind = (self.times.predicted(groups, region) for groups in (kept, kept | {group}))
        return behind < (before - least * self.times.predicted((), group) if before < math.inf else before)

    def _join_delta(self, a: Members, b: Members) -> float | None:
        """What joining two groups changes; None where that is no move. Asked once: plans share most of their groups."""
        if (a, b) not in self.deltas:
            together = self._price_group(a | b) if a != b else math.inf
            apart = self._price_group(a) + self._price_group(b) if together < math.inf else 0.0
            self.deltas[a, b] = together - apart if together < apart * UPHILL else None
        return self.deltas[a, b]

    def _best_moves(self, plan: _Plan, region: Iterable[tuple[int, int]], most: int) -> list[_Plan]:
        """The ``most`` best plans that join two groups of ``plan`` and save time by it, or might with further moves. Which moves
        lead in a circle is asked in that order, so of few of them."""
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
        """The delta evaluator: seconds with the best tile, launch included, as the core counts bytes and operations. Kernels may
        keep rows that do not fit on chip in registers, which the latency evaluator knows; here they are computed again."""
        operator = self.operator(group)
        if operator is None:
            return math.inf
        if group not in self.prices:
            cost = self._operator_cost(operator)
            self.prices[group] = cost if cost < math.inf else self._operator_cost(recompute_maps(operator))
        return self.prices[group]

    def _operator_cost(self, operator: ROperator) -> float:
        """Seconds with the best tile; infinite where none fits. Tiles are searched once for operators of equal keys: a model's
        layers, and a sequence's steps, are alike."""
        key = self.binding.key(operator)
        if key not in self.costs:
            ranked = ranked_tiles(operator, self.tile.graph.types, self.device)
            self.costs[key] = ranked[0][0] if ranked else math.inf
        return self.costs[key]

    def _log_plans(self, plans: Sequence[tuple[_Plan, float]], chosen: _Plan) -> None:
        apart = next(seconds for plan, seconds in plans if not plan.groups)
        for plan, seconds in plans:
            if plan.groups:
                groups = sorted(plan.groups, key=sorted)
                subject = " | ".join(" + ".join(self.operators[i].name for i in sorted(g)) for g in groups)
                why = "another plan is faster" if chosen.groups else "the device's kernels are slower"
                kept = plan == chosen
                self.decisions.append(ConnectionTrial(subject, "stitch", apart, seconds, kept, "stitched" if kept else why))


def _row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape up to its first axis of more than one element: what results have in common that may be one operator's."""
    return shape[: next((d for d, n in enumerate(shape) if n > 1), len(shape)) + 1]


def _is_cuttable(operator: ROperator) -> bool:
    """Whether there may be several tasks."""
    return any(n > 1 for d, n in enumerate(operator.anchor.shape) if d not in operator.uncut)


def _split_region(region: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """A region's pairs in parts of at most ``WIDE`` operators, in order; pairs across two parts are no moves."""
    place = {i: n // WIDE for n, i in enumerate(sorted({i for pair in region for i in pair}))}
    parts: list[list[tuple[int, int]]] = [[] for _ in range(max(place.values()) + 1)]
    for a, b in region:
        if place[a] == place[b]:
            parts[place[a]].append((a, b))
    return [part for part in parts if part]
