"""Loop nests: the code of one stage, by one thread in vectors or by many threads with a stride.

Several elements are computed together if they share loads (*blocking*): each shared element is then loaded once for all of them,
and their sums do not wait for each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rammer.codegen.collapse_axes import collapse_axes
from rammer.codegen.context import FunctionContext, Place
from rammer.codegen.cooperate import THREADS, Group, SharedReduction
from rammer.codegen.lanes import ColumnBlock, LaneBlock
from rammer.codegen.scalar import Block
from rammer.codegen.stage_layout import Stage, needed_reductions, read_through
from rammer.codegen.symbolic_bounds import fold
from rammer.codegen.vector_rows import LaneAxis, choose_row_plan, whole_rows
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load, Ref, integer

#: A condition on a point: axis number, comparison, bound.
Test = tuple[int, str, Expr]


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of one Compute of a stage, and the tests that a point must pass first."""

    place: Place
    tests: tuple[Test, ...] = ()


@dataclass
class Nest:
    """The loop nest of ``stage``; ``targets`` lists the destinations of each of its Computes."""

    unit: FunctionContext
    stage: Stage
    targets: Sequence[tuple[Compute, Sequence[Target]]]
    shared: Sequence[SharedReduction] = ()
    names: list[str] = field(init=False)
    blocking: dict[int, int] = field(default_factory=dict)
    shift: list[int] = field(default_factory=list)
    turned: tuple[Load, ...] = ()

    def __post_init__(self) -> None:
        self._merge_axes()
        self.names = [f"x{d}" for d in range(len(self.stage.box))]
        for name, axis in zip(self.names, self.stage.root.axes, strict=True):
            self.unit.ranges[name] = (0, max(axis.extent - 1, 0))

    def _merge_axes(self) -> None:
        """Join axes unless a test distinguishes them."""
        written = [t for _, targets in self.targets for t in targets]
        if any(t.tests for t in written):
            return
        self.stage = collapse_axes(self.unit, self.stage, [t.place for t in written])
        self.targets = [(c, t) for c, (_, t) in zip(self.stage.computes, self.targets, strict=True)]

    def emit(self, body: Block) -> None:
        """Append the nest to ``body``."""
        if 0 in self.stage.extents:
            return
        single = self.unit.target.single
        places = [t.place for _, targets in self.targets for t in targets]
        roots = {
            head.name: head for c, _ in self.targets for head, _ in needed_reductions(self.unit.inlined, c, _output_point(c))
        }
        limit = 4 if single else math.prod(self.stage.extents) // THREADS
        plan = choose_row_plan(self.unit, self.stage, list(roots.values()), places, limit, axes=1 if single else 2)
        self.blocking, self.unit.columns, self.unit.unrolled = plan.blocking, plan.columns, plan.unrolled
        self.turned = plan.turned
        row = plan.row.axis if plan.row is not None else -1
        self.shift = [self._block_distance(d, plan.row) for d in range(len(self.names))]
        for d, block in self.blocking.items():
            last = self.stage.root.axes[d].extent - 1
            self.unit.ranges[self.names[d]] = (0, last - (block - 1) * self.shift[d])
        inner = ColumnBlock(self.unit, body)
        if single:
            self._emit_loops(inner, [d for d in range(len(self.names)) if d != row], plan.row)
        else:
            self._emit_strided(inner)
        body.lines += ["{", *(f"  {text}" for text in inner.lines), "}"]

    def _block_distance(self, d: int, row: LaneAxis | None) -> int:
        """Return the distance along axis ``d`` between elements of one block."""
        if row is not None and d == row.axis:
            return row.width
        # Neighbouring threads compute neighbouring elements, so that they read neighbouring addresses together.
        return 1 if self.unit.target.single else self.stage.extents[d] // self.blocking.get(d, 1)

    # --- one thread ---------------------------------------------------------------------------

    def _bound_texts(self, body: Block, d: int) -> tuple[str, str]:
        bound = self.stage.box[d]
        return body.value(bound.low).text, body.value(bound.high).text

    def _emit_loops(self, body: Block, order: list[int], row: LaneAxis | None) -> None:
        if not order:
            if row is None:
                self._emit_elements(body)
            else:
                self._emit_row(body, row)
            return
        d = order[0]
        if self.stage.extents[d] == 1:
            kind = self.unit.axis_type(self.stage.root.axes[d].extent)
            body.line(f"const {kind} {self.names[d]} = {self._bound_texts(body, d)[0]};")
            self._emit_loops(body, order[1:], row)
            return
        block, extent, (low, high) = self.blocking.get(d, 1), self.stage.root.axes[d].extent, self._bound_texts(body, d)
        uneven = block > 1 and self.stage.extents[d] % block
        at = self.unit.fresh("n") if uneven else self.names[d]
        with body.nest(body.loop(at, low, high, extent, block)) as inner:
            if uneven:  # the last block begins earlier, and writes some elements again
                inner.line(f"const {self.unit.axis_type(extent)} {self.names[d]} = rm_min_i32({at}, {high} - {block});")
            self._emit_loops(inner, order[1:], row)

    def _emit_row(self, body: Block, row: LaneAxis) -> None:
        """Write vectors along the lane axis; the last one is shifted back to end on the edge of the box."""
        lane, extent = self.names[row.axis], self.stage.root.axes[row.axis].extent
        low, high = self._bound_texts(body, row.axis)
        if row.exact and row.interior is None:
            step = row.width * self.blocking.get(row.axis, 1)
            with body.nest(body.loop(lane, low, high, extent, step)) as inner:
                self._emit_vector(inner, row)
            return
        if row.certain:
            self._emit_vectors(body, row)
            return
        with body.nest(f"if ({high} - {low} >= {row.width})") as wide:
            self._emit_vectors(wide, row)
        with body.nest("else") as narrow, narrow.nest(narrow.loop(lane, low, high, extent)) as scalars:
            self._emit_elements(scalars)

    def _emit_vectors(self, body: Block, row: LaneAxis) -> None:
        """Write vectors over a box at least one vector wide; vectors that touch padding test their lanes."""
        lane, extent, width = self.names[row.axis], self.stage.root.axes[row.axis].extent, row.width
        low, high = self._bound_texts(body, row.axis)
        if row.open:
            bound = self.stage.box[row.axis]
            high = body.let(body.value(fold("max", bound.high, ex.make_add(bound.low, width)))).text
        ends = [body.let(body.value(e)).text for e in row.interior or ()]
        at = self.unit.fresh("n")
        with body.nest(body.loop(at, low, high, extent, width)) as inner:
            # Computing some lanes twice is cheaper than a scalar remainder, and stores the same values.
            inner.line(f"const {self.unit.axis_type(extent)} {lane} = rm_min_i32({at}, {high} - {width});")
            if row.interior is None:
                self._emit_vector(inner, row)
                return
            with inner.nest(f"if ({lane} >= {ends[0]} && {lane} + {width} <= {ends[1]})") as inside:
                self._emit_vector(inside, row)
            self._emit_edge(inner, row)

    def _emit_edge(self, body: Block, row: LaneAxis) -> None:
        """Write vectors that meet padding: loaded whole and masked if that stays inside the tensors' memory."""
        bounds: list[tuple[Expr, Expr, int]] = []
        if self.unit.unrolled:
            # One test for all loads keeps written-out windows short. A sum over channels reaches from the first to the last, and
            # would fail it in every border row: there each load has a separate test.
            bounds = whole_rows(self.unit, self.stage, row, self.blocking, self.shift)
        if not bounds:
            with body.nest("else") as edge:
                self._emit_vector(edge, row, padded=True)
            return
        tests = [f"{body.value(low).text} >= 0 && {body.value(high).text} < {reach}" for low, high, reach in bounds]
        with body.nest(f"else if ({' && '.join(tests)})") as edge:
            self._emit_vector(edge, row, padded=True, whole=True)
        lane, extent = self.names[row.axis], self.stage.root.axes[row.axis].extent
        unrolled, self.unit.unrolled = self.unit.unrolled, frozenset()
        with body.nest("else") as few:
            start = self.unit.fresh("n")
            few.line(f"const {self.unit.axis_type(extent)} {start} = {lane};")
            with few.nest(few.loop(lane, start, f"{start} + {row.width}", extent)) as scalars:
                self._emit_elements(scalars)
        self.unit.unrolled = unrolled

    def _emit_vector(self, body: Block, row: LaneAxis, padded: bool = False, whole: bool = False) -> None:
        lane = self.names[row.axis]
        block = LaneBlock(self.unit, body, lane=lane, width=row.width, padded=padded, whole=whole)
        for load in self.turned:
            block.turn(load, next(self.names[d] for d in self.blocking))
        self._emit_elements(block)
        body.lines += block.lines

    # --- many threads -------------------------------------------------------------------------

    def _emit_strided(self, body: Block) -> None:
        """Write the box's elements, each thread every ``threads``-th."""
        target = self.unit.target
        sizes = [n // self.blocking.get(d, 1) for d, n in enumerate(self.stage.extents)]
        group = Group(self.unit, math.prod(sizes), self.shared)
        group.declare(body)
        for number, part in enumerate(self.shared):
            count = math.prod(sizes) * part.parts
            with body.nest(f"for (int t = {target.thread}; t < {count}; t += {target.threads})") as inner:
                inner.line(f"const int u = t / {part.parts};")
                self._decode_element(inner, sizes)
                group.know(inner, number, "u")
                group.partial(inner, number, f"t % {part.parts}", "t")
            body.line(target.barrier)
            group.tree(body, number)
        with body.nest(f"for (int u = {target.thread}; u < {math.prod(sizes)}; u += {target.threads})") as inner:
            self._decode_element(inner, sizes)
            group.know(inner, len(self.shared), "u")
            self._emit_elements(inner)

    def _decode_element(self, body: Block, sizes: list[int]) -> None:
        """Decode the axes of element ``u``; elements outside the task's box are skipped."""
        tests, step, count = [], math.prod(sizes), math.prod(sizes)
        for d, (name, size) in enumerate(zip(self.names, sizes, strict=True)):
            step //= size
            kind = self.unit.axis_type(self.stage.root.axes[d].extent)
            body.line(f"const {kind} {name} = {self._axis_text(body, d, size, step, step * size == count)};")
            bound = self.stage.box[d]
            if fold("sub", bound.high, bound.low) != integer(self.stage.extents[d]):
                tests.append(f"{name} >= {body.value(bound.high).text}")
        if tests:
            body.line(f"if ({' || '.join(tests)}) continue;")

    def _axis_text(self, body: Block, d: int, size: int, step: int, first: bool) -> str:
        """Return the text of axis ``d`` of element ``u``."""
        low = body.value(self.stage.box[d].low).text
        if size == 1:
            return low
        place = f"u / {step}" if step > 1 else "u"
        if not first:
            place = f"({place}) % {size}" if step > 1 else f"u % {size}"
        return place if low == "0" else f"{low} + {place}"

    # --- elements -----------------------------------------------------------------------------

    def _emit_elements(self, body: Block) -> None:
        """Compute and store every Compute of the stage at one point (or row), or at a block of them."""
        steps = [range(0, self.blocking.get(d, 1) * self.shift[d], self.shift[d]) for d in range(len(self.names))]
        points: list[tuple[Expr, ...]] = [
            tuple(ex.make_add(n, k) for n, k in zip(self.names, shift, strict=True)) for shift in itertools.product(*steps)
        ]
        self._reduce_together(body, points)
        for point in points:
            for c, targets in self.targets:
                key = Load(c.name, point)
                value = body.known(key) or body.inline(c, point)
                body.memo[key] = value
                for target in targets:
                    tests = [(point[d], f"{sign} {body.value(e).text}") for d, sign, e in target.tests]
                    body.store(target.place, point, value, tests)

    def _reduce_together(self, body: Block, points: list[tuple[Expr, ...]]) -> None:
        """Interleave the reductions that the points need, so that they share loops and loads. They are one reduction at several
        points, or several reductions over the same elements."""
        found: dict[str, tuple[Compute, list[tuple[Expr, ...]]]] = {}
        for point in points:
            for c, _ in self.targets:
                for head, indices in needed_reductions(self.unit.inlined, c, point):
                    _, places = found.setdefault(head.name, (head, []))
                    at = Load(head.name, indices)
                    places += [indices] if indices not in places and body.known(at) is None and body.sums(at) else []
        wanted = [(c, places) for c, places in found.values() if places]
        if len(points) == 1 and len(wanted) < 2:
            return
        while wanted:
            first = wanted[0]
            together = [w for w in wanted if w is first or self._has_same_loops(first[0], w[0])]
            body.reduce_at(together)
            wanted = [w for w in wanted if w not in together]

    def _has_same_loops(self, a: Compute, b: Compute) -> bool:
        """Return True if two reductions run over the same elements, to the same bound, and neither needs the other first."""
        extents = [tuple((r.extent, self.unit.end(c, r)) for r in c.reduce) for c in (a, b)]
        columns = [self.unit.columns.get(c.name) for c in (a, b)]
        places = [
            None if k is None else ([r.name for r in c.reduce].index(k.axis), k.width)
            for c, k in zip((a, b), columns, strict=True)
        ]
        alike = (
            extents[0] == extents[1]
            and places[0] == places[1]
            and (a.name in self.unit.unrolled) == (b.name in self.unit.unrolled)
        )
        return alike and not self._has_dependence(a, b.name) and not self._has_dependence(b, a.name)

    def _has_dependence(self, c: Compute, name: str) -> bool:
        """Return True if ``c`` reads ``name``, directly or through producers computed in place."""
        return name in read_through(self.unit.inlined, [c])


def _output_point(c: Compute) -> tuple[Expr, ...]:
    return tuple(Ref(f"x{d}") for d in range(len(c.axes)))
