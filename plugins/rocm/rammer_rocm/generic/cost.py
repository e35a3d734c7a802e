"""Predicted time of maps and reductions in the generic kernel on a CPU core: the latency evaluator of stitching.

The evaluator also ranks the tiles of these operators. The core's cost model of bytes and peak operations calls nearly all of them
memory-bound. On a core they are bound by instructions. A vector of a map costs loads and stores besides its operations. A sum
waits for its previous step. Rows shorter than a vector are computed element by element. Data that was read recently is read again
from a cache. Therefore the kernel's loops (``loop_counts.py``) are counted and their costs added; a core overlaps little between
short loops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Final

from rammer.device.manifest import Binding
from rammer.fusion.tile_traffic import box_bytes
from rammer.ir.compute import Box
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType, itemsize

from rammer_rocm.dialect import OPENCL
from rammer_rocm.generic.loop_counts import Counts, nests_of

#: Cycles of the nominal clock for each counted operation. They are a least-squares fit of relative errors, regularised towards
#: the vendors' instruction tables. The data are 4278 tiles of 1426 operators of random memory-bound graphs on one core of an AMD
#: EPYC (Zen 4).
CYCLES: Final[Mapping[str, float]] = {
    "again_far": 0.0078,
    "again_near": 0.004,
    "conflict": 1,
    "element": 0.075,
    "element_function": 0.91,
    "element_load": 0.025,
    "element_quotient": 0.51,
    "element_step": 0.22,
    "element_store": 0.075,
    "far_conflict": 1.7,
    "far_read": 0.016,
    "far_run": 0.5,
    "far_write": 0.005,
    "fold": 0.26,
    "function": 2.2,
    "gather": 0.34,
    "line": 0.72,
    "load": 0.29,
    "loop": 0.25,
    "near_read": 0.021,
    "near_run": 0.075,
    "near_write": 0.014,
    "nest": 1.6,
    "nested": 0.2,
    "operation": 0.15,
    "outer_read": 0.0087,
    "outer_write": 0.032,
    "page": 0.81,
    "quotient": 0.5,
    "scatter": 0.18,
    "spread": 0.087,
    "store": 1,
    "task": 3.8,
    "wait": 0.85,
}
#: Bytes of the innermost cache: at least 32 KiB on every x86 core since 2006 (vendors' optimisation guides).
INNERMOST: Final = 32 << 10
#: Sizes of the outermost cache in multiples of a core's cache: one core's portion, and the whole minus the data of other cores.
#: Examples: 4 and 32 MiB to 1 MiB of a Zen 4 core; from 8 and 16 on Intel's servers.
OUTER: Final = (4, 20)


def is_plain(operator: ROperator) -> bool:
    """Return True if an operator consists of maps and reductions only. For ranged operators the core predicts the time of tiles
    length by length."""
    return not operator.skips and all(c.kind in ("map", "reduction") for c in operator.computes)


def task_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Return the predicted seconds of the mean task of a tiled operator on one core. Tasks at the edges are smaller."""
    return PlainTasks(operator, binding, device).seconds(operator)


