"""Conversion of waves to supersteps, and of a superstep's tasks to batches that NumPy can run at once.

A superstep reads all inputs at its start and writes all outputs at its end. A wave becomes several supersteps if a task reads
data from an earlier task of its row and wave."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from rammer.ir.extent import SkipTasks
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, RProgram, Storage, WaveTask, waves

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True)
class Batch:
    """Tasks of one operator whose tiles form a product: tile ``coordinates`` along every anchor axis.

    ``tasks``, ``veus`` and ``orders`` (rising along each row) have one axis per anchor axis. ``lost`` is the load whose transfer
    is dropped (-1 = none), a fault that tests inject."""

    operator: ROperator
    coordinates: tuple[tuple[int, ...], ...]
    tasks: Indices
    veus: Indices
    orders: Indices
    lost: int = -1


@dataclass(frozen=True)
class PlacedTasks:
    """The tasks of one operator in a superstep: row, position among the row's tasks in the superstep, index."""

    veus: Indices
    orders: Indices
    tasks: Indices


def make_placed_tasks(veus: Sequence[int], orders: Sequence[int], tasks: Sequence[int]) -> PlacedTasks:
    """Convert lists to placed tasks."""
    return PlacedTasks(*(np.asarray(a, dtype=np.int64) for a in (veus, orders, tasks)))


def split_supersteps(program: RProgram) -> list[dict[str, PlacedTasks]]:
    """Return the tasks of every superstep, by operator name in order of first appearance."""
    conflicts = _Conflicts(program)
    result: list[dict[str, PlacedTasks]] = []
    for wave in waves(program):
        names = list(dict.fromkeys([t.task.operator for t in wave]))
        phases = _assign_phases(wave, conflicts) if conflicts.among(names) else [0] * len(wave)
        parts: list[dict[str, tuple[list[int], list[int], list[int]]]] = [{} for _ in range(max(phases, default=0) + 1)]
        for order, (item, phase) in enumerate(zip(wave, phases, strict=True)):
            # A wave lists the tasks of each row in row order.
            veus, orders, tasks = parts[phase].setdefault(item.task.operator, ([], [], []))
            veus.append(item.veu)
            orders.append(order)
            tasks.append(item.task.index)
        result += [{name: make_placed_tasks(*lists) for name, lists in part.items()} for part in parts]
    return result


def _assign_phases(wave: Sequence[WaveTask], conflicts: _Conflicts) -> list[int]:
    """Return for each task the first phase after all earlier tasks of its row on which it depends."""
    rows: dict[int, dict[str, int]] = {}
    result = []
    for item in wave:
        name, earlier = item.task.operator, rows.setdefault(item.veu, {})
        phase = max(earlier.values(), default=0)
        for other, place in earlier.items():
            if other != name and conflicts(other, name):
                phase = max(phase, place + 1)
        earlier[name] = phase
        result.append(phase)
    return result


class _Conflicts:
    """A cache of conflicts: the later operator must see the earlier operator's writes, or must write after it."""

    def __init__(self, program: RProgram) -> None:
        self.program = program
        self.known: dict[tuple[str, str], bool] = {}

    def __call__(self, earlier: str, later: str) -> bool:
        key = (earlier, later)
        if key not in self.known:
            self.known[key] = self._has_conflict(self.program.operator[earlier], self.program.operator[later])
        return self.known[key]

    def among(self, names: Sequence[str]) -> bool:
        """Return True if any two of ``names`` conflict."""
        return any(self(a, b) for a in names for b in names if a != b)

    def _has_conflict(self, earlier: ROperator, later: ROperator) -> bool:
        places, buffers = self.program.storage, self.program.buffer
        for wrote in earlier.outputs:
            if any(can_overlap(places[wrote], places[n], buffers) for n in later.inputs if n in places):
                return True
            for writes in later.outputs:
                different_buffers = places[wrote].buffer != places[writes].buffer
                if different_buffers and can_overlap(places[wrote], places[writes], buffers):
                    return True
        return False


