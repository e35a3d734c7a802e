"""Footprint and traffic of one task at every memory layer of a device, the figures that rank tiles (Welder, section 4.3).

Traffic of the device layer is whole transactions on the tensors' real strides. Traffic of the vEU's layer, and of layers between
the two, is the operands and tiles that the threads load and store there; products reuse what their register tile holds. Only the
device's layers decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rammer.ir.compute import Box, Compute, contraction_operands
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator, last_readers, place_tiles
from rammer.ir.program import Storage
from rammer.ir.types import TensorType, itemsize, row_major

__all__ = ["LayerUse", "TaskCost", "task_cost"]

#: Tensors in the row-major order of their types.
DENSE: Final[Mapping[str, Storage]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LayerUse:
    """The use of one memory layer by a task: bytes read from it and written to it, and bytes that it holds at once (of the
    thread's layer: for one thread). ``read`` over the bytes of the layer below that fill it is the layer's reuse."""

    name: str
    read: int
    written: int
    footprint: int

    @property
    def traffic(self) -> int:
        """The bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True, slots=True)
class TaskCost:
    """The cost of one full-size task.

    ``layers`` are the uses of the device's layers from the device's on. ``traffic`` is the bytes through the device layer
    (rounded up to transactions), ``footprint`` the bytes of vEU memory. ``alone`` and ``crowded`` are predicted seconds on an
    idle device and with all vEUs busy, ``on_chip`` those of which the layers above the device's need."""

    traffic: int
    footprint: int
    flops: int
    alone: float
    crowded: float
    on_chip: float
    layers: tuple[LayerUse, ...] = ()

    def total(self, tasks: int, device: VDevice) -> float:
        """Return predicted seconds for ``tasks`` tasks on the whole device, one launch included."""
        rounds, rest = divmod(tasks, device.veus)
        partial = self.alone + (self.crowded - self.alone) * rest / device.veus if rest else 0.0
        return rounds * self.crowded + partial + device.launch