class PlainTasks:
    """The tasks of an operator, for any tile."""

    def __init__(self, operator: ROperator, binding: Binding, device: VDevice) -> None:
        self.types, self.lanes = binding.types, device.vector
        self.capacity, self.line = device.layer("veu").capacity, device.layer("device").transaction
        self.cycle = 2 * device.vector / device.flops
        self.nests = list(nests_of(operator, binding, OPENCL))
        self.kept = {e.producer for e in operator.connections if e.layer == "veu"} - set(operator.outputs)
        self.stored = dict.fromkeys((*operator.inputs, *operator.outputs))
        self.nbytes = sum(binding.types[n].nbytes for n in self.stored)

    def seconds(self, tiled: ROperator) -> float:
        """Return the predicted seconds of the mean task."""
        return self.cycle * math.fsum(CYCLES[what] * often for what, often in self.mean(tiled).items())

    def mean(self, tiled: ROperator) -> dict[str, float]:
        """Return the counts of the mean task, by the keys of ``CYCLES``. Edge tasks are smaller and may be narrower than a
        vector."""
        cuts = [_axis_cuts(extent, tile) for extent, tile in zip(tiled.anchor.shape, tiled.tile, strict=True)]
        full, total = tiled.boxes(tiled.inner_box(), self.types), dict[str, float]()
        even = all(len(cut) == 1 for cut in cuts)
        for cut in product(*cuts):
            often = math.prod(n for n, _ in cut) / tiled.task_count
            boxes = tiled.boxes(tuple(box for _, box in cut), self.types)
            for what, count in self._count_task(boxes, full, even).items():
                total[what] = total.get(what, 0.0) + often * count
        return total

    def _count_task(self, boxes: Mapping[str, Box], full: Mapping[str, Box], even: bool) -> Counts:
        """Return the counts (keys of ``CYCLES``) of a task with these boxes, in a kernel for tasks with ``full`` boxes. ``even``:
        all tasks have full boxes."""
        found = self._count_bytes(boxes)
        found["task"] += 1
        for nest in self.nests:
            if nest.root.name in boxes:
                found["nest"] += 1
                found += nest.count(_box_extents(boxes[nest.root.name]), _box_extents(full[nest.root.name]), self.lanes, even)
        found["far_conflict"] += round(found["conflict"] * _uncached_share(self.nbytes, self.capacity))
        return found

    def _count_bytes(self, boxes: Mapping[str, Box]) -> Counts:
        """Return the bytes that a task reads and writes, by location.

        ``far`` is the fraction of the operator's tensors that exceeds the core's cache. ``outer`` is the fraction that exceeds
        the core's portion of the outermost cache. Repeated reads and interior tensors come from the smallest cache that holds all
        data of the task; the innermost cache is free."""
        found, seen = Counts(), set[str]()
        sizes = {n: _box_volume(boxes[n]) * itemsize(self.types[n].dtype) for n in (*self.stored, *self.kept) if n in boxes}
        touched, whole = sum(sizes.values()), _uncached_share(self.nbytes, self.capacity)
        beyond = _uncached_share(touched, self.capacity)
        again = {"again_far": beyond, "again_near": (1.0 - beyond) * _uncached_share(touched, INNERMOST)}
        low, high = (self.capacity * caches for caches in OUTER)
        outer = whole * min(1.0, max(0.0, (self.nbytes - low) / (high - low)))
        first = {"far": whole, "near": 1.0 - whole, "outer": outer}
        for nest in self.nests:
            for name in dict.fromkeys(r.tensor for r in nest.reads if r.tensor in sizes):
                if name in seen:
                    _add_shares(found, again, sizes[name])
                else:
                    self._count_access(found, first, "read", boxes[name], name)
                seen.add(name)
            for name in (c.name for c in nest.computes if c.name in sizes):
                seen.add(name)
                if name in self.stored:
                    self._count_access(found, first, "write", boxes[name], name)
                else:
                    _add_shares(found, again, sizes[name])
        return found

    def _count_access(self, found: Counts, shares: Mapping[str, float], what: str, box: Box, name: str) -> None:
        """Count the bytes and runs that a task reads for the first time, or writes."""
        size = box_bytes(box, self.types[name], self.line)
        _add_shares(found, {f"{where}_{what}": share for where, share in shares.items()}, size)
        runs = _count_runs(box, self.types[name])
        _add_shares(found, {f"{where}_run": share for where, share in shares.items() if where != "outer"}, runs)


def _add_shares(found: Counts, shares: Mapping[str, float], size: int) -> None:
    for what, share in shares.items():
        found[what] += round(share * size)


def _uncached_share(size: int, capacity: int) -> float:
    """Return the fraction of ``size`` bytes that an LRU cache no longer holds: all if ``size`` is twice its capacity."""
    return min(1.0, max(0.0, size / capacity - 1.0))


def _axis_cuts(extent: int, tile: int) -> Sequence[tuple[int, tuple[int, int]]]:
    """Return the number of tiles along an axis and their ranges: full tiles (as the middle tile) and the remainder."""
    count, left = divmod(extent, tile)
    low = (count - 1) // 2 * tile
    full = [(count, (low, low + tile))] if count else []
    return [*full, *([(1, (extent - left, extent))] if left else [])]


def _box_extents(box: Box) -> list[int]:
    return [high - low for low, high in box]


def _box_volume(box: Box) -> int:
    return math.prod([high - low for low, high in box])


def _count_runs(box: Box, kind: TensorType) -> int:
    """Return the number of contiguous runs of a box in a tensor. A single run continues the previous task's run, so it counts as
    0."""
    count, whole = 1, True
    for (low, high), extent in zip(box[::-1], kind.shape[::-1], strict=True):
        if whole:
            whole = high - low == extent
        else:
            count *= high - low
    return count if count > 1 else 0
