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

#: Maximum bandwidth of one busy vEU, as a multiple of its fair share: few cores saturate a memory controller. Measured on devices
#: with a clock; this value only ranks tiles before tuning.
LONE_BANDWIDTH_SHARE = 4.0


@dataclass(frozen=True, slots=True)
class TaskCost:
    """The cost of one full-size task.

    ``traffic`` is the bytes through the device layer (rounded up to transactions), ``footprint`` the bytes of vEU memory.
    ``alone`` and ``crowded`` are predicted seconds on an idle device and with all vEUs busy."""

    traffic: int
    footprint: int
    flops: int
    alone: float
    crowded: float

    def total(self, tasks: int, device: VDevice) -> float:
        """Return predicted seconds for ``tasks`` tasks on the whole device, one launch included."""
        rounds, rest = divmod(tasks, device.veus)
        partial = self.alone + (self.crowded - self.alone) * rest / device.veus if rest else 0.0
        return rounds * self.crowded + partial + device.launch


def box_bytes(box: Box, tensor: TensorType, transaction: int) -> int:
    """Return the bytes of the coalesced transactions that read ``box`` of a row-major ``tensor``."""
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
    """Return the cost of a full tile in the middle of the operator, with recomputation in overlapping tiles."""
    return BoxPrices(operator, types, device).cost(operator.inner_box())


class BoxPrices:
    """Task prices of one operator for any tile. Values that do not depend on the box are precomputed, since a search tries dozens
    of tiles."""

    def __init__(self, operator: ROperator, types: Mapping[str, TensorType], device: VDevice) -> None:
        self.operator, self.types, self.device = operator, types, device
        self.memory, self.capacity = device.layer("device"), device.layer("veu").capacity
        self.stored = _memory_tensors(operator)
        self.kept = _on_chip_itemsizes(operator, types, device, self.stored)
        self.work = [(c.name, math.prod([r.extent for r in c.reduce]) * max(1, c.flops_per_point)) for c in operator.computes]

    def cost(self, output: Box) -> TaskCost:
        """Return the cost of a task that writes the box ``output``."""
        boxes, device, memory = self.operator.boxes(output, self.types), self.device, self.memory
        traffic = work = 0
        for name, box in boxes.items():
            if name in self.stored:
                traffic += box_bytes(box, self.types[name], memory.transaction)
        for name, each in self.work:
            if name in boxes:
                work += _box_points(boxes[name]) * each
        kept = sum([_box_points(box) * self.kept[name] for name, box in boxes.items() if name in self.kept])
        # Spilled bytes are written and read again.
        traffic += 2 * max(0, kept - self.capacity) if device.spills and self.capacity else 0
        share = memory.bandwidth / device.veus
        compute_time = work / device.flops
        alone = device.dispatch + max(compute_time, traffic / (share * min(device.veus, LONE_BANDWIDTH_SHARE)))
        crowded = device.dispatch + max(compute_time, traffic / share)
        return TaskCost(traffic, kept, work, alone, crowded)


def _box_points(box: Box) -> int:
    points = 1
    for low, high in box:
        points *= high - low
    return points


def _memory_tensors(operator: ROperator) -> set[str]:
    return {*operator.inputs, *operator.outputs}


def _on_chip_itemsizes(operator: ROperator, types: Mapping[str, TensorType], device: VDevice, stored: set[str]) -> dict[str, int]:
    """Return the element size of each tensor that a task holds in its vEU's memory."""
    held = {c.producer for c in operator.connections if c.layer == "veu"}
    return {name: itemsize(types[name].dtype) for name in (held | stored if device.staged else held)}


def task_footprint(operator: ROperator, boxes: Mapping[str, Box], types: Mapping[str, TensorType], device: VDevice) -> int:
    """Return the bytes of vEU memory of one task: connected tiles, and on staged devices all accessed tensors."""
    kept = _on_chip_itemsizes(operator, types, device, _memory_tensors(operator))
    return sum([_box_points(box) * kept[name] for name, box in boxes.items() if name in kept])
