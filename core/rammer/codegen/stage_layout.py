"""The layout of a task: stages, their boxes, and the on-chip memory they share.

A *stage* is one loop nest. Producers connected at layer ``thread`` have no stage: their consumers compute them in place. A
producer connected at any other layer has a stage over the box that its consumers read, and leaves its tile in scratch memory of
that layer. The last stages compute every other output over the part that a task writes: one stage for all outputs of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rammer.codegen.symbolic_bounds import (
    AxisBound,
    Numbers,
    Span,
    canonicalise_sum,
    clip_bounds,
    evaluate_index,
    fold,
    index_span,
    join_boxes,
)
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.device import Scope
from rammer.ir.expr import Expr, Interval, Ref, integer
from rammer.ir.extent import AffineExtent
from rammer.ir.operator import ROperator, place_tiles
from rammer.ir.types import TensorType, itemsize


@dataclass(frozen=True, slots=True)
class Stage:
    """A loop nest: the Computes it writes, its box (per axis) and the box's largest extents. ``offset`` is the byte offset of its
    tile in scratch memory of ``layer``, -1 if it writes outputs only."""

    computes: tuple[Compute, ...]
    box: tuple[AxisBound, ...]
    extents: tuple[int, ...]
    offset: int = -1
    layer: Scope = "veu"

    @property
    def root(self) -> Compute:
        """The Compute whose axes the loops run over."""
        return self.computes[-1]


@dataclass
class Layout:
    """Boxes and stages of ``operator``; ``variables`` are run-time integers in order of definition.

    With ``within``, tiles of a ranged program stop at the length, as sums always do. ``lengths`` are the variables that hold the
    extents of a run, between 1 and the value at the bound. ``ranges`` bounds every variable numerically. With ``rereads`` stages
    read a result of the task's part where it is written, not from a copy in scratch memory. ``open_ends`` are ends at a length
    past which a task may compute the rest of its tile, which nobody reads. Task origins are ``o0, o1, ...``,
    clipped tile ends ``e0, e1, ...``. The box of the staged Compute number ``j`` is ``l{j}_{axis}`` to ``h{j}_{axis}``.
    """

    operator: ROperator
    types: Mapping[str, TensorType]
    variables: dict[str, Expr] = field(default_factory=dict)
    ranges: dict[str, Interval] = field(default_factory=dict)
    within: bool = False
    lengths: dict[tuple[AffineExtent, int], str] = field(default_factory=dict)
    rereads: bool = False
    open_ends: set[Expr] = field(default_factory=set)

    def __post_init__(self) -> None:
        _check_operator(self.operator)
        self.reduce_bounds = {(s.compute, s.axis): s.extent for s in self.operator.reduce_bounds}
        self.tile = self._tile_box()

    @cached_property
    def computes(self) -> dict[str, Compute]:
        """The operator's Computes by name."""
        return {c.name: c for c in self.operator.computes}

    @cached_property
    def staged(self) -> tuple[str, ...]:
        """Computes with a scratch tile, in program order."""
        return tuple(c.name for c in self.operator.computes if c.name in self.operator.held)

    @cached_property
    def inlined(self) -> dict[str, Compute]:
        """Computes that their consumers compute in place."""
        return {n: c for n, c in self.computes.items() if n not in self.staged}

    def length(self, extent: AffineExtent, bound: int) -> Expr:
        """Return ``extent`` in a run, which is at most ``bound``."""
        name = self.lengths.setdefault((extent, bound), f"len{len(self.lengths)}")
        self.ranges[name] = (1, bound)
        return Ref(name)

    def stop(self, c: Compute, axis: Axis) -> Expr | None:
        """Return the extent at which a reduction stops before the bound, or None."""
        extent = self.reduce_bounds.get((c.name, axis.name))
        return None if extent is None or axis.extent < 2 else self.length(extent, axis.extent)

    def _tile_box(self) -> tuple[AxisBound, ...]:
        result = []
        ends = {e.axis: e.extent for e in self.operator.skips if not e.before} if self.within else {}
        # Rows past the length of a tile in scratch memory were not computed, but might be indices.
        unread = ends.keys() - {e.axis for e in self.operator.skips if e.writes or self.staged}
        for k, (axis, tile, count) in enumerate(
            zip(self.operator.anchor.axes, self.operator.tile, self.operator.grid, strict=True)
        ):
            own = ends.get(axis.name)
            last = integer(axis.extent) if own is None or axis.extent < 2 else self.length(own, axis.extent)
            if count <= 1:
                self.open_ends |= {last} if axis.name in unread else set()
                result.append(AxisBound(integer(0), last))
                continue
            self.ranges[f"o{k}"] = (0, (count - 1) * tile)
            end = canonicalise_sum(ex.make_add(f"o{k}", tile))
            if axis.extent % tile or last != integer(axis.extent):
                self.variables[f"e{k}"] = fold("min", end, last)
                self.ranges[f"e{k}"] = (1, axis.extent)
                end = Ref(f"e{k}")
                self.open_ends |= {end} if axis.name in unread and axis.extent % tile == 0 else set()
            result.append(AxisBound(Ref(f"o{k}"), end))
        return tuple(result)

    def own(self, output: str) -> tuple[AxisBound, ...]:
        """Return the box of an output that a task writes."""
        axes = zip(self.operator.shared[output], self.computes[output].axes, strict=True)
        return tuple(AxisBound(integer(0), integer(a.extent)) if d is None else self.tile[d] for d, a in axes)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages in execution order. Raises ValueError if the operator is ill-formed."""
        last = last_stages(self.operator, self.staged)
        boxes: dict[str, tuple[AxisBound, ...]] = {n: self.own(n) for n in self.staged if n in self.operator.outputs}
        for c in (c for group in last for c in group):
            self._collect_boxes(c, self.own(c.name), boxes, set())
        for number, name in reversed(list(enumerate(self.staged))):
            if name not in boxes:
                raise ValueError(f"operator {self.operator.name}: nothing reads {name}")
            boxes[name] = self._name_bounds(number, self.computes[name], boxes[name])
            self._collect_boxes(self.computes[name], boxes[name], boxes, set())
        boxes |= {group[-1].name: self.own(group[-1].name) for group in last}
        extents, groups = self._largest_extents(boxes), [*((self.computes[n],) for n in self.staged), *last]
        stages = [Stage(group, boxes[group[-1].name], extents[group[-1].name]) for group in groups]
        own = {n for n in self.staged if self.rereads and n in self.operator.outputs and boxes[n] == self.own(n)}
        return _assign_scratch(stages, [self._staged_reads(group) - own for group in groups], self.operator.held)

    def _name_bounds(self, number: int, c: Compute, box: tuple[AxisBound, ...]) -> tuple[AxisBound, ...]:
        """Name the bounds of a box, unless they are literals or names already."""
        result = []
        for d, (b, axis) in enumerate(zip(box, c.axes, strict=True)):
            ends = []
            for letter, e in (("l", b.low), ("h", b.high)):
                if not (ex.affine_form(e) is not None and len(ex.axes_of(e)) <= 1):
                    name = f"{letter}{number}_{d}"
                    self.variables[name] = e
                    self.ranges[name] = (0, axis.extent)
                    e = Ref(name)
                ends.append(e)
            result.append(AxisBound(ends[0], ends[1], b.solid))
        return tuple(result)

    def _collect_boxes(
        self,
        c: Compute,
        box: tuple[AxisBound, ...],
        boxes: dict[str, tuple[AxisBound, ...]],
        seen: set[tuple[str, tuple[AxisBound, ...]]],
    ) -> None:
        """Add to ``boxes`` the parts of every staged tensor that computing ``box`` of ``c`` reads."""
        if (c.name, box) in seen:
            return
        seen.add((c.name, box))
        axes: dict[str, Span] = {a.name: b.span for a, b in zip(c.axes, box, strict=True)}
        ends = {r.name: self.stop(c, r) or integer(r.extent) for r in c.reduce}
        axes |= {name: (integer(0), fold("sub", end, integer(1))) for name, end in ends.items()}
        for load in c.loads:
            if load.tensor not in self.computes:
                continue
            shape = self.types[load.tensor].shape
            read = tuple(clip_bounds(index_span(i, axes), n, self.ranges) for i, n in zip(load.indices, shape, strict=True))
            if load.tensor in self.inlined:
                self._collect_boxes(self.inlined[load.tensor], read, boxes, seen)
            else:
                known = boxes.get(load.tensor)
                boxes[load.tensor] = read if known is None else join_boxes(known, read)

    def _staged_reads(self, computes: Sequence[Compute]) -> set[str]:
        """Return the staged tensors that a stage reads, directly or through inlined producers."""
        return {name for name in read_through(self.inlined, computes) if name in self.computes and name not in self.inlined}

    def _largest_extents(self, boxes: Mapping[str, Sequence[AxisBound]]) -> dict[str, tuple[int, ...]]:
        """Return the largest extents of each box over all tasks, by evaluating its bounds for every tile origin."""
        values: dict[str, Numbers] = {name: np.array(self.ranges[name][1]) for name in self.lengths.values()}
        rank = len(self.operator.tile)
        for k, (tile, count) in enumerate(zip(self.operator.tile, self.operator.grid, strict=True)):
            shape = [1] * rank
            shape[k] = count
            values[f"o{k}"] = (np.arange(count, dtype=np.int64) * tile).reshape(shape)
        for name, e in self.variables.items():
            values[name] = evaluate_index(e, values)
        return {
            name: tuple(int((evaluate_index(b.high, values) - evaluate_index(b.low, values)).max(initial=0)) for b in box)
            for name, box in boxes.items()
        }


def _check_operator(operator: ROperator) -> None:
    if operator.anchor.axes and not operator.tile:
        raise ValueError(f"operator {operator.name} has no tile")
    known = {(c.producer, c.consumer) for c in operator.connections if c.holds_tile or c.layer == "thread"}
    inside = {c.name for c in operator.computes}
    for c in operator.computes:
        for name in c.reads:
            if name in inside and (name, c.name) not in known:
                raise ValueError(f"operator {operator.name}: {name} and {c.name} meet at no layer inside a task")


def last_stages(operator: ROperator, staged: Collection[str]) -> list[tuple[Compute, ...]]:
    """Return the outputs that are not ``staged``, grouped by the part that a task writes."""
    groups: dict[tuple[object, ...], list[Compute]] = {}
    for c in operator.computes:
        if c.name in operator.outputs and c.name not in staged:
            groups.setdefault((operator.shared[c.name], c.shape), []).append(c)
    return [tuple(group) for group in groups.values()]


def _assign_scratch(stages: Sequence[Stage], reads: Sequence[set[str]], held: Mapping[str, Scope]) -> tuple[Stage, ...]:
    """Give every staged tile an offset in the scratch memory of its layer, by Compute in ``held``."""
    readers = [[j for j, names in enumerate(reads) if stage.root.name in names] for stage in stages]
    last = [max(found, default=-1) for found in readers]
    sizes = [math.prod(stage.extents) * itemsize(stage.root.dtype) for stage in stages]
    layers = [held.get(s.root.name, "veu") for s in stages]
    result = list(stages)
    for layer in dict.fromkeys(layers):
        own = [final if where == layer else -1 for final, where in zip(last, layers, strict=True)]
        for k, offset in enumerate(place_tiles(sizes, own)):
            result[k] = replace(result[k], offset=offset, layer=layer) if own[k] >= 0 else result[k]
    return tuple(result)


def scratch_of(stages: Sequence[Stage]) -> dict[Scope, int]:
    """Return the bytes of scratch memory that the stages' tiles need together, by layer; that of the vEU always."""
    found = dict[Scope, int](veu=0)
    for s in (s for s in stages if s.offset >= 0):
        found[s.layer] = max(found.get(s.layer, 0), s.offset + math.prod(s.extents) * itemsize(s.root.dtype))
    return found


