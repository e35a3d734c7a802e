"""Staging of a convolution's input once for all taps: a block of channels under a task's tile, with its halo.

The implicit product of the other stages copies the same elements again for every tap of the window. Here the rows and columns of
the image under the tile's windows are copied once, including zeros for padding. A thread reads an element of tap (i, j) at an
offset of (i, j) steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rammer.codegen import Operand, Product, Side, Text, Unsuited, format_sum, sides_of, split_digits, weighted_terms
from rammer.codegen.products import Depth, Piece, Staged, Staging
from rammer.device.manifest import Binding
from rammer.ir import expr as ex

from rammer_cuda.contraction.prologue import OperandPrologue
from rammer_cuda.contraction.staging import HALVES


def checked_sides(stage: Staged, binding: Binding) -> tuple[Side, ...]:
    """Return the dimensions of an operand that tile axes or taps index. Raise Unsuited unless the operand has taps, each in a
    separate dimension with at most one tile axis. The channels must index another dimension alone."""
    p, operand, depth = stage.p, stage.operand, stage.depth
    if depth.flat or not depth.outer:
        raise Unsuited("no taps")
    taps, tiled = {a.name: a.extent for a in depth.outer}, {p.axis(d).name: p.operator.tile[d] for d in stage.axes}
    strides, shape = binding.storages[operand.tensor].strides, binding.types[operand.tensor].shape
    found = tuple(sides_of(operand.load, tiled, taps, strides, shape))
    for side in found:
        several = len(side.taps) > 1 or len(side.axes) > 1 or depth.inner.name in side.steps
        if several or any(side.steps[a] < 1 for a in (*side.axes, *side.taps)):
            raise Unsuited(f"{operand.load} mixes the window's axes")
    prologue = operand.prologue
    if prologue is not None and any(ex.axes_of(operand.load.indices[d]) & taps.keys() for d in prologue.dimensions):
        raise Unsuited("maps that depend on the tap")
    used = [a for index in operand.load.indices for a in ex.axes_of(index)]
    if len(used) != len(set(used)):
        raise Unsuited(f"{operand.load} uses an axis twice")
    if {s.tap for s in found if s.tap} != set(taps) or {s.axis for s in found if s.axis} != set(tiled):
        raise Unsuited("an axis has no dimension")
    return found


@dataclass
class InputHalo:
    """A writer of the copies of an operand's halo and of the addresses at which fragments read it. ``name`` prefixes its
    variables."""

    name: str
    p: Product
    operand: Operand
    axes: tuple[int, ...]
    depth: Depth
    threads: int
    sides: tuple[Side, ...]
    #: Channels whose copies are unrolled; 0 for all of a block: faster, with more registers for addresses.
    unroll: int = 0

    @property
    def unit(self) -> int:
        """The elements of one channel's halo."""
        return math.prod(s.length for s in self.sides)

    @property
    def pitch(self) -> int:
        """The elements from one channel to the next: 8 (mod 16), so that lanes of different channels read different banks."""
        return self.unit + (8 - self.unit) % 16

    @property
    def taps(self) -> int:
        """The taps of the window."""
        return math.prod(a.extent for a in self.depth.outer)

    def setup(self, text: Text) -> None:
        """Write per-thread offsets and validity of the elements that a thread copies, for one channel."""
        n, across = self.name, min(self.unit, self.threads)
        self.lanes = self.threads // across
        self.groups = -(-self.unit // across)
        text.line(f"const int {n}k = tid / {across};")
        self._define_elements(text, lambda g: f"tid % {across}" + (f" + {g * across}" if g else ""), across)

    def _define_elements(self, text: Text, place: Callable[[int], str], across: int) -> None:
        """Write the offset and the validity of this thread's elements, of ``across`` that all threads copy at a time."""
        n = self.name
        fixed = {p.name: f"o{d}" for d, p in enumerate(self.p.main.axes)}
        inside = {a for s in self.sides for a in s.steps}
        rest = {a: s for a, s in self.operand.steps.items() if a not in inside and a != self.depth.inner.name}
        for g in range(self.groups):
            text.line(f"const int {n}j{g} = {place(g)};")
            tests = [f"{n}j{g} < {self.unit}"] if (g + 1) * across > self.unit else []
            offset = weighted_terms(rest, fixed)
            for i, (side, digit) in enumerate(
                zip(self.sides, split_digits(f"{n}j{g}", [s.length for s in self.sides]), strict=True)
            ):
                origin = format_sum(
                    [*weighted_terms({a: s for a, s in side.steps.items() if a != side.tap}, fixed), (digit, 1)], side.constant
                )
                text.line(f"const int {n}y{g}_{i} = {origin};")
                tests.append(f"(unsigned){n}y{g}_{i} < {side.extent}u")
                offset.append((f"{n}y{g}_{i}", side.stride))
            constant = self.operand.constant - sum(s.constant * s.stride for s in self.sides)
            text.line(f"const int {n}o{g} = {format_sum(offset, constant)};")
            text.line(f"const bool {n}v{g} = {' && '.join(tests)};")

    def fetch(self, text: Text) -> None:
        """Write the copies of channels ``c0`` to ``c0 + block`` into ``{n}s``."""
        n, step = self.name, self.operand.steps.get(self.depth.inner.name, 0)
        self._define_destinations(text)
        text.all(f"const float *const {n}at{g} = {n}g + ({n}o{g} + (c0 + {n}k) * {step});" for g in range(self.groups))
        with self._rows(text):
            for g, tests, valid in self._thread_elements():
                guard = f"if ({' && '.join(tests)}) " if tests else ""
                text.line(
                    f"{guard}rm_copy4({self._destination_address(g)}, {n}at{g} + i * {self.lanes * step}, {' && '.join(valid)});"
                )

    def apply(self, text: Text, prologue: OperandPrologue) -> None:
        """Write the prologue on this thread's copies of these channels. Call it after its copies have arrived."""
        names = {self.depth.inner.name: "(c0 + k)"}
        self._define_destinations(text)
        with self._rows(text):
            prologue.apply(
                text,
                (Piece(self._destination_address(g), [*tests, *valid], names, 1) for g, tests, valid in self._thread_elements()),
            )

    def _define_destinations(self, text: Text) -> None:
        """Write the destinations of a thread's first channel; other channels are at constant offsets."""
        n = self.name
        text.all(f"float *const {n}to{g} = {n}s + {n}k * {self.pitch} + {n}j{g};" for g in range(self.groups))

    def _destination_address(self, group: int) -> str:
        """Return the destination of an element of channel ``k``."""
        return f"{self.name}to{group} + i * {self.lanes * self.pitch}"

    @contextmanager
    def _rows(self, text: Text) -> Iterator[None]:
        """Write the loop over the channels ``k`` that a thread copies."""
        text.line(f"#pragma unroll {self.unroll or ''}".rstrip())
        with text.block(f"for (int i = 0; i < {-(-self.depth.block // self.lanes)}; ++i)"):
            text.line(f"const int k = {self.name}k + i * {self.lanes};")
            yield

    def _thread_elements(self) -> Iterator[tuple[int, list[str], list[str]]]:
        """Yield the elements that a thread copies of channel ``k``: number, ownership tests, and bounds tests."""
        n, deep, across = self.name, self.depth.block, min(self.unit, self.threads)
        tests = [f"k < {deep}"] if deep % self.lanes else []
        tests += [f"{n}k < {self.lanes}"] if across * self.lanes < self.threads else []
        channel = [f"c0 + k < {self.depth.inner.extent}"] if self.depth.inner.extent % deep else []
        for g in range(self.groups):
            more = [f"{n}j{g} < {self.unit}"] if (g + 1) * across > self.unit else []
            yield g, [*tests, *more], [f"{n}v{g}", *channel]

    def place(self, element: str) -> str:
        """Return the offset of tap 0 of the tile's element number ``element`` in a channel's halo."""
        tiles = [self.p.operator.tile[d] for d in self.axes]
        names = {self.p.axis(d).name: t for d, t in zip(self.axes, split_digits(element, tiles), strict=True)}
        return format_sum([(f"({names[s.axis]} * {s.step})", below) for s, below in self._side_strides() if s.axis])

    def tap(self, tap: str) -> str:
        """Return the offset of tap number ``tap`` from tap 0."""
        names = {
            a.name: t for a, t in zip(self.depth.outer, split_digits(tap, [a.extent for a in self.depth.outer]), strict=True)
        }
        return format_sum([(names[s.tap], s.reach * below) for s, below in self._side_strides() if s.tap])

    def _side_strides(self) -> list[tuple[Side, int]]:
        result, below = list[tuple[Side, int]](), 1
        for s in reversed(self.sides):
            result.append((s, below))
            below *= s.length
        return result


@dataclass
class ChannelsHalo(InputHalo):
    """A halo of float16 in channels-last order, ``[positions][channels]``. Each copy is of 16 bytes, and rows of ldmatrix are
    positions, which need not be neighbours."""

    @property
    def lots(self) -> int:
        """The copies of a position's channels."""
        return self.depth.block // self.staging.products

    @property
    def pitch(self) -> int:
        """The elements from one position to the next: an odd number of 16 bytes, so that rows lie in different banks."""
        return self.depth.block + self.staging.products

    @property
    def size(self) -> int:
        """The elements of a block of channels."""
        return self.unit * self.pitch

    staging: Staging = HALVES

    def setup(self, text: Text) -> None:
        n, lots, lot = self.name, self.lots, self.staging.products
        text.line(f"const int {n}k = tid % {lots} * {lot}, {n}j = tid / {lots};")
        self.lanes = self.threads // lots
        self.groups = -(-self.unit // self.lanes)
        self._define_elements(text, lambda g: f"{n}j + {g * self.lanes}" if g else f"{n}j", self.lanes)

    def fetch(self, text: Text) -> None:
        n, deep = self.name, self.depth.inner.extent
        text.line(f"unsigned short *const {n}to = {n}s + {n}j * {self.pitch} + {n}k;")
        text.line(f"const unsigned short *const {n}at = {n}g + c0 + {n}k;")
        for g in range(self.groups):
            guard = f"if ({n}j{g} < {self.unit}) " if (g + 1) * self.lanes > self.unit else ""
            valid = [f"{n}v{g}"] + ([f"c0 + {n}k < {deep}"] if deep % self.depth.block else [])
            text.line(f"{guard}rm_copy16({n}to + {g * self.lanes * self.pitch}, {n}at + {n}o{g}, {' && '.join(valid)});")


def channels_halo_of(stage: Staged, binding: Binding) -> ChannelsHalo:
    """Return the channels-last halo of a staged operand. Raise Unsuited for an operand without one."""
    if not stage.deep or stage.products != HALVES.products or stage.depth.block % HALVES.products:
        raise Unsuited("channels that are not copied 16 bytes at a time")
    known = stage.name, stage.p, stage.operand, stage.axes, stage.depth, stage.threads
    return ChannelsHalo(*known, checked_sides(stage, binding))


def halo_of(stage: Staged, binding: Binding) -> InputHalo:
    """Return the halo of a staged operand. Raise Unsuited for an operand without a halo."""
    return InputHalo(stage.name, stage.p, stage.operand, stage.axes, stage.depth, stage.threads, checked_sides(stage, binding))