class StridedTensor:
    """A stored tensor whose boxes are read and written in whole transactions of ``transaction`` bytes."""

    def __init__(self, tensor: TensorType, strides: Sequence[int], transaction: int) -> None:
        self.item, self.transaction = itemsize(tensor.dtype), transaction
        axes = [(abs(s), d) for d, (s, n) in enumerate(zip(strides, tensor.shape, strict=True)) if n != 1 and s]
        self.axes = sorted(axes, key=lambda axis: axis[0])

    def box_bytes(self, box: Box) -> int:
        """Return the bytes of the coalesced transactions that read or write ``box``."""
        size, line = self.item, self.transaction
        moved = 0  # 0: the elements so far are adjacent, and are ``size`` bytes; else bytes in whole transactions
        for stride, d in self.axes:
            low, high = box[d]
            count, pitch = high - low, stride * self.item
            if count < 1:
                return 0
            if count == 1:
                continue
            if not moved and pitch == size:
                size *= count
                continue
            moved = moved or -(-size // line) * line
            reach = (count - 1) * pitch + size  # neighbours within one transaction share it
            moved = min(moved * count, -(-reach // line) * line) if pitch < line else moved * count
            size = reach
        return moved or -(-size // line) * line


def box_bytes(box: Box, tensor: TensorType, transaction: int) -> int:
    """Return the bytes of the coalesced transactions that read ``box`` of a row-major ``tensor``."""
    return StridedTensor(tensor, row_major(tensor.shape), transaction).box_bytes(box)


def task_cost(
    operator: ROperator, types: Mapping[str, TensorType], device: VDevice, storages: Mapping[str, Storage] = DENSE
) -> TaskCost:
    """Return the cost of a full tile in the middle of the operator, with recomputation in overlapping tiles."""
    return BoxPrices(operator, types, device, storages).cost(operator.inner_box())


class BoxPrices:
    """Task prices of one operator for any tile. Values that do not depend on the box are precomputed, since a search tries dozens
    of tiles."""

    def __init__(
        self, operator: ROperator, types: Mapping[str, TensorType], device: VDevice, storages: Mapping[str, Storage] = DENSE
    ) -> None:
        self.operator, self.types, self.device = operator, types, device
        self.memory, self.held = device.layer("device"), device.tile_layers
        line, writes = self.memory.transaction, {*operator.outputs}
        self.stored = {n: (_strided(n, types[n], storages, line), n in writes) for n in (*operator.inputs, *operator.outputs)}
        self.tiles = _TaskTiles(operator, types, device)
        inlined = {e.producer for e in operator.connections if e.layer == "thread"}
        self.registers = _register_bytes(operator, types) if inlined else 0
        self.work = list[tuple[str, float, float]]()
        self.loads: list[list[tuple[str, float]]] = [[] for _ in self.held]  # by layer: Compute, bytes of operands for each point
        place = {m.scope: k for k, m in enumerate(self.held)}
        for c in operator.computes:
            depth = math.prod([r.extent for r in c.reduce])
            rate = device.flops if c.kind == "contraction" and c.decoded is None else device.map_flops or device.flops
            loads = [(ld.tensor, itemsize(types[ld.tensor].dtype)) for ld in c.loads if ld.tensor not in inlined]
            reuse = _register_reuse(c, depth, device, max((size for _, size in loads), default=1))
            for k in range(len(self.held)):
                sizes = [size for name, size in loads if place[operator.held.get(name, "veu")] == k]
                if sizes:
                    self.loads[k].append((c.name, depth * sum(sizes) / reuse))
            self.work.append((c.name, depth * max(1, c.flops_per_point), rate))

    def cost(self, output: Box) -> TaskCost:
        """Return the cost of a task that writes the box ``output``."""
        boxes, device = self.operator.boxes(output, self.types), self.device
        read = written = 0
        work = seconds = 0.0
        for name, (stored, is_written) in self.stored.items():
            if name in boxes:
                size = stored.box_bytes(boxes[name])
                read, written = (read, written + size) if is_written else (read + size, written)
        for name, each, rate in self.work:
            if name in boxes:
                points = box_points(boxes[name])
                work += points * each
                busy = min(points, device.threads) / device.threads if device.staged and points else 1.0
                seconds += points * each / rate / busy
        uses, on_chip, spilled = list[LayerUse](), 0.0, 0
        for k, (layer, (held, kept)) in enumerate(zip(self.held, self.tiles.footprint(boxes), strict=True)):
            loaded = sum([box_points(boxes[name]) * each for name, each in self.loads[k] if name in boxes])
            over, stores, held = spilled, kept + spilled + (0 if k else read + written), held + spilled
            spilled = max(0, held - layer.share) if device.spills and layer.share else 0
            uses.append(LayerUse(layer.name, round(loaded) + over, stores, held))
            on_chip = max(on_chip, (loaded + over + stores) / (layer.bandwidth / device.veus))
        traffic = read + written + 2 * spilled  # bytes that spill are written to the layer below and read again
        share = self.memory.bandwidth / device.veus
        busy_chip = max(seconds, on_chip)
        low, high = traffic / (share * min(device.veus, self.memory.lone)), traffic / share
        # A task of a staged device has its operands before it starts.
        alone, crowded = (low + busy_chip, high + busy_chip) if device.staged else (max(low, busy_chip), max(high, busy_chip))
        below = LayerUse(self.memory.name, read + spilled, written + spilled, read + written)
        registers = device.layer("thread")
        threads = (LayerUse(registers.name, 0, 0, self.registers),) if registers is not self.held[0] else ()
        return TaskCost(
            traffic,
            uses[0].footprint,
            round(work),
            device.dispatch + alone,
            device.dispatch + crowded,
            on_chip,
            (below, *reversed(uses), *threads),
        )

    def fits(self, cost: TaskCost, spilled: bool = False) -> bool:
        """Return True if the task fits at every layer on chip; layers of capacity 0 are not modelled. A ``spilled`` task may
        exceed the layers that hold tiles, but not a thread's registers."""
        registers = self.device.layer("thread")
        fits = registers is self.held[0] or not registers.capacity or self.registers <= registers.capacity
        uses = cost.layers[len(self.held) : 0 : -1]
        return fits and (spilled or all(not m.share or use.footprint <= m.share for m, use in zip(self.held, uses, strict=True)))


def _strided(name: str, tensor: TensorType, storages: Mapping[str, Storage], line: int) -> StridedTensor:
    place = storages.get(name)
    strides = place.strides if place is not None and len(place.strides) == len(tensor.shape) else row_major(tensor.shape)
    return StridedTensor(tensor, strides, line)


def _register_bytes(operator: ROperator, types: Mapping[str, TensorType]) -> int:
    """Return the bytes that a thread holds of one element: the most values that a Compute reads in place, and its own."""
    inside = {(e.producer, e.consumer) for e in operator.connections if e.layer == "thread"}
    each = [
        sum(itemsize(types[n].dtype) for n in {ld.tensor for ld in c.loads} if (n, c.name) in inside) for c in operator.computes
    ]
    return max(size + itemsize(c.dtype) for size, c in zip(each, operator.computes, strict=True) if size)


def _register_reuse(c: Compute, depth: int, device: VDevice, item: int) -> float:
    """Return how often a thread uses an operand of ``c``, of at most ``item`` bytes, that it has loaded from a tile.

    A product loads each operand once for a register tile of m x n sums, where m * n + m + n values fit in a thread's registers.
    A device without a layer of registers feeds its products from the vEU's memory directly, which its peak includes."""
    if c.kind != "contraction" or contraction_operands(c) is None:
        return 1.0
    registers = device.layer("thread")
    if registers.scope != "thread":
        return math.inf
    return max(1, math.isqrt(max(registers.capacity // item, 0) + 1) - 1) if registers.capacity else depth


def box_points(box: Box) -> int:
    """Return the number of elements of ``box``."""
    points = 1
    for low, high in box:
        points *= high - low
    return points


class _TaskTiles:
    """The tensors that a task holds on chip: tiles of connected Computes, placed by liveness as generated code places them, and
    on staged devices all operands and results, in the vEU's memory."""

    def __init__(self, operator: ROperator, types: Mapping[str, TensorType], device: VDevice) -> None:
        stored = {*operator.inputs, *operator.outputs}
        self.whole = [(n, itemsize(types[n].dtype)) for n in sorted(stored)] if device.staged else []
        results = {*operator.outputs} if device.staged else set()
        tiles = [c for c in operator.computes if c.name in operator.held and c.name not in results]
        self.staged = [(c.name, itemsize(c.dtype)) for c in tiles]
        self.last = last_readers(operator, [n for n, _ in self.staged])
        self.inside = [[operator.held[c.name] == m.scope for c in tiles] for m in device.tile_layers]

    def footprint(self, boxes: Mapping[str, Box]) -> list[tuple[int, int]]:
        """Return, for each layer from the vEU's down, the bytes held at once, and the bytes of all connected tiles."""
        tiles = [box_points(boxes[n]) * size if n in boxes else 0 for n, size in self.staged]
        held = sum([box_points(boxes[n]) * size for n, size in self.whole if n in boxes])
        result = list[tuple[int, int]]()
        for inside in self.inside:
            own = tiles if all(inside) else [t if here else 0 for t, here in zip(tiles, inside, strict=True)]
            last = [final if here else -1 for final, here in zip(self.last, inside, strict=True)]
            offsets = place_tiles(own, last) if len(own) > 1 else [0] * len(own)
            result.append((held + max((o + t for o, t in zip(offsets, own, strict=True)), default=0), sum(own)))
            held = 0
        return result


def least_task_seconds(operator: ROperator, types: Mapping[str, TensorType], device: VDevice) -> float:
    """Return the least seconds of a full-size task by any kernel: the vEU's memory moves every operand and result once, but of an
    operand at most the elements that the task loads."""
    boxes = operator.boxes(operator.inner_box(), types)
    loads = dict.fromkeys(operator.inputs, 0)
    for c in operator.computes:
        points = box_points(boxes[c.name]) * math.prod([r.extent for r in c.reduce]) if c.name in boxes else 0
        for load in c.loads:
            if load.tensor in loads:
                loads[load.tensor] += points
    moved = {n: min(box_points(boxes[n]), most) for n, most in loads.items() if n in boxes}
    moved |= {n: box_points(boxes[n]) for n in operator.outputs if n in boxes}
    nbytes = sum(points * itemsize(types[n].dtype) for n, points in moved.items())
    return nbytes / (device.tile_layers[0].bandwidth / device.veus)


def task_footprint(operator: ROperator, boxes: Mapping[str, Box], types: Mapping[str, TensorType], device: VDevice) -> int:
    """Return the bytes of vEU memory of one task: connected tiles, and on staged devices all accessed tensors."""
    return _TaskTiles(operator, types, device).footprint(boxes)[0][0]
