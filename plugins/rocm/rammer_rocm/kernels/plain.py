"""What maps and reductions take on a CPU core, as the generic kernel writes them: the latency evaluator of stitching, which also
ranks their tiles.

The core's count of bytes, and of operations at the peak, calls nearly all of them bound by memory. On a core they are bound by
instructions: a vector of a map costs its loads and stores besides its operations, rows shorter than a vector are computed element
by element, and what was read a moment ago is read again from a cache. Costs add up; a core overlaps little of so short loops.
"""

from __future__ import annotations

import math
from typing import Final

from rammer.device.manifest import Binding
from rammer.ir.compute import Box, Compute
from rammer.ir.device import VDevice
from rammer.ir.expr import Ref
from rammer.ir.operator import ROperator
from rammer.ir.types import itemsize
from rammer.tile.traffic import box_bytes

#: Seconds of a vector of one Compute, and of each operation on it; of an element that is computed alone, its first operation
#: included: further ones cost what they cost in a vector.
#: These and those below are fitted to 170 tiles of 14 operators and to 108 programs of 54 random graphs, on one and two cores
#: of an AMD EPYC (Zen 5): ``benchmarks/stitching.py --ranks`` says how well they rank others.
VECTOR, VECTOR_FLOP, ELEMENT = 1.4e-9, 7.9e-10, 4.4e-10
#: Seconds to combine the lanes of a vector into one.
FOLD = 2.8e-9
#: Seconds a byte of tensors that outgrow the core's cache and of others; more where it is written; of what a task keeps
#: for itself (results it reads where they are written).
FAR, NEAR, WRITTEN, HELD = 5.9e-11, 4.8e-11, 7e-11, 1e-10
#: Seconds of a run of neighbours of a tensor that outgrows the cache, and of a task.
RUN, TASK = 2.3e-9, 4e-8
#: Element types that generic kernels compute in vectors.
IN_VECTORS: Final = frozenset(("float32", "float16"))


def plain(operator: ROperator) -> bool:
    """Whether an operator is maps and reductions alone. Of a range of lengths the core prices the tiles, length by length."""
    return not operator.endings and all(c.kind in ("map", "reduction") for c in operator.computes)


def task_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Predicted seconds of a full task of a tiled operator on one core."""
    types, inside = binding.types, {c.name for c in operator.computes}
    boxes, total = operator.boxes(operator.inner_box(), types), TASK
    total += sum(_computed(c, boxes[c.name], device.vector) for c in operator.computes if c.name in boxes)
    memory, cache = device.layer("device"), device.layer("veu").capacity
    for name, box in boxes.items():
        if name not in inside or name in operator.outputs:
            kind = types[name]
            far = math.prod(kind.shape) * itemsize(kind.dtype) > cache
            byte = (FAR if far else NEAR) + (WRITTEN if name in operator.outputs else 0.0)
            total += box_bytes(box, kind, memory.transaction) * byte + far * _runs(box, kind.shape)[1] * RUN
    held = {e.producer for e in operator.connections if e.layer == "veu"} - set(operator.outputs)
    return total + sum(_points(boxes[n]) * itemsize(types[n].dtype) for n in held if n in boxes) * HELD


def _points(box: Box) -> int:
    return math.prod([high - low for low, high in box])


def _computed(c: Compute, box: Box, lanes: int) -> float:
    """Seconds to compute a box: along the innermost axis that it reads, or that it writes."""
    run, count = _runs(box, c.shape)
    taps, work = math.prod(r.extent for r in c.reduce), max(1, c.flops_per_point)
    vector, element = VECTOR + VECTOR_FLOP * work, ELEMENT + VECTOR_FLOP * (work - 1)
    if c.dtype not in IN_VECTORS:
        return run * count * taps * element
    if c.reduce and any(load.indices and load.indices[-1] == Ref(c.reduce[-1].name) for load in c.loads):
        whole, rest = divmod(c.reduce[-1].extent, lanes)
        rows = run * count * taps // max(1, c.reduce[-1].extent)
        return rows * (whole * vector + rest * element + FOLD)
    return count * taps * (-(-run // lanes) * vector if run >= lanes else run * element)


def _runs(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """The length of a box's runs of neighbouring elements of a tensor, and how many there are."""
    run, count, whole = 1, 1, True
    for (low, high), extent in zip(box[::-1], shape[::-1], strict=True):
        if whole:
            run, whole = run * (high - low), high - low == extent
        else:
            count *= high - low
    return run, count
