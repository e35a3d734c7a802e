"""Batches of tasks as NumPy operations: delivery by the exchange, and the Computes over the delivered data.

The tasks of a batch differ only in their tiles' positions. Each Compute is rewritten with the batch's grid as extra axes and
local axes that count from zero. Every load reads a staged box (or an interior tensor of the same task) by local indices. Boxes
that all tasks along a grid axis share are stored once; the accounts charge every task for a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, contraction_operands
from rammer.ir.expr import Cast, Expr, Load, Number, Op, Ref, Table, integer
from rammer.ir.types import TensorType

from rammer_ipu_sim.memory import poison_value
from rammer_ipu_sim.spans import (
    PIN,
    IndexRange,
    Numbers,
    Spans,
    axis_spans,
    is_affine,
    join_boxes,
    load_spans,
    pin_indices,
    propagate_boxes,
    written_boxes,
)
from rammer_ipu_sim.supersteps import Batch, Places, select_cells, select_part


@dataclass(frozen=True)
class LocalBox:
    """A box stored in the tasks' local memory, ``[shared grid..., box...]``. ``spans`` are uniform over the batch; ``dims`` are
    the grid axes' lengths (1 = shared)."""

    name: str
    spans: Spans
    dims: tuple[int, ...]

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Number of elements per axis of the box."""
        return tuple(int(s.size.max(initial=0)) for s in self.spans)

    def select(self, places: Places) -> Self:
        """Return the boxes of the tasks at ``places``."""
        spans = tuple([s.select(places) for s in self.spans])
        dims = tuple([len(p) if n > 1 else 1 for p, n in zip(places, self.dims, strict=False)])
        return replace(self, spans=spans, dims=dims)


@dataclass(frozen=True)
class StagedOperand(LocalBox):
    """A box that the exchange delivers. Outside the tensor it holds ``fill`` (None = poison). ``loads`` are the positions of the
    loads that it serves, among all loads of outside tensors in the operator."""

    tensor: str
    fill: Number | None
    loads: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A step that evaluates ``compute`` into ``held``; ``masks`` are copies of it with a fill outside the tensor."""

    compute: Compute
    held: LocalBox
    masks: tuple[tuple[str, Number], ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result: axes of the grid that it does not use have length one."""
        grid = len(self.compute.axes) - len(self.held.spans)
        return (*self.held.dims, *self.compute.shape[grid:]) if self.held.dims else self.compute.shape

    def select(self, places: Places, cuts: Mapping[tuple[str, str], int]) -> Step:
        """Return the step for the tasks at ``places``. Reductions end at ``cuts``, by Compute and axis."""
        c = self.compute
        sizes = {f"__g{d}": len(p) for d, p in enumerate(places)}
        axes = tuple([Axis(a.name, sizes[a.name]) if a.name in sizes else a for a in c.axes])
        reduce = tuple([Axis(r.name, min(r.extent, cuts.get((c.name, r.name), r.extent))) for r in c.reduce])
        compute = replace(c, axes=axes, reduce=reduce, used=frozenset())
        compute.__dict__["operands"] = c.operands  # does not depend on extents
        return Step(compute, self.held.select(places), self.masks)


@dataclass(frozen=True)
class BatchPlan:
    """The plan of a batch: ``stages``, then ``steps``, then ``outputs`` (tensor -> name of its box). ``extents`` are those of the
    anchor's axes: tiles end there."""

    batch: Batch
    stages: tuple[StagedOperand, ...]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, str], ...]
    auxiliary: Mapping[str, Numbers]
    extents: tuple[int, ...]

    def select(self, places: Places, point: Mapping[str, int]) -> BatchPlan:
        """Return the plan for the tasks at ``places`` of a run with the lengths ``point``. Boxes of a reduction that ends there
        keep their extents: the rest of them is not read."""
        operator = self.batch.operator
        if not operator.lengths:
            return self
        ends = {e.axis: e.extent.at(point) for e in operator.skips if not e.before}
        extents = tuple([max(1, min(n, ends.get(a.name, n))) for a, n in zip(operator.anchor.axes, self.extents, strict=True)])
        cuts = {(s.compute, s.axis): max(1, s.extent.at(point)) for s in operator.reduce_bounds}
        return BatchPlan(
            select_part(self.batch, places, self.batch.lost),
            tuple([s.select(places) for s in self.stages]),
            tuple([s.select(places, cuts) for s in self.steps]),
            self.outputs,
            {n: select_cells(values, places) for n, values in self.auxiliary.items()},
            extents,
        )


