"""What maps and reductions take on a CPU core, as the generic kernel writes them: the latency evaluator of stitching, which also
ranks their tiles.

The core's count of bytes, and of operations at the peak, calls nearly all of them bound by memory. On a core they are bound by
instructions: a vector of a map costs its loads and stores besides its operations, a sum waits for its own last step, rows shorter
than a vector are computed element by element, and what was read a moment ago is read again from a cache. So the loops that the
kernel has (``nests.py``) are counted, and costs add up; a core overlaps little of so short loops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from rammer.device.manifest import Binding
from rammer.ir.compute import Box
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType, itemsize
from rammer.tile.traffic import box_bytes

from rammer_rocm.dialect import OPENCL
from rammer_rocm.kernels.nests import Counts, nests_of

#: Cycles of the clock that the device names, by what is counted. Fitted by ``benchmarks/plain_fit.py`` to 535 tiles of 40
#: operators on a core of an AMD EPYC (Zen 4), with what instructions take in vendors' tables as a prior;
#: ``benchmarks/stitching.py --ranks`` says how well they rank others.
CYCLES: Final[Mapping[str, float]] = {
    "again_far": 0.01,
    "again_near": 0.0099,
    "element": 0.53,
    "element_function": 1.2,
    "element_load": 0.087,
    "element_quotient": 0.88,
    "element_step": 0.38,
    "element_store": 0.17,
    "far_read": 0.012,
    "far_run": 0.75,
    "far_write": 0.055,
    "fold": 6.9,
    "function": 2.6,
    "gather": 0.23,
    "line": 0.9,
    "load": 0.17,
    "loop": 2.5,
    "near_read": 0.019,
    "near_run": 0.16,
    "near_write": 0.005,
    "nest": 2.8,
    "nested": 0.25,
    "operation": 0.17,
    "page": 1.2,
    "quotient": 4.1,
    "spread": 0.087,
    "store": 0.35,
    "task": 12.0,
    "wait": 0.79,
}
#: What a task at the edge does as often as a full one.
EACH: Final = frozenset(("task", "nest"))
#: Bytes of the innermost cache: 32 KiB or more on every x86 core since 2006 (vendors' optimisation guides).
INNERMOST: Final = 32 << 10


def plain(operator: ROperator) -> bool:
    """Whether an operator is maps and reductions alone. Of a range of lengths the core prices the tiles, length by length."""
    return not operator.endings and all(c.kind in ("map", "reduction") for c in operator.computes)


def task_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Predicted seconds of the mean task of a tiled operator on one core: those at the edges are smaller."""
    return PlainTasks(operator, binding, device).seconds(operator)


class PlainTasks:
    """An operator's tasks, whatever its tile."""

    def __init__(self, operator: ROperator, binding: Binding, device: VDevice) -> None:
        self.types, self.lanes = binding.types, device.vector
        self.capacity, self.line = device.layer("veu").capacity, device.layer("device").transaction
        self.cycle = 2 * device.vector / device.flops
        self.nests = list(nests_of(operator, binding, OPENCL))
        self.kept = {e.producer for e in operator.connections if e.layer == "veu"} - set(operator.outputs)
        self.stored = dict.fromkeys((*operator.inputs, *operator.outputs))
        self.nbytes = sum(binding.types[n].nbytes for n in self.stored)

    def seconds(self, tiled: ROperator) -> float:
        """Predicted seconds of the mean task."""
        return self.cycle * math.fsum(CYCLES[what] * often for what, often in self.mean(tiled).items())

    def mean(self, tiled: ROperator) -> dict[str, float]:
        """What the mean task does, by the names of ``CYCLES``."""
        whole = math.prod(t * -(-n // t) for t, n in zip(tiled.tile, tiled.anchor.shape, strict=True))
        share = math.prod(tiled.anchor.shape) / max(1, whole)
        return {what: often * (1.0 if what in EACH else share) for what, often in self.counts(tiled).items()}

    def counts(self, tiled: ROperator) -> Counts:
        """What a full task does, by the names of ``CYCLES``."""
        boxes = tiled.boxes(tiled.inner_box(), self.types)
        found = self._bytes(boxes)
        found["task"] += 1
        for nest in self.nests:
            if nest.root.name in boxes:
                found["nest"] += 1
                found += nest.count([high - low for low, high in boxes[nest.root.name]], self.lanes)
        return found

    def _bytes(self, boxes: Mapping[str, Box]) -> Counts:
        """Bytes of what a task reads and writes, by where they are: ``far`` as much of them as the operator's tensors outgrow the
        core's cache. What a task reads again, or keeps, comes from the cache that holds all that the task touches: the innermost
        one for nothing."""
        found, seen = Counts(), set[str]()
        sizes = {n: _volume(boxes[n]) * itemsize(self.types[n].dtype) for n in (*self.stored, *self.kept) if n in boxes}
        touched, whole = sum(sizes.values()), _beyond(self.nbytes, self.capacity)
        beyond = _beyond(touched, self.capacity)
        again = {"again_far": beyond, "again_near": (1.0 - beyond) * _beyond(touched, INNERMOST)}
        first = {"far": whole, "near": 1.0 - whole}
        for nest in self.nests:
            for name in dict.fromkeys(r.tensor for r in nest.reads if r.tensor in sizes):
                if name in seen:
                    _add(found, again, sizes[name])
                else:
                    self._reach(found, first, "read", boxes[name], name)
                seen.add(name)
            for name in (c.name for c in nest.computes if c.name in sizes):
                seen.add(name)
                if name in self.stored:
                    self._reach(found, first, "write", boxes[name], name)
                else:
                    _add(found, again, sizes[name])
        return found

    def _reach(self, found: Counts, shares: Mapping[str, float], what: str, box: Box, name: str) -> None:
        """What a task reads first, or writes."""
        size = box_bytes(box, self.types[name], self.line)
        _add(found, {f"{where}_{what}": share for where, share in shares.items()}, size)
        _add(found, {f"{where}_run": share for where, share in shares.items()}, _jumps(box, self.types[name]))


def _add(found: Counts, shares: Mapping[str, float], size: int) -> None:
    for what, share in shares.items():
        found[what] += round(share * size)


def _beyond(size: int, capacity: int) -> float:
    """What share of so many bytes a cache no longer holds, that keeps what was used last: all of twice its size."""
    return min(1.0, max(0.0, size / capacity - 1.0))


def _volume(box: Box) -> int:
    return math.prod([high - low for low, high in box])


def _jumps(box: Box, kind: TensorType) -> int:
    """How many runs of neighbouring elements of a tensor a box is; of a single one, which goes on where the task before ended,
    none."""
    count, whole = 1, True
    for (low, high), extent in zip(box[::-1], kind.shape[::-1], strict=True):
        if whole:
            whole = high - low == extent
        else:
            count *= high - low
    return count if count > 1 else 0
