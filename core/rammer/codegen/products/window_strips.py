"""Windows on groups of threads: pooling and depthwise convolution, a strip of neighbouring outputs per thread.

A thread keeps in registers every input that its ``high x wide`` outputs share. A 5 by 5 window thus loads 40 elements for a
column of 4 outputs instead of 100. Neighbouring threads have neighbouring outputs: columns, or channels of a channels-last image.
There a thread may have ``deep`` channels of float16, which it loads and stores as words.
Weights are loaded before the kernel waits for others. The core's emitter writes all expressions, including the following maps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from rammer.codegen.products.ring_cost import Processor
from rammer.codegen.products.strips import Frame, Strips, contiguous_tile, moved_bytes
from rammer.codegen.scalar import preload_elements, stored_loads
from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, contraction_operands, identity_load
from rammer.ir.expr import Expr, Load, integer
from rammer.ir.operator import ROperator

Code = TypeVar("Code")
#: Threads that are scheduled together.
WARP = 32
#: The most channels of a thread.
DEEPEST = 8
#: Elements of float16 that a thread loads at a time, beside those of one line of a warp.
WORD_LINE = 2.0
#: Maximum values of one window that are unrolled, and of a thread's whole strip.
MOST_TAPS, MOST_WRITTEN = 128, 640
#: Strips (outputs along the last two axes) and outputs of a task that are tried, and the maximum threads of its block.
STRIPS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (7, 1), (8, 1))
SIZES = (64, 128, 256, 512, 1024, 2048)
MOST_THREADS = 256
#: Registers for weights loaded before the wait.
AHEAD = 64


@dataclass(frozen=True)
class Window:
    """A short reduction with maps over its shape. ``high`` and ``wide`` are the positions of the axes that a strip runs along;
    ``high`` is None if only one slides. ``order`` has the axes as the result is stored, the innermost last; it is () if that is
    their own order. ``deep`` is the most channels of a thread."""

    operator: ROperator
    main: Compute
    after: tuple[Compute, ...]
    high: int | None
    wide: int
    order: tuple[int, ...] = ()
    deep: int = 1

    @property
    def taps(self) -> int:
        """Values that one output combines."""
        return math.prod(r.extent for r in self.main.reduce)


def window_of(operator: ROperator, binding: Binding) -> Window:
    """Return the window form of an operator. Raises Unsuited with the reason if it does not apply."""
    main, after = operator.computes[0], operator.computes[1:]
    taps = math.prod(r.extent for r in main.reduce)
    if not main.reduce or 0 in main.shape or not 1 <= taps <= MOST_TAPS:
        raise Unsuited("no short reduction")
    operands = contraction_operands(main)
    live = {a.name for a in main.axes if a.extent > 1}
    if operands is not None:
        sides = [ex.axes_of(ld) & live for ld in operands]
        if not (sides[0] <= sides[1] or sides[1] <= sides[0]):
            raise Unsuited("a product of two matrices")
    elif main.kind != "window":
        raise Unsuited("no window")
    known = {main.name}
    for c in after:
        if c.reduce or c.shape != main.shape or any(ld.tensor in known and not identity_load(ld, c) for ld in c.loads):
            raise Unsuited(f"{c.name} is not a map over the shape of {main.name}")
        known.add(c.name)
    sliding = [d for d, a in enumerate(main.axes) if a.extent > 1 and _is_sliding_axis(main, a.name)]
    if not sliding:
        raise Unsuited("no axis slides")
    order = _stored_order(main, binding.storages[operator.outputs[-1]].strides)
    found = Window(operator, main, after, sliding[-2] if len(sliding) > 1 else None, sliding[-1], order)
    return replace(found, deep=_most_channels(found, binding))


def _most_channels(w: Window, binding: Binding) -> int:
    """Return the most neighbouring channels of float16 that are aligned words in the result and all inputs but constants."""
    if not w.order or w.order[-1] in (w.high, w.wide):
        return 1
    tensors = [n for n in (*w.operator.inputs, *w.operator.outputs) if n not in binding.constants]
    if any(binding.types[n].dtype != "float16" for n in tensors):
        return 1
    steps = [x for n in tensors for x in binding.storages[n].strides if x != 1]
    offsets = [binding.storages[n].offset for n in (*w.operator.inputs, *w.operator.outputs)]
    return math.gcd(DEEPEST, w.main.shape[w.order[-1]], *steps, *offsets)


def _stored_order(main: Compute, strides: Sequence[int]) -> tuple[int, ...]:
    """Return the axes by descending strides of the result, or () if that is their order."""
    live = [d for d, a in enumerate(main.axes) if a.extent > 1]
    found = sorted(live, key=lambda d: -abs(strides[d]))
    return () if found == live else (*(d for d in range(len(main.axes)) if d not in live), *found)


def _is_sliding_axis(main: Compute, axis: str) -> bool:
    """Return True if an index moves with ``axis`` and with a reduction axis."""
    over = {r.name for r in main.reduce}
    return any(axis in ex.axes_of(i) and over & ex.axes_of(i) for ld in main.loads for i in ld.indices)


def strips_of(w: Window) -> Strips:
    """Return the strips of a tiled operator, one per thread."""
    config, size = dict(w.operator.config), [1] * len(w.main.axes)
    for d, name in ((w.high, "high"), (w.wide, "wide"), (w.order[-1] if w.order else None, "deep")):
        if d is not None and name in config:
            size[d] = config[name]
    return Strips(w.operator, tuple(size), w.order)


class WindowWriter(Generic[Code]):
    """A writer of the kernel of tiled windows in ``frame``, of a group that has ``thread_count`` threads or more."""

    def __init__(self, w: Window, frame: Frame[Code]) -> None:
        self.w, self.strips, self.frame = w, strips_of(w), frame
        if not self.strips.fits or self.strips.each * w.taps > MOST_WRITTEN:
            raise Unsuited(f"strips of {self.strips.sizes} windows of {w.taps} in {w.main.shape}")
        self.frame.unit.unrolled = frozenset((w.main.name,))

    def kernel(self) -> Code:
        """Return the finished kernel text."""
        f, count = self.frame, self.strips.count
        if count > f.threads:
            f.line("rm_after();")
            outer = f.block
            with outer.nest(f"for (int u = tid; u < {count}; u += {f.threads})") as f.block:
                self._write_strip("u", [], early=False)
            f.block = outer
        elif count < f.threads:
            self._write_strip(f"min(tid, {count - 1})", [f"tid < {count}"], early=True)
        else:
            self._write_strip("tid", [], early=True)
        return f.kernel("w_")

    def _write_strip(self, number: str, inside: list[str], early: bool) -> None:
        """Write all outputs of strip ``number``; with ``early``, constants may be loaded before ``rm_after``."""
        f, main = self.frame, self.w.main
        f.line("// This thread's strip of outputs.")
        points = self.strips.points(self.strips.base(f, number))
        loads = list(dict.fromkeys(ld for p in points for ld in self._output_loads(p)))
        ahead = f.constants(loads)
        f.line("// All that its windows read; constants before the wait for earlier kernels.")
        if early:
            if len(ahead) <= AHEAD * dict(self.w.operator.config).get("deep", 1):
                self.preload(ahead)
            f.line("rm_after();")
        self.preload(loads)
        f.line("// Windows, maps and stores.")
        f.block.reduce_at([(main, points)])
        for point in points:
            tests = " && ".join((*inside, *self.strips.own(f, point)))
            for name in self.w.operator.outputs:
                self.store(name, point, tests)

    def preload(self, loads: Sequence[Load]) -> None:
        """Load elements into variables."""
        preload_elements(self.frame.block, loads)

    def store(self, name: str, point: tuple[Expr, ...], tests: str) -> None:
        """Write the store of one output under ``tests``."""
        value = self.frame.block.unrounded(Load(name, point))
        with self.frame.block.nest(f"if ({tests})" if tests else "") as scope:
            scope.store(self.frame.places[name], point, value, ())

    def _output_loads(self, point: tuple[Expr, ...]) -> Iterator[Load]:
        main, inlined = self.w.main, self.frame.unit.inlined
        axes = dict(zip((a.name for a in main.axes), point, strict=True))
        for taps in itertools.product(*(range(r.extent) for r in main.reduce)):
            over = {r.name: integer(t) for r, t in zip(main.reduce, taps, strict=True)}
            yield from stored_loads(ex.substitute(main.body, {**axes, **over}), inlined)
        for name in self.w.operator.outputs:
            yield from stored_loads(Load(name, point), inlined)


def thread_count(w: Window) -> int:
    """Return the threads of the group of tiled windows: whole warps."""
    return min(MOST_THREADS, -(-strips_of(w).count // WARP) * WARP)


# --- choice -------------------------------------------------------------------------------------

#: Cycles from a launch to the last store of an empty strip, of launching one more block, of one more strip of a thread, of a
#: value that it combines, and, of a warp on its scheduler, of each 128 bytes that it loads and of any other instruction. Fitted
#: to 616 kernels of the zoo's models on an H200: the measured time over the predicted has a standard deviation of 0.10.
START, BLOCK, ROUND, CHAIN, LINE, ISSUE = 890, 0.75, 407, 4.1, 2.45, 1.36


def window_tilings(w: Window, unit: Processor, deeps: Sequence[int] = (1,)) -> Iterator[Window]:
    """Yield every strip in tiles of every size; ``deeps`` are the numbers of channels of a thread."""
    for (high, wide), deep in itertools.product(STRIPS, [n for n in deeps if w.deep % n == 0]):
        config = (("high", high), ("wide", wide), *([("deep", deep)] * (deep > 1)))
        for tile in sorted({_tile_shape(w, high, wide, deep, size) for size in SIZES}):
            here = replace(w, operator=replace(w.operator, tile=tile, family="window", config=config))
            if (w.high is not None or high == 1) and _is_supported(here):
                yield here


def _is_supported(w: Window) -> bool:
    strips = strips_of(w)
    return strips.fits and strips.each * w.taps <= MOST_WRITTEN and strips.count <= 4 * MOST_THREADS


def _tile_shape(w: Window, high: int, wide: int, deep: int, size: int) -> tuple[int, ...]:
    """Return a contiguous tile of about ``size`` outputs in whole strips."""
    strips = {w.wide: wide, w.high: high}
    if deep > 1:
        strips[w.order[-1]] = deep
    if not w.order:
        return contiguous_tile(w.main.shape, size, [strips.get(d, 1) for d in range(len(w.main.shape))])
    grid = [-(-w.main.shape[d] // strips.get(d, 1)) for d in w.order]
    found = dict(zip(w.order, contiguous_tile(grid, -(-size // (high * wide * deep))), strict=True))
    return tuple(min(extent, found[d] * strips.get(d, 1)) for d, extent in enumerate(w.main.shape))


def window_seconds(w: Window, binding: Binding, unit: Processor) -> float:
    """Return the predicted seconds of all tasks, without the launch."""
    operator = w.operator
    strips, clock = strips_of(w), unit.model_clock
    threads, deep = thread_count(w), dict(operator.config).get("deep", 1)
    lines = deep if deep == 1 else deep / WORD_LINE
    loads, values = _distinct_loads(w.main, strips.sizes) / deep * lines, strips.each * w.taps
    after = sum(ex.count_flops(c.body) + 2 * len(c.loads) + 1 for c in w.after)
    rounds = -(-strips.count // threads)
    busy = rounds * threads / WARP * -(-operator.task_count // unit.sms) / 4
    cycles = START + BLOCK * operator.task_count + rounds * CHAIN * values + (rounds - 1) * ROUND
    cycles += busy * (LINE * loads * _input_stride(w, strips) + ISSUE * (values + strips.each * (after + 4)))
    return max(cycles / clock, moved_bytes(operator, binding) / unit.bandwidth)


def _input_stride(w: Window, strips: Strips) -> int:
    """Return the elements from one thread's input to its neighbour's: along the innermost sliding axis, or 1 along another."""
    if w.order and w.order[-1] != w.wide:
        return 1
    axis = w.main.axes[w.wide].name
    forms = [form for ld in w.main.loads for i in ld.indices if (form := ex.affine_form(i)) is not None]
    return strips.sizes[w.wide] * max((abs(form[0].get(axis, 0)) for form in forms), default=1)


@lru_cache(4096)
def _distinct_loads(main: Compute, strip: tuple[int, ...]) -> int:
    """Return the number of distinct elements that a strip's windows read, weights included."""
    found: set[tuple[object, ...]] = set()
    names = [a.name for a in main.axes]
    for shift in itertools.product(*(range(s) for s in strip)):
        here = dict(zip(names, ((i, i) for i in shift), strict=True))
        for taps in itertools.product(*(range(r.extent) for r in main.reduce)):
            here |= {r.name: (t, t) for r, t in zip(main.reduce, taps, strict=True)}
            found |= {(ld.tensor, *(ex.interval(i, here) for i in ld.indices)) for ld in main.loads}
    return len(found)