def read_through(inlined: Mapping[str, Compute], computes: Iterable[Compute]) -> set[str]:
    """Return all tensors that are read, directly or through producers computed in place, including these producers."""
    found, waiting = set[str](), list(computes)
    while waiting:
        new = set(waiting.pop().reads) - found
        found |= new
        waiting += [inlined[name] for name in new if name in inlined]
    return found


def needed_reductions(
    inlined: Mapping[str, Compute], c: Compute, point: tuple[Expr, ...]
) -> list[tuple[Compute, tuple[Expr, ...]]]:
    """Return the reductions that ``c`` at ``point`` needs first, in order: itself, or those it reads in place."""
    found: dict[tuple[str, tuple[Expr, ...]], Compute] = {}
    _collect_reductions(inlined, c, point, found, set())
    return [(head, indices) for (_, indices), head in found.items()]


def _collect_reductions(
    inlined: Mapping[str, Compute],
    c: Compute,
    point: tuple[Expr, ...],
    found: dict[tuple[str, tuple[Expr, ...]], Compute],
    seen: set[tuple[str, tuple[Expr, ...]]],
) -> None:
    if (c.name, point) in seen:
        return
    seen.add((c.name, point))
    if c.reduce:
        found[c.name, point] = c
        return
    axes = dict(zip((a.name for a in c.axes), point, strict=True))
    for load in ex.loads(ex.substitute(c.body, axes)):
        plain = load.fill is None and all(ex.affine_form(i) is not None for i in load.indices)
        if load.tensor in inlined and plain:
            _collect_reductions(inlined, inlined[load.tensor], tuple(canonicalise_sum(i) for i in load.indices), found, seen)
