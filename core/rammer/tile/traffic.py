"""Footprint and traffic of one task, the two figures that rank tiles (Welder, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rammer.ir.compute import Box
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType, itemsize

__all__ = ["TaskCost", "task_cost"]

#: One vEU alone may draw this many times its fair share of the device's bandwidth: a few cores saturate a
#: memory controller. Measured on devices with a clock; this value only ranks tiles before tuning.
LONE_BANDWIDTH_SHARE = 4.0


@dataclass(frozen=True, slots=True)
class TaskCost:
    """Cost of one full-size task: bytes moved through the device layer (rounded up to transactions),
    bytes of vEU memory, FLOP, and the predicted seconds alone and with all vEUs busy."""

    traffic: int
    footprint: int
    flops: int
    alone: float
    crowded: float

    def total(self, tasks: int, device: VDevice) -> float:
        """Predicted seconds for ``tasks`` tasks on the whole device, one launch included."""
        rounds, rest = divmod(tasks, device.veus)
        partial = self.alone + (self.crowded - self.alone) * rest / device.veus if rest else 0.0
        return rounds * self.crowded + partial + device.launch


def box_bytes(box: Box, tensor: TensorType, transaction: int) -> int:
    """Bytes of the coalesced transactions that read ``box`` of a row-major ``tensor``."""
    run, outer, merged = itemsize(tensor.dtype), 1, True
    for (low, high), extent in zip(box[::-1], tensor.shape[::-1], strict=True):
        size = high - low
        if merged:
            run *= size
            merged = size == extent
        else:
            outer *= size
    return outer * -(-run // transaction) * transaction


def task_cost(operator: ROperator, types: Mapping[str, TensorType], device: VDevice) -> TaskCost:
    """Cost of a full tile in the middle of the operator, recomputation in overlapping tiles included."""
    return box_cost(operator, operator.inner_box(), types, device)


def box_cost(operator: ROperator, output: Box, types: Mapping[str, TensorType], device: VDevice) -> TaskCost:
    """Cost of a task that writes the box ``output``, whatever the operator's tile."""
    boxes = operator.boxes(output, types)
    inside = {c.name for c in operator.computes}
    memory = device.layer("device")
    traffic = work = 0
    for name, box in boxes.items():
        if name not in inside or name in operator.outputs:
            traffic += box_bytes(box, types[name], memory.transaction)
    for c in operator.computes:
        own = boxes.get(c.name)
        if own is not None:
            points = math.prod([hi - lo for lo, hi in own]) * math.prod([r.extent for r in c.reduce])
            work += points * max(1, c.flops_per_point)
    kept, capacity = footprint(operator, boxes, types, device), device.layer("veu").capacity
    traffic += 2 * max(0, kept - capacity) if device.spills and capacity else 0  # written, and read again
    share = memory.bandwidth / device.veus
    compute_time = work / device.flops
    alone = device.dispatch + max(compute_time, traffic / (share * min(device.veus, LONE_BANDWIDTH_SHARE)))
    crowded = device.dispatch + max(compute_time, traffic / share)
    return TaskCost(traffic, kept, work, alone, crowded)


def footprint(operator: ROperator, boxes: Mapping[str, Box], types: Mapping[str, TensorType], device: VDevice) -> int:
    """Bytes of vEU memory one task needs: tiles connected there, and all it reads where the device stages."""
    inside = {c.name: c for c in operator.computes}
    held = {c.producer for c in operator.connections if c.layer == "veu"}
    total = 0
    for name, box in boxes.items():
        staged = device.staged and (name not in inside or name in operator.outputs)
        if name in held or staged:
            total += math.prod([hi - lo for lo, hi in box]) * itemsize(types[name].dtype)
    return total
