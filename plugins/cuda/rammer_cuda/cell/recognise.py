"""The ``cell`` family: products of a few rows with weights, and maps over their results, such as a recurrent cell.

A task has so few rows that fetching weights dominates its time. Every thread therefore keeps its share of them in registers.
Loading them depends on no computed value, so it may precede the task's waits. If one block runs the same task repeatedly, as a
persistent kernel does for the steps of a layer, weights are fetched once. This module divides a task among threads;
``cell.kernel`` writes the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rammer.codegen import Choice, Packing, Unsuited, affine_address, in_tiles, make_packing, pad_axis
from rammer.device.manifest import Array, Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, contraction_operands
from rammer.ir.expr import Expr, Load, Ref, integer
from rammer.ir.operator import ROperator

from rammer_cuda.gpu import Gpu

#: Threads of a block: with 512 a thread may have 128 registers (65,536 an SM; CUDA C++ programming guide).
THREADS, WARPS = 512, 16
#: Weights that a thread can hold in registers in addition to its working values.
MOST_HELD = 88
#: Rows that share the weights, and the least depth of a sum: below it, at least half of the lanes would multiply zeros.
MOST_ROWS, LEAST_DEPTH = 8, 32
#: Element types of operands and results.
FLOATS = frozenset(("float32", "float16"))
#: Seconds of a task in addition to its arithmetic: fetching vectors that another SM has just sent, two barriers and the maps.
#: LSTM-TC took 1.87 us a wave on an H200: 0.24 for arithmetic and 0.55 for the VDevice's launch.
FIXED = 1.1e-6


@dataclass(frozen=True, slots=True)
class Part:
    """A product of ``weights`` and a vector per row, over ``depth`` positions of axis ``along``. A vector's element address is
    ``constant + sum(steps[axis] * axis)``."""

    compute: Compute
    weights: Load
    vector: Load
    along: str
    depth: int
    steps: dict[str, int]
    constant: int


@dataclass(frozen=True)
class Cell:
    """A tiled cell divided among ``WARPS`` warps: each has ``each`` columns, its lanes ``share`` weights of a column.

    ``lanes`` lanes share a product, four weights of ``dtype`` at a time; its sum is padded with zeros to whole loads of all
    lanes. ``box`` is the products' part of a task, (first index, extent) an axis. Of these axes, ``row_axes`` number the rows and
    ``column_axes`` the weights' columns.
    """

    operator: ROperator
    parts: tuple[Part, ...]
    box: tuple[tuple[Expr, int], ...]
    dtype: str
    row_axes: tuple[int, ...]
    column_axes: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The rows that share the weights."""
        return math.prod(self.box[d][1] for d in self.row_axes)

    @property
    def columns(self) -> int:
        """The results of a row."""
        return math.prod(self.box[d][1] for d in self.column_axes)

    @property
    def depth(self) -> int:
        """The products added for a result, including zero padding."""
        return -(-self.parts[0].depth // (4 * self.lanes)) * 4 * self.lanes

    @property
    def lanes(self) -> int:
        """The lanes of a warp that share a product."""
        return 32 // len(self.parts)

    @property
    def each(self) -> int:
        """The columns of a warp."""
        return -(-self.columns // WARPS)

    @property
    def share(self) -> int:
        """The weights of a column in one lane."""
        return self.depth // self.lanes

    @property
    def tiles(self) -> int:
        """The tiles along the last axis of the weights' columns."""
        axis, (_, width) = self.parts[0].compute.axes[self.column_axes[-1]], self.box[self.column_axes[-1]]
        return -(-axis.extent // width)

    def packing(self, part: Part) -> Packing:
        """Return the weights as ``[tile, warp, column of the warp, 4 * step, lane, 4]``, contiguous for each lane's load."""
        axes = [part.compute.axes[d] for d in self.column_axes]
        width, along = self.box[self.column_axes[-1]][1], part.compute.reduce[0]
        tiles, each, share, lanes = self.tiles, self.each, self.share, self.lanes

        def arrange(full: Array) -> Array:
            cut = in_tiles(full.reshape(-1, axes[-1].extent, along.extent), width, width)
            tasks = np.moveaxis(cut, 1, 0).reshape(tiles, -1, along.extent)
            whole = pad_axis(pad_axis(tasks, 1, WARPS * each), 2, self.depth)
            return whole.reshape(tiles, WARPS, each, share // 4, lanes, 4)

        size = tiles * WARPS * each * self.depth
        return make_packing(part.weights, (*axes, along), size, arrange, "cell", width, each, lanes, dtype=self.dtype)


def cell_of(operator: ROperator, binding: Binding) -> Cell:
    """Return the division of a tiled operator among threads. Raise Unsuited if it has another form or its weights exceed a
    thread's registers."""
    parts = parts_of(operator, binding)
    axes, weights = parts[0].compute.axes, ex.axes_of(parts[0].weights)
    box = _task_box(operator, parts[0].compute, binding)
    columns = tuple(d for d, a in enumerate(axes) if a.name in weights)
    dtype = binding.types[parts[0].weights.tensor].dtype
    cell = Cell(operator, parts, box, dtype, tuple(d for d in range(len(box)) if d not in columns), columns)
    if cell.each * cell.share > MOST_HELD:
        raise Unsuited(f"{cell.each * cell.share} weights a thread")
    if any(box[d][1] < axes[d].extent for d in columns[:-1]):
        raise Unsuited("tiles cut more than the last axis of the weights")
    return cell


def parts_of(operator: ROperator, binding: Binding) -> tuple[Part, ...]:
    """Return the products of a cell. Raise Unsuited with the reason if the operator has another form."""
    if 0 in operator.anchor.shape or not {binding.types[n].dtype for n in operator.inputs} <= FLOATS:
        raise Unsuited("not of floats, or empty")
    inside = {c.name for c in operator.computes}
    if any(not inside.isdisjoint(c.reads) for c in operator.computes if c.reduce):
        raise Unsuited("a product of the task's own results")
    parts = tuple(_parse_product(c, binding) for c in operator.computes if c.reduce)
    if not parts or not {c.dtype for c in operator.computes} <= FLOATS:
        raise Unsuited("no product of floats")
    if len({binding.types[ld.tensor].dtype for p in parts for ld in (p.weights, p.vector)}) > 1:
        raise Unsuited("operands of different types")
    if any(p.compute.axes != parts[0].compute.axes or p.depth != parts[0].depth for p in parts):
        raise Unsuited("products of different shapes")
    if len(parts) not in (1, 2, 4) or parts[0].depth % 4 or parts[0].depth < LEAST_DEPTH:
        raise Unsuited(f"{len(parts)} products of depth {parts[0].depth}")
    return parts


def _parse_product(c: Compute, binding: Binding) -> Part:
    operands = contraction_operands(c)
    if operands is None or len(c.reduce) != 1:
        raise Unsuited(f"{c.name} is not a product of two tensors along one axis")
    along, axes = c.reduce[0], {a.name: a.extent for a in c.axes}
    for weights, vector in (operands, operands[::-1]):
        columns = [a for a in axes if a in ex.axes_of(weights)]
        rows = math.prod(n for a, n in axes.items() if a not in columns)
        if weights.tensor not in binding.constants or rows > MOST_ROWS or not columns or ex.axes_of(vector) & {*columns}:
            continue
        steps, constant = affine_address(vector, binding.storages[vector.tensor].strides)
        if weights.fill is None and vector.fill is None and steps.get(along.name) == 1:
            return Part(c, weights, vector, along.name, along.extent, steps, constant)
    raise Unsuited(f"{c.name} has no constant weights for at most {MOST_ROWS} rows")


def _task_box(operator: ROperator, c: Compute, binding: Binding) -> tuple[tuple[Expr, int], ...]:
    """Return (first index, extent) of each axis of ``c``'s part of a task: the whole axis, or that of the tile."""
    result = list[tuple[Expr, int]]()
    own = [operator.task_box(t) for t in (0, operator.task_count - 1)]
    boxes = [operator.boxes(b, binding.types)[c.name] for b in own]
    for d, axis in enumerate(c.axes):
        same = [k for k in range(len(own[0])) if all(o[k] == b[d] for o, b in zip(own, boxes, strict=True))]
        if all(b[d] == (0, axis.extent) for b in boxes):
            result.append((integer(0), axis.extent))
        elif same:
            result.append((Ref(f"o{same[0]}"), operator.tile[same[0]]))
        else:
            raise Unsuited(f"axis {axis.name} of {c.name} follows no axis of the tile")
    return tuple(result)


def vectors_of(operator: ROperator, binding: Binding) -> frozenset[str]:
    """Return the tensors that a cell reads only as vectors."""
    elsewhere = {t for c in operator.computes if not c.reduce for t in c.reads}
    return frozenset(p.vector.tensor for p in parts_of(operator, binding)) - elsewhere


def cell_seconds(operator: ROperator, binding: Binding, gpu: Gpu) -> float:
    """Return predicted seconds of all tasks of a tiled cell whose blocks already hold the weights. Raise Unsuited as ``cell_of``
    does."""
    return _task_seconds(operator, binding, gpu) * -(-operator.task_count // gpu.sms)


def _task_seconds(operator: ROperator, binding: Binding, gpu: Gpu) -> float:
    """Return predicted seconds of one task of a tiled cell."""
    cell = cell_of(operator, binding)
    multiplies = cell.each * cell.share * cell.rows * WARPS / 4  # issue slots of one of an SM's four schedulers
    exchanges = (cell.each * cell.rows + 5) * WARPS  # one warp's exchange per cycle
    return FIXED + (multiplies + exchanges) / gpu.model_clock


def cell_candidates(operator: ROperator, binding: Binding, gpu: Gpu) -> list[Choice]:
    """Return tiled copies whose weights fit a thread's registers, by even parts of the last axis. The fastest on an idle device
    comes first, then the one with the least vEU time, then the others. Return [] for another form."""
    try:
        parts = parts_of(operator, binding)
    except Unsuited:
        return []
    if binding.types[parts[0].weights.tensor].dtype == "float16" and binding.reused.isdisjoint(operator.inputs):
        return []  # a decoder at batch 1 took 0.345 ms with them instead of 0.323 (H200): their blocks fill an SM each
    shape, found = operator.anchor.shape, list[tuple[float, float, ROperator]]()
    for width in sorted({-(-shape[-1] // n) for n in range(1, shape[-1] + 1)}):
        tiled = replace(operator, tile=(*shape[:-1], width), family="cell", config=())
        try:
            seconds = _task_seconds(tiled, binding, gpu)
        except Unsuited:
            continue
        tasks = tiled.task_count
        found.append((seconds * -(-tasks // gpu.sms), seconds * tasks, tiled))
    return [Choice(s + gpu.launch, o) for s, _, o in _thrifty_second(sorted(found, key=lambda f: f[:2]))]


def _thrifty_second(found: Sequence[tuple[float, float, ROperator]]) -> list[tuple[float, float, ROperator]]:
    lean = min(found[1:], key=lambda f: f[1], default=None)
    return [*found[:1], *([lean] if lean else []), *(f for f in found[1:] if f is not lean)]
