"""What the generic kernel's loops do for a task of maps and reductions on one core, counted: vectors loaded and stored,
operations, elements computed alone. ``plain.py`` says what each takes.

A *nest* is one loop nest of a task, a stage of ``codegen/layout.py``. What it reads, and how its loads step along its axes, is
looked at once for all tiles of an operator; for a tile, the nest is collapsed and vectorised as ``codegen/rows.py`` would.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rammer.codegen.context import FunctionContext, Place
from rammer.codegen.reads import WEIGHT, bodies, step, vector_cost
from rammer.codegen.rows import FOLDED
from rammer.codegen.target import CTarget
from rammer.codegen.vectors import STORED
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Op
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize, row_major

#: Operations whose vectors take many cycles: a divider is not pipelined.
QUOTIENTS: Final = frozenset(("div", "sqrt", "mod", "fmod", "floordiv"))
#: FLOP from which on an operation is a function of several instructions.
FUNCTION: Final = 4
#: Bytes from which on a step leaves its page, with what a core has prefetched; or its line and the next one.
PAGE, LINES = 4096, 128
#: Instructions that combine a vector with another one, and of them those that wait for each other: an extremum that keeps NaN
#: compares, tests beside that, and selects.
COMBINES: Final[Mapping[str, tuple[int, int]]] = {"max": (3, 2), "min": (3, 2)}
ONE: Final = (1, 1)

#: How often a task does something, by what it is.
Counts = Counter[str]


@dataclass(frozen=True)
class NestRead:
    """A load of a nest: by which reduction ("" for none), elements between neighbours along each of the nest's axes and of the
    reduction's (None where that is not fixed), the axes that it has, whether vectors hold its type, and bytes of an element."""

    tensor: str
    reducer: str
    steps: tuple[int | None, ...]
    taps: Mapping[str, int | None]
    axes: frozenset[str]
    suits: bool
    padded: bool
    size: int

    def along(self, lane: str, apart: int | None, width: int) -> float:
        """What the emitter takes a vector of it along an axis for, in vector accesses."""
        if lane not in self.axes:
            return 0.0
        return vector_cost(apart, width) if self.suits else 2.0 * width


@dataclass(frozen=True)
class NestWork:
    """The operations of one body: cheap ones, quotients, and the FLOP of functions."""

    reducer: str
    cheap: int
    quotients: int
    functions: int


@dataclass(frozen=True)
class Lanes:
    """How a nest is vectorised: ``width`` elements along its axis number ``axis``, or (``axis`` < 0) along the reductions' own
    axes ``columns``; neither: element by element."""

    axis: int = -1
    width: int = 0
    columns: Mapping[str, tuple[str, int]] | None = None


def operations(reducer: str, body: Expr) -> NestWork:
    """What a body takes, by kind."""
    found = [n.fn for n in ex.walk(body) if isinstance(n, Op)]
    flops = [ex.OPS[fn].flops for fn in found if fn not in QUOTIENTS]
    functions = sum(f for f in flops if f >= FUNCTION)
    return NestWork(reducer, sum(0 < f < FUNCTION for f in flops), sum(fn in QUOTIENTS for fn in found), functions)


