"""ROperator and RKernel: a group of connected Computes over one grid of equal, independent tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

from rammer.ir.compute import Axis, Box, Compute, load_box
from rammer.ir.device import Scope
from rammer.ir.expr import Interval, Load
from rammer.ir.extent import Point, ReduceBound, SkipTasks
from rammer.ir.names import check_identifier
from rammer.ir.types import TensorType

__all__ = ["Connection", "RKernel", "ROperator", "Resources", "Written"]

#: Name of the generic kernel family in texts.
GENERIC: Final = "generic"
#: Scratch tiles start at multiples of this many bytes, the widest vector load.
TILE_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of producer and consumer at a memory layer, named by its scope (``device`` = not fused, ``thread`` = the
    consumer computes the producer in place; at all others, the task holds the producer's tile)."""

    producer: str
    consumer: str
    layer: Scope

    @property
    def holds_tile(self) -> bool:
        """True if the task holds the producer's tile at this layer."""
        return self.layer not in ("host", "device", "thread")

    def __str__(self) -> str:
        return f"{self.producer} <{self.layer}> {self.consumer}"


@dataclass(frozen=True)
class ROperator:
    """A group of connected Computes with a tile: ``task_count`` independent tasks (Rammer, figure 6).

    ``tile`` is the number of elements per task along each output axis of the anchor, the last Compute. The tasks partition
    every output. Most outputs have the anchor's shape. Others (rows and their reduction) share only some axes with it. A task
    writes all of the other axes, and no tile cuts the anchor there (``uncut``). ``family`` and ``config`` are the kernel
    family of the tile; a device without that family uses its generic kernel. ``skips`` and ``reduce_bounds`` are set in ranged
    programs; skips that write no fills come first.
    """

    name: str
    computes: tuple[Compute, ...]
    connections: tuple[Connection, ...]
    outputs: tuple[str, ...]
    tile: tuple[int, ...] = ()
    family: str = ""
    config: tuple[tuple[str, int], ...] = ()
    skips: tuple[SkipTasks, ...] = ()
    reduce_bounds: tuple[ReduceBound, ...] = ()

    def __post_init__(self) -> None:
        for what, name in (("an operator", self.name), *((f"config of {self.name}", key) for key, _ in self.config)):
            check_identifier(what, name)
        check_identifier(f"family of operator {self.name}", self.family or GENERIC)
        if self.tile and len(self.tile) != len(self.anchor.axes):
            raise ValueError(f"operator {self.name}: tile {self.tile} does not fit axes {self.anchor.shape}")
        if self.anchor.name not in self.outputs:
            raise ValueError(f"operator {self.name}: its last compute {self.anchor.name} is not an output")

    @property
    def anchor(self) -> Compute:
        """The Compute whose output axes carry the task grid."""
        return self.computes[-1]

    @property
    def main(self) -> Compute:
        """The most expensive Compute: contractions before windows, reductions and maps."""
        order = {"contraction": 0, "window": 1, "reduction": 2, "map": 3}
        return min(self.computes, key=lambda c: (order[c.kind], -c.flops))

    @property
    def prologue(self) -> tuple[Compute, ...]:
        """The maps before a contraction that reads them; () if it comes first or is absent."""
        place = next((i for i, c in enumerate(self.computes) if c.combiner is not None), 0)
        return self.computes[:place] if self.computes[place].kind == "contraction" else ()

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of tiles along each output axis."""
        return tuple(-(-a.extent // t) for a, t in zip(self.anchor.axes, self.tile, strict=True))

    @cached_property
    def task_count(self) -> int:
        """Number of independent tasks."""
        return math.prod(self.grid)

    @cached_property
    def shared(self) -> dict[str, tuple[int | None, ...]]:
        """The anchor axis of each output axis, or None if every task writes the whole axis."""
        shapes = {c.name: c.shape for c in self.computes}
        return {n: shared_axes(shapes[n], self.anchor.shape) for n in self.outputs if n in shapes}

    @cached_property
    def uncut(self) -> frozenset[int]:
        """The anchor axes, by position, that some output lacks: a tile covers them whole."""
        axes = range(len(self.anchor.axes))
        return frozenset(d for d in axes if any(d not in own for own in self.shared.values()))

    @property
    def even(self) -> bool:
        """True if all outputs are cut like the anchor."""
        axes = tuple(range(len(self.anchor.axes)))
        return all(own == axes for own in self.shared.values())

    def tiled_as(self, other: ROperator) -> ROperator:
        """Return this operator with the tile and kernel of an equal one, or itself if they are the same."""
        same = (self.tile, self.family, self.config) == (other.tile, other.family, other.config)
        return self if same else replace(self, tile=other.tile, family=other.family, config=other.config)

    def part(self, output: str, box: Box) -> Box:
        """Return the part of ``output`` that a task with the anchor's ``box`` writes."""
        extents = self._uneven_shapes.get(output)
        if extents is None:
            return box
        return tuple(box[d] if d is not None else (0, n) for d, n in zip(self.shared[output], extents, strict=True))

    @cached_property
    def _uneven_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs that are cut differently from the anchor."""
        axes = tuple(range(len(self.anchor.axes)))
        return {c.name: c.shape for c in self.computes if self.shared.get(c.name, axes) != axes}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Tensors read from outside, in order of first use."""
        inside = {c.name for c in self.computes}
        return tuple(dict.fromkeys(r for c in self.computes for r in c.reads if r not in inside))

    @property
    def holds_operand(self) -> bool:
        """True if a contraction reads a tile that its task holds on chip."""
        contractions = {c.name for c in self.computes if c.kind == "contraction"}
        return any(e.holds_tile and e.consumer in contractions for e in self.connections)

    @cached_property
    def held(self) -> Mapping[str, Scope]:
        """The layers of the tiles that a task holds, by Compute."""
        return {e.producer: e.layer for e in self.connections if e.holds_tile}

    @property
    def flops(self) -> int:
        """Floating-point operations of all tasks."""
        return sum(c.flops for c in self.computes)

    def has_chain(self, kinds: Container[str]) -> bool:
        """Return True if a Compute of one of ``kinds`` reads a result of another one, directly or through others."""
        after = set[str]()  # Computes of these kinds, and those that read one
        for c in self.computes:
            reads = not after.isdisjoint(c.reads)
            if reads and c.kind in kinds:
                return True
            if reads or c.kind in kinds:
                after.add(c.name)
        return False

    def task_box(self, index: int) -> Box:
        """Return the half-open output box of task ``index`` (row-major over ``grid``), clipped to the shape."""
        box = []
        for axis, tile, count in reversed(list(zip(self.anchor.axes, self.tile, self.grid, strict=True))):
            index, place = divmod(index, count)
            box.append((place * tile, min((place + 1) * tile, axis.extent)))
        return tuple(reversed(box))

    @property
    def lengths(self) -> tuple[str, ...]:
        """The scalar tensors of its masks and reduction bounds, in order of first use."""
        extents = (*(e.extent for e in self.skips), *(s.extent for s in self.reduce_bounds))
        return tuple(dict.fromkeys(name for extent in extents for name, _ in extent.terms))

    def at(self, point: Point) -> ROperator:
        """Return this operator with dynamic axes shrunk to the lengths in ``point``, by scalar tensor. Task numbering changes,
        and elements past the lengths are undefined."""
        if not self.skips and not self.reduce_bounds:
            return self
        ends = {(self.anchor.name, e.axis): e.extent for e in self.skips if not e.before}
        ends |= {(s.compute, s.axis): s.extent for s in self.reduce_bounds}

        def cut(c: Compute, axis: Axis) -> Axis:
            end = ends.get((c.name, axis.name))
            return axis if end is None else Axis(axis.name, max(1, min(axis.extent, end.at(point))))

        computes = tuple(
            replace(c, axes=tuple(cut(c, a) for a in c.axes), reduce=tuple(cut(c, r) for r in c.reduce)) for c in self.computes
        )
        return self.shorter(computes, self.tile)

    def shorter(self, computes: tuple[Compute, ...], tile: tuple[int, ...]) -> ROperator:
        """Return the operator with shorter ``computes`` and without endings; tasks cut its results along the same axes."""
        made = replace(self, computes=computes, tile=tile, skips=(), reduce_bounds=())
        made.__dict__["shared"] = self.shared
        return made

    def inner_box(self) -> Box:
        """Return the output box of a full tile in the middle; unlike the first one, padding does not clip it."""
        return inner_box(self.anchor.shape, self.tile)

    def boxes(self, output: Box, types: Mapping[str, TensorType]) -> dict[str, Box]:
        """Return the box of every tensor that is read or computed for an output box (backward tile propagation). A tensor read by
        several loads gets the hull of their boxes. The boxes of single loads come from ``rammer.ir.compute.read_boxes``."""
        result: dict[str, Box] = {name: self.part(name, output) for name in self.outputs}
        for name, axes, fixed, loads in self._propagation_steps:
            own = result.get(name)
            if own is None:
                continue
            bounds: dict[str, Interval] = {a: (lo, hi - 1) for a, (lo, hi) in zip(axes, own, strict=True)}
            bounds.update(fixed)
            for load in loads:
                box = load_box(load, bounds, types[load.tensor].shape)
                known = result.get(load.tensor)
                result[load.tensor] = box if known is None else box_hull(known, box)
        return result

    @cached_property
    def _propagation_steps(self) -> list[tuple[str, list[str], dict[str, Interval], tuple[Load, ...]]]:
        """The input of ``boxes`` for each Compute, last first: name, output axes, bounds of reduction axes, loads."""
        return [
            (c.name, [a.name for a in c.axes], {r.name: (0, r.extent - 1) for r in c.reduce}, c.loads)
            for c in reversed(self.computes)
        ]

    def tiled(self, tile: tuple[int, ...]) -> ROperator:
        """Return the operator with another tile of equal rank, without repeating the checks of names."""
        if len(tile) != len(self.anchor.axes):
            raise ValueError(f"operator {self.name}: tile {tile} does not fit axes {self.anchor.shape}")
        made = object.__new__(ROperator)
        kept = {name: value for name, value in self.__dict__.items() if name not in ("grid", "task_count")}
        made.__dict__.update(kept, tile=tile)
        return made

    def renamed(self, name: str) -> ROperator:
        """Return the operator under another name."""
        return replace(self, name=name)

    def head(self) -> str:
        """Return one line: name, tile, and kernel family with its config. A generic family is named only if it has a config."""
        config = "".join(f" {k}={v}" for k, v in self.config)
        family = f" family {self.family or GENERIC}{config}" if self.family or config else ""
        tile = ", ".join(f"{a.name}={t}" for a, t in zip(self.anchor.axes, self.tile, strict=True))
        return f"operator {self.name} tile[{tile}]{family}"

    def __str__(self) -> str:
        lines = [self.head()]
        lines += [f"  compute {c}" for c in self.computes]
        lines += [f"  connect {c}" for c in self.connections]
        lines.append(f"  writes {', '.join(self.outputs)}")
        lines += [f"  skip {e}" for e in self.skips]
        lines += [f"  reduce_bound {s}" for s in self.reduce_bounds]
        return "\n".join(lines)


