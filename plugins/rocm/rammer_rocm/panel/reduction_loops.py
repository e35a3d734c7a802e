"""Reduction loops of a panel task: axis by axis, without padding, or in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rammer.codegen import Text, Unsuited, block_sizes, write_in_blocks

from rammer_rocm.panel.padding_taps import Skip
from rammer_rocm.panel.recognise import PanelProduct

#: Maximum number of unrolled steps of inner reduction axes: all taps of a 3 x 3 window.
UNROLLED = 9


@dataclass(frozen=True, slots=True)
class AxisWalk:
    """A reduction axis from ``first`` (inclusive) to ``end`` (exclusive), as C texts. ``chunk``: the gathered panel begins at
    ``first`` too."""

    first: str
    end: str
    chunk: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        """The start and end of the loop."""
        return self.first, self.end


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over joined reduction axes: ``extent`` steps of ``a`` and ``b`` operand elements. The loop executes the steps in
    ``walk``, at most ``most`` at a time (0: all)."""

    extent: int
    a: int
    b: int
    walk: AxisWalk
    most: int = 0

    @property
    def whole(self) -> bool:
        """True if the loop executes every step, so that the trip count is constant."""
        return self.walk == AxisWalk("0", str(self.extent))

    def within(self, k: str) -> str:
        """Return the loop variable relative to the start of the gathered panel."""
        return f"({k} - {self.walk.first})" if self.walk.chunk else k


def join_loops(axes: Sequence[tuple[str, int, int, int]], walks: Mapping[str, AxisWalk]) -> list[Loop]:
    """Join neighbouring reduction axes (name, extent, step of A, step of B). Two axes are joined if both steps are compatible and
    the inner axis is walked whole."""
    result: list[Loop] = []
    for name, extent, a, b in axes:
        if extent == 1:
            continue
        if name not in walks and result and result[-1].a == a * extent and result[-1].b == b * extent:
            outer = result[-1]
            walk = AxisWalk(_scale_text(outer.walk.first, extent), _scale_text(outer.walk.end, extent), outer.walk.chunk)
            result[-1] = Loop(outer.extent * extent, a, b, walk)
        else:
            result.append(Loop(extent, a, b, walks.get(name, AxisWalk("0", str(extent)))))
    return result


def write_loops(
    text: Text, groups: Sequence[Loop], sums: tuple[Sequence[str], str], body: Callable[[], None], depth: int = 0
) -> None:
    """Write the loops ``k0``, ``k1``, ... over joined axes around the output of ``body``. The loops are blocked by the
    accumulators and their type, ``sums``."""
    if depth == len(groups):
        body()
        return
    loop, inner = groups[depth], groups[depth:]
    taps = depth and all(g.whole for g in inner) and math.prod(g.extent for g in inner) <= UNROLLED

    def walk(first: str, end: str) -> None:
        text.all(["__attribute__((opencl_unroll_hint))"] if taps else [])
        with text.block(f"for (int k{depth} = {first}; k{depth} < {end}; ++k{depth})"):
            write_loops(text, groups, sums, body, depth + 1)

    sizes = block_sizes(loop.most or loop.extent, math.prod(g.extent for g in inner[1:]))
    write_in_blocks(text, *sums, sizes, loop.walk.ends, walk)


def _scale_text(text: str, factor: int) -> str:
    return str(int(text) * factor) if text.isdigit() else f"({text} * {factor})"


@dataclass(frozen=True, slots=True)
class PanelDepth:
    """The reduction loops of a panel product.

    ``skips`` are taps that a task may skip. ``steps`` of the outermost axis are gathered and multiplied at a time (0: all); sums
    are stored in memory between chunks. Axes in ``stopped`` end at a run-time length, ``hi_{axis}``."""

    p: PanelProduct
    skips: tuple[Skip, ...] = ()
    steps: int = 0
    stopped: tuple[str, ...] = ()

    @property
    def outer(self) -> str:
        """The axis that is split into chunks."""
        return next((r.name for r in self.p.main.reduce if r.extent > 1), "")

    @property
    def walks(self) -> dict[str, AxisWalk]:
        """The axes that are not walked whole."""
        found = {axis: AxisWalk("0", f"hi_{axis}") for axis in self.stopped}
        found |= {s.tap: AxisWalk(f"lo_{s.tap}", f"hi_{s.tap}") for s in self.skips}
        return found | ({self.outer: AxisWalk("q", "q_end", chunk=True)} if self.steps else {})

    @property
    def gathered(self) -> int:
        """Number of K positions gathered at a time."""
        return self.p.depth // self.p.extent[self.outer] * self.steps if self.steps else self.p.depth

    @property
    def left(self) -> float:
        """The mean fraction of products that remain after skipping."""
        share = 1.0
        for s in self.skips:
            share *= s.share(self.p.tile[s.axis])
        return share

    def ends(self) -> Iterator[str]:
        """Yield the definitions of the remaining tap ranges."""
        for s in self.skips:
            low, high = s.text(f"o_{s.axis}", f"e_{s.axis}")
            yield f"const int lo_{s.tap} = {low}, hi_{s.tap} = {high};"

    def begin(self) -> Iterator[str]:
        """Yield the start of the loop over chunks, with the counter of register tiles."""
        if self.steps:
            if not self.outer:
                raise Unsuited("nothing to cut into chunks")
            extent = self.p.extent[self.outer]
            yield f"for (int q = 0; q < {extent}; q += {self.steps}) {{"
            yield f"const int q_end = min(q + {self.steps}, {extent});"
            yield "int next = 0;"

    def chunked(self, steps: int) -> PanelDepth:
        """Return this walk in chunks of ``steps`` steps."""
        return replace(self, steps=steps)