class CountedNest:
    """One nest of an untiled operator; ``computes`` are those that it writes."""

    def __init__(self, unit: FunctionContext, computes: tuple[Compute, ...]) -> None:
        self.computes, self.root = computes, computes[-1]
        self.vectors = tuple(unit.target.vectors)
        count = len(self.root.axes)
        unit.ranges.update({f"x{d}": (0, max(a.extent - 1, 0)) for d, a in enumerate(self.root.axes)})
        parts = bodies(unit, computes)
        own = {c.name: c for c in (*unit.inlined.values(), *computes)}
        self.work = [operations(p.reducer, p.body) for p in parts]
        self.reducers = {p.reducer: own[p.reducer] for p in parts if p.reducer}
        # In the order of the text, not of names: sums of the same numbers in another order are other numbers.
        loads = dict.fromkeys((ld, p.reducer) for p in parts for ld in ex.loads(p.body) if ld.tensor not in unit.inlined)
        self.reads = list[NestRead]()
        for load, reducer in loads:
            used = frozenset(ex.axes_of(load))
            steps = tuple(step(unit, load, f"x{d}") for d in range(count))
            taps = {r.name: step(unit, load, f"{reducer}.{r.name}") for r in own[reducer].reduce} if reducer else {}
            suits = unit.dtypes[load.tensor] in unit.lanes
            self.reads.append(
                NestRead(
                    load.tensor, reducer, steps, taps, used, suits, load.fill is not None, itemsize(unit.dtypes[load.tensor])
                )
            )
        self.stores = [unit.places[c.name].strides for c in computes]
        self.suits = all(c.dtype in unit.lanes for c in computes)

    def width(self, count: int) -> int:
        """The vectors that cover so many elements."""
        fitting = [w for w in self.vectors if w <= count]
        return min(fitting, key=lambda w: (-(-count // w), w), default=0)

    def taps(self, reducer: str) -> int:
        """How often an element makes the loads of a reduction."""
        return math.prod(r.extent for r in self.reducers[reducer].reduce) if reducer else 1

    def joined(self, extents: Sequence[int]) -> list[int]:
        """The extents of a box, axes joined where every access walks them as one."""
        found, whole = list(extents), [n == a.extent for n, a in zip(extents, self.root.axes, strict=True)]
        for d in reversed(range(len(found) - 1)):
            if whole[d + 1] and found[d] > 1 and self._walks(d, found[d + 1]):
                found[d], found[d + 1], whole[d + 1] = 1, found[d] * found[d + 1], whole[d]
        return found

    def _walks(self, d: int, inner: int) -> bool:
        pair = {f"x{d}", f"x{d + 1}"}
        for r in self.reads:
            outer, apart = r.steps[d], r.steps[d + 1]
            if outer is None or apart is None or outer != apart * inner or (r.padded and pair & r.axes):
                return False
        return all(s[d] == s[d + 1] * inner for s in self.stores)

    def lanes(self, extents: Sequence[int]) -> Lanes:
        """The vectorisation with the fewest accesses."""
        weights = [min(WEIGHT, self.taps(r.reducer)) for r in self.reads]
        least, found = float(sum(weights) + len(self.stores)), Lanes()
        total, columns = self._columns()
        for d in reversed(range(len(extents))) if self.suits else ():
            if width := self.width(extents[d]):
                cost = sum(w * r.along(f"x{d}", r.steps[d], width) for w, r in zip(weights, self.reads, strict=True))
                cost += sum(vector_cost(s[d], width) for s in self.stores)
                cost *= -(-extents[d] // width) / extents[d]
                if cost < least:
                    least, found = cost, Lanes(d, width)
        return Lanes(columns=columns) if columns and total < least else found

    def _columns(self) -> tuple[float, dict[str, tuple[str, int]]]:
        """The accesses where reductions walk along their own axes, and which; {} unless all have one."""
        found, total = dict[str, tuple[str, int]](), float(len(self.stores)) + sum(not r.reducer for r in self.reads)
        for name, c in self.reducers.items():
            weight, own = min(WEIGHT, self.taps(name)), [r for r in self.reads if r.reducer == name]
            options = list[tuple[float, str, int]]()
            for axis in c.reduce:
                width = self.width(axis.extent)
                if width and c.dtype in STORED:
                    costs = (r.along(f"{name}.{axis.name}", r.taps[axis.name], width) or 0.5 for r in own)
                    padded = -(-axis.extent // width) * width / axis.extent
                    options.append((weight * sum(costs) / width * padded + FOLDED, axis.name, width))
            if not options:
                return math.inf, {}
            cost, axis_name, width = min(options)
            total += cost
            found[name] = axis_name, width
        return total, found

    def alike(self) -> list[list[Compute]]:
        """The reductions by the loops that they share."""
        groups = defaultdict[tuple[int, ...], list[Compute]](list)
        for c in self.reducers.values():
            groups[tuple(r.extent for r in c.reduce)].append(c)
        return list(groups.values())

    # --- counting ---------------------------------------------------------------------------------

    def count(self, box: Sequence[int], device_lanes: int) -> Counts:
        """What a nest over a box of these extents does."""
        found = Counts()
        if 0 in box:
            return found
        extents = self.joined(box)
        lanes, points = self.lanes(extents), math.prod(extents)
        loops = [d for d, n in enumerate(extents) if n > 1 and d != lanes.axis]
        found["nested"] += (points // max(1, extents[lanes.axis]) if lanes.axis >= 0 else points) * (len(loops) > 1)
        if lanes.axis >= 0:
            self._rows(found, extents, lanes, device_lanes)
        elif lanes.columns:
            self._alone(found, "", points)
            found["element_store"] += points * len(self.stores)
            for group in self.alike():
                self._walked(found, group, points, lanes.columns[group[0].name], device_lanes)
        else:
            self._alone(found, "", points)
            found["element_store"] += points * len(self.stores)
            for c in self.reducers.values():
                self._alone(found, c.name, points * self.taps(c.name))
        return found

    def _rows(self, found: Counts, extents: Sequence[int], lanes: Lanes, device_lanes: int) -> None:
        """Vectors along an axis of the nest."""
        d, width = lanes.axis, lanes.width
        rows = math.prod(extents) // extents[d]
        vectors = rows * -(-extents[d] // width)
        found["loop"] += rows
        apart = [(r, r.steps[d] if f"x{d}" in r.axes else 0) for r in self.reads]
        self._vector(found, "", vectors, apart, width / device_lanes)
        for s in self.stores:
            found["store" if s[d] == 1 else "element_store"] += vectors if s[d] == 1 else vectors * width
        for group in self.alike():
            steps = vectors * self.taps(group[0].name)
            found["loop"] += steps // max(1, group[0].reduce[-1].extent)
            self._together(found, group, steps, apart, width / device_lanes)
            self._strides(found, group, steps)

    def _strides(self, found: Counts, group: Iterable[Compute], steps: int) -> None:
        """Steps of loops across what is read: those that go from page to page, and from line to line."""
        seen = set[tuple[str, int]]()
        for c in group:
            for r in self.reads:
                far = abs(r.taps.get(c.reduce[-1].name) or 0) * r.size if r.reducer == c.name else 0
                if far >= LINES and (r.tensor, far) not in seen:
                    seen.add((r.tensor, far))
                    found["page" if far >= PAGE else "line"] += steps

    def _walked(self, found: Counts, group: Sequence[Compute], points: int, along: tuple[str, int], device_lanes: int) -> None:
        """Vectors along an axis of the reductions of one loop, and what they leave over."""
        (name, width), c = along, group[0]
        extent = next(r.extent for r in c.reduce if r.name == name)
        loops = points * (self.taps(c.name) // extent)
        found["loop"] += loops * (1 + (extent % width > 0))
        found["fold"] += points * sum(COMBINES.get(str(other.combiner), ONE)[0] for other in group)
        apart = [(r, r.taps.get(name, 0)) for r in self.reads]
        self._together(found, group, loops * (extent // width), apart, width / device_lanes)
        for other in group:
            self._alone(found, other.name, loops * (extent % width))

    def _together(
        self, found: Counts, group: Iterable[Compute], steps: int, apart: Sequence[tuple[NestRead, int | None]], share: float
    ) -> None:
        """So many steps of a loop that some reductions share: each waits for its own step before."""
        for c in group:
            self._vector(found, c.name, steps, apart, share)
        combines = [COMBINES.get(str(c.combiner), ONE) for c in group]
        found["operation"] += round(steps * sum(n for n, _ in combines) * max(1.0, share))
        found["wait"] += steps * max(n for _, n in combines)

    def _vector(
        self, found: Counts, reducer: str, count: int, apart: Iterable[tuple[NestRead, int | None]], share: float
    ) -> None:
        """One body for so many vectors, each of ``share`` of the widest."""
        parts = max(1.0, share)
        for r, far in apart:
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
                found["function"] += round(count * (1 + share) / 2 * work.functions)  # half of it waits, in short vectors too

    def _alone(self, found: Counts, reducer: str, count: int) -> None:
        """One body for so many elements; those of a reduction are combined."""
        found["element_load"] += count * sum(r.reducer == reducer for r in self.reads)
        found["element"] += count * sum(w.cheap for w in self.work if w.reducer == reducer)
        found["element_step"] += count * COMBINES.get(str(self.reducers[reducer].combiner), ONE)[0] if reducer else 0
        found["element_quotient"] += count * sum(w.quotients for w in self.work if w.reducer == reducer)
        found["element_function"] += count * sum(w.functions for w in self.work if w.reducer == reducer)


def nests_of(operator: ROperator, binding: Binding, target: CTarget) -> Iterator[CountedNest]:
    """The nests of an operator's tasks, in order. What tasks keep has the strides that it had as a whole."""
    kept = {e.producer for e in operator.connections if e.layer == "veu"}
    inlined = {c.name: c for c in operator.computes if c.name not in kept}
    stored = {n: _place(n, binding) for n in (*operator.inputs, *operator.outputs, *sorted(kept))}
    unit = FunctionContext(target, binding.types, inlined, stored, {})
    for c in (c for c in operator.computes if c.name in kept):
        yield CountedNest(unit, (c,))
    last = tuple(c for c in operator.computes if c.name in operator.outputs and c.name not in kept)
    if last:
        yield CountedNest(unit, last)


def _place(tensor: str, binding: Binding) -> Place:
    kind, storage = binding.types[tensor], binding.storages.get(tensor)
    return Place("", kind.dtype, storage.strides if storage is not None else row_major(kind.shape), (), kind.shape)
