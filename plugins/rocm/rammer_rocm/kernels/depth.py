"""How a task walks the depth of its sums: axis by axis, less what lies in the padding, or in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rammer.codegen.c_text import Text
from rammer.codegen.partial_sums import block_sizes, write_in_blocks
from rammer.codegen.task_parameters import Unsuited

from rammer_rocm.kernels.contraction import PanelProduct
from rammer_rocm.kernels.skipping import Skip

#: Steps of inner reduction axes that are unrolled: all taps of a 3 x 3 window.
UNROLLED = 9


@dataclass(frozen=True, slots=True)
class AxisWalk:
    """A reduction axis from ``first`` to before ``end`` (C texts); ``chunk``: what is gathered begins there, too."""

    first: str
    end: str
    chunk: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        """Where a loop begins and ends."""
        return self.first, self.end


@dataclass(frozen=True, slots=True)
class Loop:
    """Joined reduction axes: ``extent`` steps of ``a`` and ``b`` elements in the operands, of which ``walk`` are made, at most
    ``most`` at a time (0: all)."""

    extent: int
    a: int
    b: int
    walk: AxisWalk
    most: int = 0

    @property
    def whole(self) -> bool:
        """Whether every step is made, so that their number is known."""
        return self.walk == AxisWalk("0", str(self.extent))

    def within(self, k: str) -> str:
        """How far the loop's variable is from where what is gathered begins."""
        return f"({k} - {self.walk.first})" if self.walk.chunk else k


def join_loops(axes: Sequence[tuple[str, int, int, int]], walks: Mapping[str, AxisWalk]) -> list[Loop]:
    """Join neighbouring reduction axes (name, extent, step of A, step of B) wherever both steps allow it and the inner one is
    walked whole."""
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
    """Write the loops ``k0``, ``k1``, ... over joined axes, in blocks of the accumulators and their type ``sums``, around what
    ``body`` writes."""
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
    """``skips`` are taps that a task may leave out; of the outermost axis ``steps`` are gathered and multiplied at a time (0:
    all), and sums wait in memory for the next ones. Axes that are ``stopped`` end at a length of the run, ``hi_{axis}``."""

    p: PanelProduct
    skips: tuple[Skip, ...] = ()
    steps: int = 0
    stopped: tuple[str, ...] = ()

    @property
    def outer(self) -> str:
        """The axis that is cut into chunks."""
        return next((r.name for r in self.p.main.reduce if r.extent > 1), "")

    @property
    def walks(self) -> dict[str, AxisWalk]:
        """The axes that are not walked whole."""
        found = {axis: AxisWalk("0", f"hi_{axis}") for axis in self.stopped}
        found |= {s.tap: AxisWalk(f"lo_{s.tap}", f"hi_{s.tap}") for s in self.skips}
        return found | ({self.outer: AxisWalk("q", "q_end", chunk=True)} if self.steps else {})

    @property
    def gathered(self) -> int:
        """Positions in K that are gathered at a time."""
        return self.p.depth // self.p.extent[self.outer] * self.steps if self.steps else self.p.depth

    @property
    def left(self) -> float:
        """The mean share of the products that tasks have left."""
        share = 1.0
        for s in self.skips:
            share *= s.share(self.p.tile[s.axis])
        return share

    def ends(self) -> Iterator[str]:
        """What says which taps are left."""
        for s in self.skips:
            low, high = s.text(f"o_{s.axis}", f"e_{s.axis}")
            yield f"const int lo_{s.tap} = {low}, hi_{s.tap} = {high};"

    def begin(self) -> Iterator[str]:
        """The loop over chunks, in which register tiles are counted."""
        if self.steps:
            if not self.outer:
                raise Unsuited("nothing to cut into chunks")
            extent = self.p.extent[self.outer]
            yield f"for (int q = 0; q < {extent}; q += {self.steps}) {{"
            yield f"const int q_end = min(q + {self.steps}, {extent});"
            yield "int next = 0;"

    def chunked(self, steps: int) -> PanelDepth:
        """The same in chunks of so many steps."""
        return replace(self, steps=steps)
