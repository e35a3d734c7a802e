"""Loop nests: the code of one stage, by one thread in vectors or by many threads in turn.

Several elements are computed together where they share loads (*blocking*): each shared element is then
loaded once for all of them, and their sums do not wait for each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rammer.codegen.bounds import fold
from rammer.codegen.lanes import LaneBlock
from rammer.codegen.layout import Stage
from rammer.codegen.rows import Row, choose_blocking, choose_row
from rammer.codegen.scalar import Block
from rammer.codegen.unit import Place, Unit
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load, integer

#: A condition on a point: axis variable and text.
Test = tuple[str, str]
#: Threads that should find work in a stage before their elements are blocked.
_THREADS = 256


@dataclass(frozen=True, slots=True)
class Target:
    """Where one Compute of a stage is written, and which tests a point must pass first."""

    place: Place
    tests: Callable[[Block, Sequence[Expr]], list[Test]]


@dataclass
class Nest:
    """The code of ``stage``; ``targets`` lists where each of its Computes is written."""

    unit: Unit
    stage: Stage
    targets: Sequence[tuple[Compute, Sequence[Target]]]
    names: list[str] = field(init=False)
    blocking: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = [f"x{d}" for d in range(len(self.stage.box))]
        for name, axis in zip(self.names, self.stage.root.axes, strict=True):
            self.unit.ranges[name] = (0, max(axis.extent - 1, 0))

    def emit(self, body: Block) -> None:
        """Append the nest to ``body``."""
        if 0 in self.stage.extents:
            return
        places = [t.place for _, targets in self.targets for t in targets]
        single = self.unit.target.single
        row = choose_row(self.unit, self.stage, places) if single else None
        last = next((d for d in reversed(range(len(self.names))) if self.stage.extents[d] > 1), -1)
        fixed = row.axis if row is not None else last
        limit = 4 if single else math.prod(self.stage.extents) // _THREADS
        self.blocking = choose_blocking(self.unit, self.stage, fixed, limit, axes=1 if single else 2)
        for d, block in self.blocking.items():
            self.unit.ranges[self.names[d]] = (0, self.stage.root.axes[d].extent - block)
        with body.nest("") as inner:
            self._nest(inner, row, single)

    def _nest(self, body: Block, row: Row | None, single: bool) -> None:
        if single:
            self._loops(body, [d for d in range(len(self.names)) if row is None or d != row.axis], row)
        else:
            self._strided(body)

    # --- one thread ---------------------------------------------------------------------------

    def _ends(self, body: Block, d: int) -> tuple[str, str]:
        bound = self.stage.box[d]
        return body.value(bound.low).text, body.value(bound.high).text

    def _loops(self, body: Block, order: list[int], row: Row | None) -> None:
        if not order:
            if row is None:
                self._elements(body)
            else:
                self._row(body, row)
            return
        d = order[0]
        if self.stage.extents[d] == 1:
            body.line(
                f"const {self.unit.axis_type(self.stage.root.axes[d].extent)} {self.names[d]} = {self._ends(body, d)[0]};"
            )
            self._loops(body, order[1:], row)
            return
        head = body.loop(
            self.names[d], *self._ends(body, d), self.stage.root.axes[d].extent, self.blocking.get(d, 1)
        )
        with body.nest(head) as inner:
            self._loops(inner, order[1:], row)

    def _row(self, body: Block, row: Row) -> None:
        """The lane axis: vectors, the last one shifted back to end on the edge of the box."""
        lane, extent = self.names[row.axis], self.stage.root.axes[row.axis].extent
        low, high = self._ends(body, row.axis)
        if row.exact and row.interior is None:
            with body.nest(body.loop(lane, low, high, extent, row.width)) as inner:
                self._vector(inner, row)
            return
        if row.certain:
            self._vectors(body, row)
            return
        with body.nest(f"if ({high} - {low} >= {row.width})") as wide:
            self._vectors(wide, row)
        with body.nest("else") as narrow, narrow.nest(narrow.loop(lane, low, high, extent)) as scalars:
            self._elements(scalars)

    def _vectors(self, body: Block, row: Row) -> None:
        """Vectors over a box at least one vector wide; those that touch padding test their lanes."""
        lane, extent, width = self.names[row.axis], self.stage.root.axes[row.axis].extent, row.width
        low, high = self._ends(body, row.axis)
        ends = [body.let(body.value(e)).text for e in row.interior or ()]
        at = self.unit.fresh("n")
        with body.nest(body.loop(at, low, high, extent, width)) as inner:
            # Computing some lanes twice is cheaper than a scalar remainder, and stores the same values.
            inner.line(f"const {self.unit.axis_type(extent)} {lane} = rm_min_i32({at}, {high} - {width});")
            if row.interior is None:
                self._vector(inner, row)
                return
            with inner.nest(f"if ({lane} >= {ends[0]} && {lane} + {width} <= {ends[1]})") as inside:
                self._vector(inside, row)
            with inner.nest("else") as edge:
                self._vector(edge, row, padded=True)

    def _vector(self, body: Block, row: Row, padded: bool = False) -> None:
        block = LaneBlock(self.unit, body, lane=self.names[row.axis], width=row.width, padded=padded)
        self._elements(block)
        body.lines += block.lines

    # --- many threads -------------------------------------------------------------------------

    def _strided(self, body: Block) -> None:
        """The box's elements in turn, each thread every ``threads``-th."""
        target = self.unit.target
        sizes = [n // self.blocking.get(d, 1) for d, n in enumerate(self.stage.extents)]
        count = math.prod(sizes)
        with body.nest(f"for (int t = {target.thread}; t < {count}; t += {target.threads})") as inner:
            tests, step = [], count
            for d, (name, size) in enumerate(zip(self.names, sizes, strict=True)):
                step //= size
                inner.line(f"const {self.unit.axis_type(self.stage.root.axes[d].extent)} {name} = "
                           f"{self._place(inner, d, size, step, step * size == count)};")  # fmt: skip
                bound = self.stage.box[d]
                if fold("sub", bound.high, bound.low) != integer(self.stage.extents[d]):
                    tests.append(f"{name} >= {inner.value(bound.high).text}")
            if tests:
                inner.line(f"if ({' || '.join(tests)}) continue;")
            self._elements(inner)

    def _place(self, body: Block, d: int, size: int, step: int, first: bool) -> str:
        """Text of axis ``d`` of element ``t``."""
        low, block = body.value(self.stage.box[d].low).text, self.blocking.get(d, 1)
        if size == 1:
            return low
        place = f"t / {step}" if step > 1 else "t"
        if not first:
            place = f"({place}) % {size}" if step > 1 else f"t % {size}"
        if block > 1:
            place = f"({place}) * {block}"
        return place if low == "0" else f"{low} + {place}"

    # --- elements -----------------------------------------------------------------------------

    def _elements(self, body: Block) -> None:
        """Compute and store every Compute of the stage at one point (or row), or at a block of them."""
        steps = [range(self.blocking.get(d, 1)) for d in range(len(self.names))]
        points: list[tuple[Expr, ...]] = [
            tuple(ex.add(n, k) for n, k in zip(self.names, shift, strict=True))
            for shift in itertools.product(*steps)
        ]
        if len(points) > 1:
            self._reduce_together(body, points)
        for point in points:
            for c, targets in self.targets:
                key = Load(c.name, point)
                value = body.known(key) or body.inline(c, point)
                body.memo[key] = value
                for target in targets:
                    body.store(target.place, point, value, target.tests(body, point))

    def _reduce_together(self, body: Block, points: list[tuple[Expr, ...]]) -> None:
        """Interleave the reductions that the points need, so that they share loops and loads."""
        found: dict[str, tuple[Compute, list[tuple[Expr, ...]]]] = {}
        for point in points:
            for c, _ in self.targets:
                for head, indices in heads(self.unit, c, point):
                    _, places = found.setdefault(head.name, (head, []))
                    places += [indices] if indices not in places else []
        for c, places in found.values():
            body.reduce_at(c, places)


def heads(unit: Unit, c: Compute, point: tuple[Expr, ...]) -> list[tuple[Compute, tuple[Expr, ...]]]:
    """The reductions that ``c`` at ``point`` needs first: itself, or those its body reads in place."""
    if c.reduce:
        return [(c, point)]
    axes = dict(zip((a.name for a in c.axes), point, strict=True))
    result = []
    for load in ex.loads(ex.substitute(c.body, axes)):
        plain = load.fill is None and all(ex.affine(i) is not None for i in load.indices)
        if load.tensor in unit.inlined and plain:
            result += heads(unit, unit.inlined[load.tensor], load.indices)
    return result
