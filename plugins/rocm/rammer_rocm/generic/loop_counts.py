"""Operation counts of the generic kernel's loops for a task of maps and reductions on one core.

The counts are vector loads and stores, operations, and elements that are computed one by one. ``cost.py`` has the cost of each.
A *nest* is one loop nest of a task, a stage of ``codegen/stage_layout.py``. Its loads and their steps along its axes are analysed
once for all tiles of an operator. For a tile, the nest is collapsed and vectorised as in ``codegen/vector_rows.py``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rammer.codegen import FunctionContext, Place, last_stages
from rammer.codegen.c_target import CTarget
from rammer.codegen.stage_reads import collect_bodies, load_step, vector_cost
from rammer.codegen.vector_rows import FOLDED, LINE, side_by_side
from rammer.codegen.vector_text import STORED
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load, Op
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize, row_major

#: Operations whose vectors need many cycles: a divider is not pipelined.
QUOTIENTS: Final = frozenset(("div", "sqrt", "mod", "fmod", "floordiv"))
#: FLOP from which an operation counts as a function of several instructions.
FUNCTION: Final = 4
#: Bytes from which a step leaves its page and its prefetched data; bytes from which it leaves its line and the next.
PAGE, LINES = 4096, 128
#: Instructions that combine two vectors, and the latency in additions. An extremum that propagates NaN needs a compare, a test
#: and a select.
COMBINES: Final[Mapping[str, tuple[int, float]]] = {"max": (3, 2.7), "min": (3, 2.7)}
ONE: Final = (1, 1.0)
#: Instructions in flight on a core: consecutive loops overlap within this window (320 on Zen 4, 224 to 512 on Intel's cores since
#: Skylake; vendors' optimisation guides). A loop adds OWN overhead instructions per step: one in four steps.
WINDOW, OWN = 320, 0.25
#: Ways of the innermost cache: lines at the same page offset that it can hold.
WAYS: Final = 8

#: Number of occurrences by operation kind.
Counts = Counter[str]


@dataclass(frozen=True)
class NestRead:
    """A load of a nest.

    ``reducer`` is its reduction ("" for none). ``steps`` and ``taps`` are the elements between neighbours along the nest's and
    the reduction's axes, None if not constant. ``axes`` are its axes. ``suits``: vectors support its type. ``size``: bytes per
    element."""

    load: Load
    reducer: str
    steps: tuple[int | None, ...]
    taps: Mapping[str, int | None]
    axes: frozenset[str]
    suits: bool
    padded: bool
    size: int

    @property
    def tensor(self) -> str:
        """The tensor that is loaded."""
        return self.load.tensor

    def along(self, lane: str, stride: int | None, width: int) -> float:
        """Return the emitter's cost of loading a vector along an axis, in vector accesses."""
        if lane not in self.axes:
            return 0.0
        return vector_cost(stride, width) if self.suits else 2.0 * width


@dataclass(frozen=True)
class NestWork:
    """Operation counts of one body: cheap operations, quotients, and the FLOP of functions."""

    reducer: str
    cheap: int
    quotients: int
    functions: int


@dataclass(frozen=True)
class Lanes:
    """The vectorisation of a nest.

    Vectors have ``width`` elements along axis number ``axis``. If ``axis`` < 0 they run along the reductions' axes ``columns``;
    without ``columns`` the nest is scalar. ``together`` vectors along the axis are summed in one loop."""

    axis: int = -1
    width: int = 0
    columns: Mapping[str, tuple[str, int]] | None = None
    together: int = 1


def count_operations(reducer: str, body: Expr) -> NestWork:
    """Return the operation counts of a body, by kind."""
    found = [n.fn for n in ex.walk(body) if isinstance(n, Op)]
    flops = [ex.OPS[fn].flops for fn in found if fn not in QUOTIENTS]
    functions = sum(f for f in flops if f >= FUNCTION)
    return NestWork(reducer, sum(0 < f < FUNCTION for f in flops), sum(fn in QUOTIENTS for fn in found), functions)