def output_spans(batch: Batch, clip: bool) -> Spans:
    """Return the batch's output boxes, clipped to the tensor or with full tile size."""
    rank, result = len(batch.coordinates), []
    for d, (places, tile) in enumerate(zip(batch.coordinates, batch.operator.tile, strict=True)):
        shape = tuple(len(places) if i == d else 1 for i in range(rank))
        low = np.asarray(places, dtype=np.int64).reshape(shape) * tile
        high = low + tile - 1
        extent = batch.operator.anchor.axes[d].extent
        result.append(IndexRange(low, np.minimum(high, extent - 1) if clip else high))
    return tuple(result)


def plan_batch(batch: Batch, types: Mapping[str, TensorType]) -> BatchPlan:
    """Rewrite the batch's operator for its tasks."""
    return _Planner(batch, types).plan()


@dataclass
class _Planner:
    """A planner of one batch; ``sources`` maps a load of a Compute, (compute, load), to its staged box."""

    batch: Batch
    types: Mapping[str, TensorType]
    auxiliary: dict[str, Numbers] = field(default_factory=dict)
    masks: dict[str, dict[str, Number]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operator = self.batch.operator
        self.rank = len(self.batch.coordinates)
        output = output_spans(self.batch, clip=False)
        self.written = written_boxes(self.operator, output)
        self.spans = propagate_boxes(self.operator, output, self.types, clip=False)
        self.inside = {c.name for c in self.operator.computes}
        self.pinned = {
            c.name: pin_indices(c.body, axis_spans(c, self._uniform_spans(c.name), self.rank), self.rank)
            for c in self.operator.computes
            if c.name in self.spans
        }
        self.sources: dict[tuple[str, Load], StagedOperand] = {}
        self.stages = self._stage_operands()
        self.held: dict[str, LocalBox] = {}

    def plan(self) -> BatchPlan:
        """Rewrite every needed Compute in order, then copy outputs out of larger boxes."""
        drafts = [s for c in self.operator.computes if c.name in self.spans for s in self._rewrite_compute(c)]
        outputs = []
        for name in self.operator.outputs:
            if self._has_exact_box(name):
                outputs.append((name, name))
                continue
            drafts += self._copy(name)
            outputs.append((name, drafts[-1].held.name))
        steps = tuple(Step(s.compute, s.held, tuple(self.masks.get(s.held.name, {}).items())) for s in drafts)
        return BatchPlan(self.batch, self.stages, steps, tuple(outputs), self.auxiliary, self.operator.anchor.shape)

    # --- staged operands ----------------------------------------------------------------------

    def _stage_operands(self) -> tuple[StagedOperand, ...]:
        groups: dict[tuple[str, str, bool], list[tuple[str, Load, Spans, int]]] = {}
        position = 0
        for c in self.operator.computes:
            body, axes = self.pinned.get(c.name, (c.body, {}))
            for load in ex.loads(body):
                if load.tensor in self.inside:
                    continue
                if c.name in self.spans:
                    shape = self.types[load.tensor].shape
                    spans = load_spans(load, axes, shape, self.rank, clip=False)
                    groups.setdefault((load.tensor, repr(load.fill), is_affine(load)), []).append((c.name, load, spans, position))
                position += 1
        result: list[StagedOperand] = []
        for members in groups.values():
            for part in _merge_deliveries(members):
                stage = self._make_stage(f"__s{len(result)}", part)
                self.sources.update({(c, load): stage for c, load, _, _ in part})
                result.append(stage)
        return tuple(result)

    def _make_stage(self, name: str, members: list[tuple[str, Load, Spans, int]]) -> StagedOperand:
        spans = _box_hull([m[2] for m in members])
        load = members[0][1]
        loads = tuple(m[3] for m in members)
        return StagedOperand(name, spans, self._grid_dims(spans), load.tensor, load.fill, loads)

    def _grid_dims(self, spans: Spans) -> tuple[int, ...]:
        return np.broadcast_shapes((1,) * self.rank, *[s.low.shape for s in spans])

    # --- rewriting ----------------------------------------------------------------------------

    def _has_exact_box(self, name: str) -> bool:
        pairs = zip(self.spans[name], self.written[name], strict=True)
        return all(a.low.shape == b.low.shape and np.all(a.low == b.low) and np.all(a.high == b.high) for a, b in pairs)

    def _copy(self, name: str) -> list[Step]:
        axes = next(c.axes for c in self.operator.computes if c.name == name)
        compute = Compute(f"__out_{name}", self.types[name].dtype, axes, Load(name, tuple(Ref(a.name) for a in axes)))
        self.spans[compute.name] = self.written[name]
        return self._rewrite_compute(compute)

    def _uniform_spans(self, name: str) -> Spans:
        return tuple(s.uniform() for s in self.spans[name])

    def _rewrite_compute(self, c: Compute) -> list[Step]:
        """Rewrite the Compute over the batch's grid, after the steps that unfold its operands."""
        spans = self._uniform_spans(c.name)
        body, axes = self.pinned.get(c.name) or pin_indices(c.body, axis_spans(c, spans, self.rank), self.rank)
        scope = _Rewriting(self, c, {name: s.low for name, s in axes.items()})
        local = scope.value(body)
        extents = [int(s.size.max(initial=0)) for s in spans]
        grid = [Axis(f"__g{i}", len(self.batch.coordinates[i])) for i in sorted(scope.used)]
        inner = [Axis(a.name, n) for a, n in zip(c.axes, extents, strict=True)]
        dims = tuple(len(self.batch.coordinates[i]) if i in scope.used else 1 for i in range(self.rank))
        self.held[c.name] = LocalBox(c.name, spans, dims)
        compute = Compute(c.name, c.dtype, (*grid, *inner), local, c.reduce, c.combiner)
        first, compute = self._unfold_operands(compute)
        return [*first, Step(compute, self.held[c.name], ())]

    def _unfold_operands(self, compute: Compute) -> tuple[list[Step], Compute]:
        """Gather a contraction's non-affine operands into tensors over the axes that they use, so that BLAS accepts them."""
        operands = contraction_operands(compute)
        if operands is None:
            return [], compute
        steps, found = list[Step](), dict[Expr, Expr]()
        axes = (*compute.axes, *compute.reduce)
        for number, load in enumerate(operands):
            used = tuple(a for a in axes if a.name in ex.axes_of(load))
            if is_affine(load) or len(used) == len(axes):
                continue
            name = f"__u{number}_{compute.name}"
            steps.append(Step(Compute(name, compute.dtype, used, load), LocalBox(name, (), ()), ()))
            found[load] = Load(name, tuple(Ref(a.name) for a in used))
        # Operands of bytes stay inside their conversions.
        return steps, replace(compute, body=ex.transform(compute.body, found.get)) if found else compute

    def table(self, values: Numbers) -> str:
        """Return the name under which an array over the grid can be loaded."""
        name = f".a{len(self.auxiliary)}"  # not an identifier, so not a tensor of the model
        self.auxiliary[name] = np.ascontiguousarray(values)
        return name

    def masked(self, name: str, fill: Number) -> str:
        """Return the name of an interior tensor's copy that holds ``fill`` outside its extents."""
        known = self.masks.setdefault(name, {})
        for copy, value in known.items():
            if repr(value) == repr(fill):
                return copy
        copy = f"{name}.fill{len(known)}"  # not an identifier, so not a tensor of the model
        known[copy] = fill
        return copy


def _merge_deliveries(members: list[tuple[str, Load, Spans, int]]) -> list[list[tuple[str, Load, Spans, int]]]:
    """Merge all loads into one delivery if their hull is at most as large as the separate boxes."""
    if len(members) == 1:
        return [members]
    together = _box_volume(_box_hull([m[2] for m in members]))
    distinct: list[list[tuple[str, Load, Spans, int]]] = []
    for member in members:
        match = next((d for d in distinct if _is_same_box(d[0][2], member[2])), None)
        if match is None:
            distinct.append([member])
        else:
            match.append(member)
    return [members] if together <= sum(_box_volume(d[0][2]) for d in distinct) else distinct


def _box_hull(boxes: list[Spans]) -> Spans:
    spans = boxes[0]
    for box in boxes[1:]:
        if not _is_same_box(spans, box):
            spans = join_boxes(spans, box)
    return tuple(s.uniform() for s in spans)


def _is_same_box(a: Spans, b: Spans) -> bool:
    return all(np.array_equal(p.low, q.low) and np.array_equal(p.high, q.high) for p, q in zip(a, b, strict=True))


def _box_volume(spans: Spans) -> int:
    return math.prod(int(s.size.max(initial=0)) for s in spans)


@dataclass
class _Rewriting:
    """The rewriting of one Compute; ``low`` maps every axis to its first value for each task of the batch."""

    planner: _Planner
    compute: Compute
    low: Mapping[str, Numbers]
    used: set[int] = field(default_factory=set)

    def value(self, e: Expr) -> Expr:
        """Return ``e`` in local axes, with the same value."""
        if isinstance(e, Ref):
            return self._add_values(self._own(e.axis), self.low[e.axis])
        if isinstance(e, Load):
            return self._load(e)
        if isinstance(e, Table):
            # Tiles at the edge compute points outside the tensor, whose indices may exceed the table.
            top = Op("min", (self.value(e.index), integer(len(e.values) - 1)))
            return Table(e.values, Op("max", (top, integer(0))), e.dtype)
        if isinstance(e, Cast | Op):
            return ex.rebuild_expr(e, tuple(self.value(k) for k in ex.children(e)))
        return e

    def _own(self, axis: str) -> Expr:
        """Return the axis relative to its first value, which is the only value for axes that ``pin_indices`` adds."""
        return integer(0) if axis.startswith(PIN) else Ref(axis)

    def _add_values(self, e: Expr, values: Numbers) -> Expr:
        """Return ``e`` plus an array over the grid."""
        if values.size == 0 or np.all(values == values.flat[0]):
            first = int(values.flat[0]) if values.size else 0
            return ex.make_add(e, first)
        return Op("add", (e, Load(self.planner.table(values), self._grid_indices(values.shape))))

    def _grid_indices(self, dims: tuple[int, ...]) -> tuple[Expr, ...]:
        self.used |= {i for i, n in enumerate(dims) if n > 1}
        return tuple(Ref(f"__g{i}") if n > 1 else integer(0) for i, n in enumerate(dims))

    def _load(self, load: Load) -> Expr:
        interior = load.tensor in self.planner.inside
        held: LocalBox = self.planner.held[load.tensor] if interior else self.planner.sources[self.compute.name, load]
        name, dims, fixed = held.name, held.dims, is_affine(load)
        if interior and load.fill is not None and self._can_leave_tensor(load, held):
            name = self.planner.masked(name, load.fill)
            dims = np.broadcast_shapes(dims, *[s.low.shape for s in held.spans])
        indices = []
        for index, span in zip(load.indices, held.spans, strict=True):
            local, exact = self._index(index, span.low)
            fixed = fixed and exact
            indices.append(local)
        dtype = self.planner.types[load.tensor].dtype
        missing = load.fill if load.fill is not None and not is_affine(load) else poison_value(dtype)
        return Load(name, (*self._grid_indices(dims), *indices), None if fixed else missing)

    def _index(self, index: Expr, start: Numbers) -> tuple[Expr, bool]:
        """Return ``index - start`` in local axes, and True if it is affine in them."""
        form = ex.affine_form(index)
        if form is None:
            return self._add_values(self.value(index), -start), False
        shift: Numbers = form[1] - start
        local: Expr = integer(0)
        for axis, c in form[0].items():
            shift = shift + c * self.low[axis]
            local = ex.make_add(local, ex.make_mul(self._own(axis), c))
        local = self._add_values(local, shift)
        return local, ex.affine_form(local) is not None

    def _can_leave_tensor(self, load: Load, held: LocalBox) -> bool:
        shape = self.planner.types[load.tensor].shape
        return any(np.any(s.low < 0) or np.any(s.high >= n) for s, n in zip(held.spans, shape, strict=True))