def can_overlap(a: Storage, b: Storage, buffers: Mapping[str, Buffer]) -> bool:
    """Return True if two storages may share memory (by the hull of their addresses)."""
    if a.buffer == b.buffer:
        (p, q), (r, s) = a.span(), b.span()
        return p < s and r < q
    x, y = buffers[a.buffer], buffers[b.buffer]
    if x.kind != "arena" or y.kind != "arena":
        return False
    return x.offset < y.offset + y.nbytes and y.offset < x.offset + x.nbytes


def group_batches(operator: ROperator, where: PlacedTasks) -> list[Batch]:
    """Group tasks into products of tile coordinates."""
    grid = operator.grid
    size = int(np.prod(grid, dtype=np.int64))
    veus, orders = np.full(size, -1, dtype=np.int64), np.full(size, -1, dtype=np.int64)
    veus[where.tasks] = where.veus
    orders[where.tasks] = where.orders
    index = np.arange(size, dtype=np.int64).reshape(grid)
    everywhere = tuple(tuple(range(n)) for n in grid)
    whole = Batch(operator, everywhere, index, veus.reshape(grid), orders.reshape(grid))
    return [select_part(whole, places) for places in _decompose_grid(whole.veus >= 0)]


#: Positions along each grid axis, rising.
Places: TypeAlias = "Sequence[Sequence[int]]"
#: A batch of tasks past a length, and the fill of each output.
Fill: TypeAlias = "tuple[Batch, tuple[float | None, ...]]"


def select_cells(values: Indices, places: Places) -> Indices:
    """Return the elements of an array over the grid at the product of positions ``places``. Axes of length one stay."""
    if all(isinstance(p, range) for p in places):
        return values[tuple([slice(p[0], p[-1] + 1) if n > 1 else slice(1) for p, n in zip(places, values.shape, strict=True)])]
    return values[np.ix_(*[p if n > 1 else (0,) for p, n in zip(places, values.shape, strict=True)])]


def select_part(whole: Batch, places: Places, lost: int = -1) -> Batch:
    """Return the tasks of ``whole`` at the product of positions ``places``."""
    coordinates = tuple([tuple([c[i] for i in part]) for c, part in zip(whole.coordinates, places, strict=True)])
    tasks, veus, orders = (select_cells(a, places) for a in (whole.tasks, whole.veus, whole.orders))
    return Batch(whole.operator, coordinates, tasks, veus, orders, lost)


def lengths_of(program: RProgram, lengths: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, int]:
    """Return the elements of the tensors ``lengths`` of a run, as ``n[3]``, and as ``n`` for single elements."""
    ports, found = {p.tensor: p.external for p in program.inputs}, dict[str, int]()
    for name in lengths:
        values = np.asarray(inputs[ports[name]]).reshape(-1).tolist()
        found |= {f"{name}[{i}]": int(n) for i, n in enumerate(values)}
        found |= {name: int(values[0])} if len(values) == 1 else {}
    return found


def mask_batch(batch: Batch, point: Mapping[str, int]) -> list[Batch]:
    """Return the batches of tasks that compute at the lengths ``point``; tiles and reductions end there."""
    operator, parts = batch.operator.at(point), mask_tasks(batch, point)[0]
    return [replace(select_part(batch, places, batch.lost), operator=operator) for places in parts]


def mask_tasks(batch: Batch, point: Mapping[str, int]) -> tuple[list[Places], list[Fill]]:
    """Return the products of positions whose tasks compute at the lengths ``point``, and the batches that write fills. Fill tasks
    store whole tiles. The first of them then also compute the part before the length."""
    places, fills = _mask_extents(batch, point)
    parts = [] if places is None else [places]
    for ending in (e for e in batch.operator.skips if e.window is not None):
        parts = [p for part in parts for p in _mask_row_window(batch, part, ending, point)]
    return parts, fills