def shared_axes(shape: tuple[int, ...], anchor: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the axes that a result shares with the anchor. At equal rank these are the axes of equal extent, by position.
    Otherwise they are the leading axes of equal extent."""
    same = [d < len(anchor) and anchor[d] == n for d, n in enumerate(shape)]
    if len(shape) != len(anchor):
        same = [all(same[: d + 1]) for d in range(len(shape))]
    return tuple(d if common else None for d, common in enumerate(same))


def inner_box(shape: tuple[int, ...], tile: tuple[int, ...]) -> Box:
    """Return the box of a full tile in the middle of ``shape``."""
    box = []
    for extent, size in zip(shape, tile, strict=True):
        low = -(-extent // size) // 2 * size
        if low and low + size > extent:
            low -= size
        box.append((low, low + size if low + size < extent else extent))
    return tuple(box)


def box_hull(a: Box, b: Box) -> Box:
    """Return the smallest box that contains both; an empty box contributes nothing."""
    if any(lo >= hi for lo, hi in a):
        return b
    if any(lo >= hi for lo, hi in b):
        return a
    return tuple((min(p[0], q[0]), max(p[1], q[1])) for p, q in zip(a, b, strict=True))


def last_readers(operator: ROperator, staged: Sequence[str]) -> list[int]:
    """Return, for each tile in ``staged`` (Computes in program order), the position of the last stage that reads it, directly or
    through Computes that are computed in place: that of another tile, or their number for the stages of results."""
    inlined = {c.name: c for c in operator.computes if c.name not in staged}
    place = {name: k for k, name in enumerate(staged)}
    found = [-1] * len(staged)
    for c in operator.computes:
        if c.name in place or c.name in operator.outputs:
            seen, waiting = set[str](), [c]
            while waiting:
                new = set(waiting.pop().reads) - seen
                seen |= new
                waiting += [inlined[name] for name in new if name in inlined]
            for name in seen & place.keys():
                found[place[name]] = max(found[place[name]], place.get(c.name, len(staged)))
    return found


def place_tiles(sizes: Sequence[int], last: Sequence[int]) -> list[int]:
    """Return the byte offset of each tile of a task in scratch memory: first fit among the tiles alive at the same time. ``last``
    are the stages that read them last (``last_readers``); a tile that no stage reads has offset 0."""
    alive, result = list[tuple[int, int, int]](), list[int]()  # (offset, end, last reading stage)
    for k, (size, final) in enumerate(zip(sizes, last, strict=True)):
        alive = [a for a in alive if a[2] >= k]
        offset = 0
        for begin, end, _ in sorted(alive):
            if offset + size <= begin:
                break
            offset = max(offset, -(-end // TILE_ALIGNMENT) * TILE_ALIGNMENT)
        if final >= 0:
            alive.append((offset, offset + size, final))
        result.append(offset)
    return result


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a vEU that one task needs; -1 if the compiler does not report them (shown as -1). ``registers`` are per
    thread; ``scalar_registers`` are shared by a wavefront (AMD: VGPR and SGPR)."""

    threads: int = 1
    registers: int = -1
    local_bytes: int = 0
    spills: int = -1
    scalar_registers: int = -1


class Written(NamedTuple):
    """A kernel's text, and the resources of one task as far as they follow from the text."""

    text: str
    needs: Resources


@dataclass(frozen=True)
class RKernel:
    """An ROperator with its source for one device, resources and task times (seconds).

    ``write`` is called when text or resources are first needed, since most candidates are only priced. It raises DeviceFailure if
    the kernel is unsupported. ``alone`` is the time of one task on an otherwise idle device, ``crowded`` that of one task with
    every vEU running it. ``origin`` is the source of the times: ``cost model``, ``measured`` or ``simulated``. ``compiled`` holds
    the resources that the device's compiler reported. ``spread`` is the number of vEUs that one task occupies.
    """

    operator: ROperator
    write: Callable[[], Written] = field(repr=False, compare=False)
    alone: float = 0.0
    crowded: float = 0.0
    origin: str = "cost model"
    compiled: Resources | None = None
    spread: int = 1

    @cached_property
    def _written_kernel(self) -> Written:
        return self.write()

    @property
    def source(self) -> str:
        """The source text in the device's language."""
        return self._written_kernel.text

    @property
    def resources(self) -> Resources:
        """The resources of one task: those compiled, else those estimated from the text."""
        return self.compiled or self._written_kernel.needs

    def task_time(self, busy: float) -> float:
        """Return the task time with the fraction ``busy`` (0..1) of vEUs occupied, interpolated."""
        return self.alone + (self.crowded - self.alone) * min(max(busy, 0.0), 1.0)

    def made_for(self, operator: ROperator) -> RKernel:
        """Return the kernel for an equal operator."""
        return replace(self, operator=operator.tiled_as(self.operator))

    @property
    def shares(self) -> int:
        """The number of vEUs that all tasks would occupy at once."""
        return self.operator.task_count * self.spread

    def busy_time(self) -> float:
        """Return the vEU seconds of all tasks together, with every vEU busy."""
        return self.shares * self.crowded

    def operator_time(self, veus: int) -> float:
        """Return seconds for all tasks spread over ``veus`` units, without launch cost. The time is at least that of one task
        alone, whose latency busy units hide."""
        rounds = -(-self.shares // veus)
        return max(rounds * self.task_time(min(1.0, self.shares / veus)), self.alone if rounds else 0.0)