class CountedNest:
    """A nest of an untiled operator; ``computes`` are the computes that it writes."""

    def __init__(self, unit: FunctionContext, computes: tuple[Compute, ...]) -> None:
        self.computes, self.root = computes, computes[-1]
        self.vectors = tuple(unit.target.vectors)
        count = len(self.root.axes)
        unit.ranges.update({f"x{d}": (0, max(a.extent - 1, 0)) for d, a in enumerate(self.root.axes)})
        parts = collect_bodies(unit, computes)
        own = {c.name: c for c in (*unit.inlined.values(), *computes)}
        self.work = [count_operations(p.reducer, p.body) for p in parts]
        self.reducers = {p.reducer: own[p.reducer] for p in parts if p.reducer}
        self.accesses = list[tuple[int, NestRead]]()  # every load of a body with its weight, including repeats
        self.reads = list[NestRead]()  # in text order, not by name: another summation order gives other results
        for part in parts:
            for load in ex.loads(part.body):
                read = self._make_read(unit, load, own.get(part.reducer), count)
                self.accesses.append((part.weight, read))
                if load.tensor not in unit.inlined and read not in self.reads:
                    self.reads.append(read)
        self.stores = [unit.places[c.name].strides for c in computes]
        self.suits = all(c.dtype in unit.lanes for c in computes)

    @staticmethod
    def _make_read(unit: FunctionContext, load: Load, reducer: Compute | None, count: int) -> NestRead:
        name, kind = reducer.name if reducer else "", unit.dtypes[load.tensor]
        if load.tensor in unit.inlined:  # computed in place: no access
            return NestRead(load, name, (0,) * count, {}, frozenset(), True, False, itemsize(kind))
        steps = tuple(load_step(unit, load, f"x{d}") for d in range(count))
        taps = {r.name: load_step(unit, load, f"{name}.{r.name}") for r in reducer.reduce} if reducer else {}
        axes = frozenset(ex.axes_of(load))
        return NestRead(load, name, steps, taps, axes, kind in unit.lanes, load.fill is not None, itemsize(kind))

    def width(self, count: int) -> int:
        """Return the vector width that covers ``count`` elements with the fewest vectors, or 0 if none fits."""
        fitting = [w for w in self.vectors if w <= count]
        return min(fitting, key=lambda w: (-(-count // w), w), default=0)

    def taps(self, reducer: str) -> int:
        """Return the number of reduction steps per element."""
        return math.prod(r.extent for r in self.reducers[reducer].reduce) if reducer else 1

    def joined(self, extents: Sequence[int]) -> list[int]:
        """Return the extents of a box, with axes joined if every access walks them as one."""
        found, whole = list(extents), [n == a.extent for n, a in zip(extents, self.root.axes, strict=True)]
        for d in reversed(range(len(found) - 1)):
            if whole[d + 1] and found[d] > 1 and self._can_join_axes(d, found[d + 1]):
                found[d], found[d + 1], whole[d + 1] = 1, found[d] * found[d + 1], whole[d]
        return found

    def _can_join_axes(self, d: int, inner: int) -> bool:
        pair = {f"x{d}", f"x{d + 1}"}
        for r in self.reads:
            outer, stride = r.steps[d], r.steps[d + 1]
            if outer is None or stride is None or outer != stride * inner or (r.padded and pair & r.axes):
                return False
        return all(s[d] == s[d + 1] * inner for s in self.stores)

    def lanes(self, extents: Sequence[int]) -> Lanes:
        """Return the vectorisation with the fewest accesses."""
        least, found = float(sum(weight for weight, _ in self.accesses) + len(self.stores)), Lanes()
        total, columns = self._columns()
        for d in reversed(range(len(extents))) if self.suits else ():
            if width := self.width(extents[d]):
                cost = sum(weight * r.along(f"x{d}", r.steps[d], width) for weight, r in self.accesses)
                cost += sum(vector_cost(s[d], width) for s in self.stores)
                cost *= -(-extents[d] // width) / extents[d]
                if cost < least:
                    least, found = cost, Lanes(d, width)
        return Lanes(columns=columns) if columns and total < least else found

    def _columns(self) -> tuple[float, dict[str, tuple[str, int]]]:
        """Return the number of accesses if reductions are vectorised along their axes, and these axes; {} unless all can be."""
        found, total = dict[str, tuple[str, int]](), float(len(self.stores))
        total += sum(weight for weight, r in self.accesses if not r.reducer)
        for name, c in self.reducers.items():
            own = [(weight, r) for weight, r in self.accesses if r.reducer == name]
            options = list[tuple[float, str, int]]()
            for axis in c.reduce:
                width = self.width(axis.extent)
                if width and c.dtype in STORED:
                    lane = f"{name}.{axis.name}"
                    costs = (weight * (r.along(lane, r.taps.get(axis.name), width) or 0.5) for weight, r in own)
                    padded = -(-axis.extent // width) * width / axis.extent
                    options.append((sum(costs) / width * padded + FOLDED, axis.name, width))
            if not options:
                return math.inf, {}
            cost, axis_name, width = min(options)
            total += cost
            found[name] = axis_name, width
        return total, found

    def alike(self) -> list[list[Compute]]:
        """Return the reductions grouped by the loops that they share."""
        groups = defaultdict[tuple[int, ...], list[Compute]](list)
        for c in self.reducers.values():
            groups[tuple(r.extent for r in c.reduce)].append(c)
        return list(groups.values())

    # --- counting ---------------------------------------------------------------------------------

    def together(self, lanes: Lanes, extents: Sequence[int]) -> int:
        """Return the number of vectors that one loop sums down columns, in a kernel for tasks of equal extents."""
        far = (r for r in self.reads if r.reducer and r.steps[lanes.axis] == 1 and r.taps)
        if lanes.axis < 0 or not any(all(abs(n or 0) * r.size >= LINE for n in r.taps.values()) for r in far):
            return 1
        return side_by_side(extents[lanes.axis], lanes.width, len(self.reducers))

    def count(self, box: Sequence[int], full: Sequence[int], device_lanes: int, even: bool = True) -> Counts:
        """Return the counts of a nest over a box, in a kernel for tasks with extents ``full``. All tasks have these extents, or
        most if not ``even``. A box narrower than the vectors is computed element by element."""
        found = Counts()
        if 0 in box:
            return found
        extents, whole = self.joined(box), self.joined(full)
        lanes = self.lanes(whole)
        lanes = replace(lanes, together=self.together(lanes, whole)) if even else lanes
        lanes, points = lanes if lanes.axis < 0 or extents[lanes.axis] >= lanes.width else Lanes(), math.prod(extents)
        loops = [d for d, n in enumerate(extents) if n > 1 and d != lanes.axis]
        found["nested"] += (points // max(1, extents[lanes.axis]) if lanes.axis >= 0 else points) * (len(loops) > 1)
        if lanes.axis >= 0:
            self._rows(found, extents, lanes, device_lanes)
        else:
            self._count_elements(found, "", points)
            found["element_store"] += points * len(self.stores)
            for group in self.alike():
                if lanes.columns:
                    self._count_column_walk(found, group, points, lanes.columns[group[0].name], device_lanes)
                else:
                    for c in group:
                        self._count_elements(found, c.name, points * self.taps(c.name))
                    self._count_waits(found, group, points, self.taps(group[0].name))
        return found

    def _rows(self, found: Counts, extents: Sequence[int], lanes: Lanes, device_lanes: int) -> None:
        """Count vectors along an axis of the nest."""
        d, width = lanes.axis, lanes.width
        rows = math.prod(extents) // extents[d]
        vectors = rows * -(-extents[d] // width)
        found["loop"] += rows
        strides = [(r, r.steps[d] if f"x{d}" in r.axes else 0) for r in self.reads]
        self._count_vectors(found, "", vectors, strides, width / device_lanes)
        for s in self.stores:
            if s[d] == 1:  # a port stores half of the widest vector at a time
                found["store"] += vectors * max(1, 2 * width // device_lanes)
            else:
                found["scatter"] += vectors * width
        for group in self.alike():
            steps, loops = vectors * self.taps(group[0].name), vectors // lanes.together
            found["loop"] += steps // lanes.together // max(1, group[0].reduce[-1].extent)
            self._count_shared_loop(found, group, steps, strides, width / device_lanes)
            self._count_waits(found, group, loops, self.taps(group[0].name))
            self._count_strides(found, group, loops * self.taps(group[0].name))

    def _count_strides(self, found: Counts, group: Iterable[Compute], steps: int) -> None:
        """Count loop steps that cross lines, pages, or pages at the same page offset. The innermost cache holds few lines with
        the same page offset."""
        seen = set[tuple[str, int]]()
        for c in group:
            for r in self.reads:
                far = abs(r.taps.get(c.reduce[-1].name) or 0) * r.size if r.reducer == c.name else 0
                if far >= LINES and (r.tensor, far) not in seen:
                    seen.add((r.tensor, far))
                    found["page" if far >= PAGE else "line"] += steps
                    found["conflict"] += steps if far % PAGE == 0 and c.reduce[-1].extent > WAYS else 0

    def _count_column_walk(
        self, found: Counts, group: Sequence[Compute], points: int, along: tuple[str, int], device_lanes: int
    ) -> None:
        """Count vectors along a reduction axis of one shared loop, and the remainder."""
        (name, width), c = along, group[0]
        extent = next(r.extent for r in c.reduce if r.name == name)
        loops = points * (self.taps(c.name) // extent)
        found["loop"] += loops * (1 + (extent % width > 0))
        levels = 1 + width.bit_length()
        found["fold"] += points * levels * sum(COMBINES.get(str(other.combiner), ONE)[0] for other in group)
        strides = [(r, r.taps.get(name, 0)) for r in self.reads]
        self._count_shared_loop(found, group, loops * (extent // width), strides, width / device_lanes)
        for other in group:
            self._count_elements(found, other.name, loops * (extent % width))
        in_turn = extent // width + extent % width
        self._count_waits(found, group, points, loops // max(1, points) * in_turn + 2 * levels)

    def _count_shared_loop(
        self, found: Counts, group: Iterable[Compute], steps: int, strides: Sequence[tuple[NestRead, int | None]], share: float
    ) -> None:
        """Count ``steps`` steps of a loop that several reductions share."""
        for c in group:
            self._count_vectors(found, c.name, steps, strides, share)
        combines = [COMBINES.get(str(c.combiner), ONE) for c in group]
        found["operation"] += round(steps * sum(n for n, _ in combines) * max(1.0, share))

    def _count_waits(self, found: Counts, group: Sequence[Compute], chains: int, steps: int) -> None:
        """Count latency stalls of loops whose steps depend on the previous step. Instructions of a loop that are in flight with
        the next loop are hidden. Reductions of one loop stall together."""
        combines, names = [COMBINES.get(str(c.combiner), ONE) for c in group], {c.name for c in group}
        loads = sum(r.reducer in names for r in self.reads)  # an instruction can also load one operand
        each = OWN + sum(n for n, _ in combines) + max(0, loads - len(group))
        each += sum(w.cheap + w.quotients + w.functions for w in self.work if w.reducer in names)
        found["wait"] += round(chains * steps * max(n for _, n in combines) * min(1.0, steps * each / WINDOW))

    def _count_vectors(
        self, found: Counts, reducer: str, count: int, strides: Iterable[tuple[NestRead, int | None]], share: float
    ) -> None:
        """Count one body for ``count`` vectors, each a fraction ``share`` of the widest."""
        parts = max(1.0, share)
        for r, far in strides:
            if r.reducer != reducer:
                continue
            if far is None or far not in (0, 1, 2) or not r.suits:
                found["gather"] += round(count * share * self.vectors[-1])
            else:
                found["load" if far else "spread"] += round(count * parts * max(1, far))
        for work in self.work:
            if work.reducer == reducer:
                found["operation"] += round(count * parts * work.cheap)
                found["quotient"] += round(count * share * work.quotients)
                found["function"] += round(count * (1 + share) / 2 * work.functions)  # half is latency, also for short vectors

    def _count_elements(self, found: Counts, reducer: str, count: int) -> None:
        """Count one body for ``count`` elements; elements of a reduction are also combined."""
        found["element_load"] += count * sum(r.reducer == reducer for r in self.reads)
        found["element"] += count * sum(w.cheap for w in self.work if w.reducer == reducer)
        found["element_step"] += count * COMBINES.get(str(self.reducers[reducer].combiner), ONE)[0] if reducer else 0
        found["element_quotient"] += count * sum(w.quotients for w in self.work if w.reducer == reducer)
        found["element_function"] += count * sum(w.functions for w in self.work if w.reducer == reducer)


def nests_of(operator: ROperator, binding: Binding, target: CTarget) -> Iterator[CountedNest]:
    """Yield the nests of an operator's tasks, in order. Tensors in on-chip memory have the strides of the whole tensor."""
    kept = {e.producer for e in operator.connections if e.layer == "veu"}
    inlined = {c.name: c for c in operator.computes if c.name not in kept}
    stored = {n: _make_place(n, binding) for n in (*operator.inputs, *operator.outputs, *sorted(kept))}
    unit = FunctionContext(target, binding.types, inlined, stored, {})
    for c in (c for c in operator.computes if c.name in kept):
        yield CountedNest(unit, (c,))
    for last in last_stages(operator, kept):
        yield CountedNest(unit, last)


def _make_place(tensor: str, binding: Binding) -> Place:
    kind, storage = binding.types[tensor], binding.storages.get(tensor)
    return Place("", kind.dtype, storage.strides if storage is not None else row_major(kind.shape), (), kind.shape)