def _mask_row_window(batch: Batch, places: Places, ending: SkipTasks, point: Mapping[str, int]) -> list[Places]:
    """Return the positions of ``places`` inside the row window, or ``places`` if a tile has several positions along its axes."""
    rows, axes = ending.window, [a.name for a in batch.operator.anchor.axes]
    assert rows is not None
    d, by, ((tensor, _),) = axes.index(ending.axis), axes.index(rows.by), ending.extent.terms
    if batch.operator.tile[d] != 1 or batch.operator.tile[by] != 1:
        return [places]
    holds = np.zeros([len(p) for p in places], bool)
    for i, place in enumerate(places[d]):
        for k, chosen in enumerate(places[by]):
            cell = [slice(None)] * holds.ndim
            cell[d], cell[by] = slice(i, i + 1), slice(k, k + 1)
            row = batch.coordinates[by][chosen]
            holds[tuple(cell)] = rows.holds(batch.coordinates[d][place], point[f"{tensor}[{row}]"])
    inside = _decompose_grid(holds)
    return [tuple([tuple([outer[i] for i in inner]) for outer, inner in zip(places, part, strict=True)]) for part in inside]


def _mask_extents(batch: Batch, point: Mapping[str, int]) -> tuple[Places | None, list[Fill]]:
    """Return the positions of tasks that start before (``before``: end after) all lengths or None, and the fills."""
    fills = list[Fill]()
    axes = [a.name for a in batch.operator.anchor.axes]
    places = [range(len(c)) for c in batch.coordinates]
    for ending in (e for e in batch.operator.skips if e.window is None):
        d, extent = axes.index(ending.axis), max(ending.extent.at(point), 0)
        tile, last = batch.operator.tile[d], batch.operator.anchor.axes[d].extent
        first, stop = places[d].start, places[d].stop
        cut = min(max(bisect_left(batch.coordinates[d], extent // tile), first), stop)  # coordinates rise
        beyond, places[d] = range(cut, stop), range(cut, stop if extent < last else cut)
        if not ending.before:
            places[d] = range(first, min(max(bisect_left(batch.coordinates[d], -(-extent // tile)), first), stop))
        if ending.writes and beyond:
            fills.append((select_part(batch, [beyond if k == d else p for k, p in enumerate(places)], batch.lost), ending.fills))
        if not places[d]:
            return None, fills
    return places, fills


def halve_batch(batch: Batch) -> list[Batch]:
    """Return the batch cut in two along its longest axis."""
    sizes = [len(c) for c in batch.coordinates]
    axis = sizes.index(max(sizes))
    middle = sizes[axis] // 2
    parts = []
    for piece in (range(middle), range(middle, sizes[axis])):
        parts.append(select_part(batch, [piece if d == axis else range(n) for d, n in enumerate(sizes)], batch.lost))
    return parts


def _decompose_grid(present: Any) -> list[tuple[tuple[int, ...], ...]]:
    """Decompose a boolean grid into disjoint products of coordinates."""
    if present.ndim == 0:
        return [()] if present else []
    if present.all():
        return [tuple(tuple(range(n)) for n in present.shape)] if present.size else []
    if present.ndim == 1:
        return [(tuple(int(i) for i in np.flatnonzero(present)),)] if present.any() else []
    alike: dict[bytes, list[int]] = {}
    for i, plane in enumerate(present):
        if plane.any():
            alike.setdefault(np.packbits(plane).tobytes(), []).append(i)
    return [(tuple(rows), *rest) for rows in alike.values() for rest in _decompose_grid(present[rows[0]])]


def isolate_task(whole: Sequence[Batch], task: int, load: int) -> list[Batch]:
    """Return the same batches with ``task`` in a separate batch whose ``load`` loses its transfer."""
    result: list[Batch] = []
    for batch in whole:
        if task not in batch.tasks:
            result.append(batch)
            continue
        result += [select_part(batch, places) for places in _decompose_grid(batch.tasks != task)]
        spot = np.argwhere(batch.tasks == task)[0]
        result.append(select_part(batch, [[int(i)] for i in spot], load))
    return result
