"""Reductions that a group of threads computes together.

A stage with few elements and long reductions (softmax rows, global pooling) would leave most threads idle.
Instead ``parts`` threads share each element: each combines every ``parts``-th value, and a tree
combines their results in scratch memory. The order never depends on the
number of threads, so results repeat bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rammer.codegen import operations as ops
from rammer.codegen.context import FunctionContext
from rammer.codegen.operations import Val
from rammer.codegen.scalar import Block
from rammer.codegen.stage_layout import Layout, Stage, needed_reductions, scratch_of
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Ref
from rammer.ir.operator import TILE_ALIGNMENT
from rammer.ir.types import itemsize

#: Threads that a stage should keep busy.
THREADS = 256
#: Minimum number of values that one thread combines, so that the tree does not cost more than it saves.
_LEAST = 4


@dataclass(frozen=True, slots=True)
class SharedReduction:
    """A reduction at ``indices`` by ``parts`` threads per element, in scratch from byte ``offset``."""

    compute: Compute
    indices: tuple[Expr, ...]
    parts: int
    offset: int


def find_shared_reductions(inlined: Mapping[str, Compute], stage: Stage, offset: int) -> tuple[SharedReduction, ...]:
    """Return the reductions of ``stage`` worth sharing, with scratch areas from ``offset``; () if threads are busy without."""
    count = math.prod(stage.extents)
    if not 0 < count <= THREADS // 2:
        return ()
    point = tuple(Ref(f"x{d}") for d in range(len(stage.box)))
    found = {(h.name, i): h for c in stage.computes for h, i in needed_reductions(inlined, c, point)}
    result = []
    for (_, indices), c in found.items():
        most = min(THREADS // count, math.prod(r.extent for r in c.reduce) // _LEAST)
        if most < 2:
            continue
        parts = 1 << (most.bit_length() - 1)
        offset = -(-offset // TILE_ALIGNMENT) * TILE_ALIGNMENT
        result.append(SharedReduction(c, indices, parts, offset))
        offset += count * parts * partial_bytes(c)
    return tuple(result)


def partial_bytes(c: Compute) -> int:
    """Return the bytes of one partial result."""
    return itemsize(ops.compute_type(c.dtype))


def scratch_with_partials(layout: Layout, inlined: Mapping[str, Compute]) -> int:
    """Return the bytes of scratch memory of all tiles and, after them, of the largest partial results of a stage."""
    tiles = scratch_of(layout.stages)["veu"]
    ends = [tiles]
    for stage in layout.stages:
        count = math.prod(stage.extents)
        ends += [s.offset + count * s.parts * partial_bytes(s.compute) for s in find_shared_reductions(inlined, stage, tiles)]
    return max(ends)


@dataclass(frozen=True, slots=True)
class Group:
    """Emitter of the shared reductions of a stage of ``count`` elements."""

    unit: FunctionContext
    count: int
    parts: Sequence[SharedReduction]

    def pointer(self, number: int) -> str:
        """Return the name of a reduction's scratch area."""
        return f"g{number}"

    def declare(self, body: Block) -> None:
        """Declare pointers to the scratch areas."""
        target = self.unit.target
        for number, part in enumerate(self.parts):
            kind = ops.spell_type(target, ops.compute_type(part.compute.dtype))
            spelling = f"{target.local} {kind}".strip()
            body.line(f"{spelling} *{self.pointer(number)} = ({spelling} *)(scratch + {part.offset});")

    def know(self, body: Block, upto: int, element: str) -> None:
        """Provide ``body`` with the results of the first ``upto`` reductions for element number ``element``."""
        for number, part in enumerate(self.parts[:upto]):
            text = f"{self.pointer(number)}[{element} * {part.parts}]"
            body.memo[ex.Load(part.compute.name, part.indices)] = Val(text, part.compute.dtype, atom=True)

    def partial(self, body: Block, number: int, share: str, slot: str) -> None:
        """Write this thread's part of a reduction into its slot."""
        part = self.parts[number]
        c = part.compute
        axes = dict(zip((a.name for a in c.axes), part.indices, strict=True))
        total = body.accumulator(c, axes)
        names: dict[str, Expr] = {r.name: Ref(self.unit.fresh("r")) for r in c.reduce}
        points = math.prod(r.extent for r in c.reduce)
        end, below = self.unit.end(c, c.reduce[0]), points // max(c.reduce[0].extent, 1)
        last = str(points) if end.isdigit() else f"{end} * {below}" if below > 1 else end
        with body.nest(f"for (int f = {share}; f < {last}; f += {part.parts})") as inner:
            step = points
            for r in c.reduce:
                step //= r.extent
                self.unit.ranges[str(names[r.name])] = (0, max(r.extent - 1, 0))
                inner.line(f"const int {names[r.name]} = f / {step} % {r.extent};")
                if r is not c.reduce[0] and not (stop := self.unit.end(c, r)).isdigit():
                    inner.line(f"if ({names[r.name]} >= {stop}) continue;")
            inner.walk([(c, [(total.text, {**axes, **names})])], [])
        body.line(f"{self.pointer(number)}[{slot}] = {total.text};")

    def tree(self, body: Block, number: int) -> None:
        """Combine the partial results of every element pairwise."""
        part, target, g = self.parts[number], self.unit.target, self.pointer(number)
        with body.nest(f"for (int s = {part.parts // 2}; s > 0; s /= 2)") as level:
            head = f"for (int t = {target.thread}; t < {self.count} * s; t += {target.threads})"
            with level.nest(head) as inner:
                inner.line(f"const int at = t / s * {part.parts} + t % s;")
                other = Val(f"{g}[at + s]", ops.compute_type(part.compute.dtype))
                inner.line(ops.combine_value(target, part.compute, f"{g}[at]", other))
            level.line(target.barrier)
