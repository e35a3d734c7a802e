"""Cycle accounts: the cost of a superstep on the chip, from its tasks' exact boxes.

Compute: the time of a task is the longer of its arithmetic and its local memory traffic. Tiles run their tasks sequentially, and
the slowest tile counts. Exchange: the tile that receives or sends most counts. A box that several tasks share is sent once (the
fabric broadcasts) and received by each. Every exchange starts with a chip-wide sync.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.operator import last_readers, place_tiles
from rammer.ir.program import Storage
from rammer.ir.types import TensorType, itemsize

from rammer_ipu_sim.batch import output_spans
from rammer_ipu_sim.chip import Chip
from rammer_ipu_sim.memory import Home
from rammer_ipu_sim.spans import Numbers, Spans, axis_spans, constant_grid, join_boxes, load_spans, propagate_boxes, written_boxes
from rammer_ipu_sim.supersteps import Batch

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True)
class TaskCosts:
    """The costs per task of a batch (arrays over its grid): bytes delivered, written and stored locally; cycles."""

    received: Numbers
    written: Numbers
    footprint: Numbers
    compute: Counts


@dataclass(frozen=True, slots=True)
class StepCycles:
    """The cycles of one superstep by phase. ``rounds`` > 1 if the tasks' boxes do not fit in a tile at once. ``streamed`` is the
    number of bytes from host memory."""

    operators: tuple[str, ...]
    tasks: int
    rounds: int
    compute: int
    exchange: int
    sync: int
    stream: int
    streamed: int = 0

    @property
    def total(self) -> int:
        """The sum of all cycles."""
        return self.compute + self.exchange + self.sync + self.stream


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """The compute interval of a task: cycles since the start of its superstep's compute phases."""

    operator: str
    index: int
    tile: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class OutsideBox:
    """The box of an outside ``tensor`` that one load needs, for every task."""

    tensor: str
    box: Spans


@dataclass(frozen=True, slots=True)
class ExactBoxes:
    """The clipped boxes of a batch: of all Computes, of their loads of outside tensors, and of each output."""

    spans: dict[str, Spans]
    reads: list[OutsideBox]
    written: dict[str, Spans]


def exact_boxes(batch: Batch, types: Mapping[str, TensorType]) -> ExactBoxes:
    """Return exactly the boxes that the tasks of a batch compute and read."""
    rank, operator = len(batch.coordinates), batch.operator
    inside = {c.name for c in operator.computes}
    output = output_spans(batch, clip=True)
    spans = propagate_boxes(operator, output, types, clip=True)
    reads = []
    for c in operator.computes:
        if c.name in spans:
            axes = axis_spans(c, spans[c.name], rank)
            for load in c.loads:
                if load.tensor not in inside:
                    box = load_spans(load, axes, types[load.tensor].shape, rank, clip=True)
                    reads.append(OutsideBox(load.tensor, box))
    return ExactBoxes(spans, reads, written_boxes(operator, output))


def box_elements(spans: Spans, rank: int) -> Numbers:
    """Return the number of elements of a box, per task."""
    if not spans:
        return constant_grid(1, rank)
    result = spans[0].size
    for s in spans[1:]:
        result = result * s.size
    return result


def task_costs(batch: Batch, types: Mapping[str, TensorType], chip: Chip) -> TaskCosts:
    """Return the costs of every task of the batch."""
    return _count_costs(batch, exact_boxes(batch, types), types, chip)


def _count_costs(batch: Batch, boxes: ExactBoxes, types: Mapping[str, TensorType], chip: Chip) -> TaskCosts:
    operator, rank, spans = batch.operator, len(batch.coordinates), boxes.spans
    received = _received_bytes(boxes.reads, types, rank)
    stored = sum((box_elements(box, rank) * itemsize(types[n].dtype) for n, box in boxes.written.items()), constant_grid(0, rank))
    footprint = received + _local_bytes(batch, spans, types)
    compute: Counts = np.full((1,) * rank, float(chip.launch_cycles))
    for c in operator.computes:
        if c.name in spans:
            compute = compute + _arithmetic_cycles(c, box_elements(spans[c.name], rank), chip)
    compute = np.maximum(compute, (received + stored) / chip.local_bytes)
    return TaskCosts(*(np.broadcast_to(a, batch.tasks.shape) for a in (received, stored, footprint, compute)))


def _received_bytes(reads: Sequence[OutsideBox], types: Mapping[str, TensorType], rank: int) -> Numbers:
    groups: dict[str, list[Spans]] = {}
    for read in reads:
        groups.setdefault(read.tensor, []).append(read.box)
    total = constant_grid(0, rank)
    for tensor, boxes in groups.items():
        total = total + _delivered_elements(boxes, rank) * itemsize(types[tensor].dtype)
    return total


def _local_bytes(batch: Batch, spans: Mapping[str, Spans], types: Mapping[str, TensorType]) -> Numbers:
    """Return the bytes of output tiles, and of the largest interior tiles placed by liveness, in local memory."""
    operator, rank = batch.operator, len(batch.coordinates)
    total = constant_grid(0, rank)
    for name in sorted(set(operator.outputs) & set(spans)):
        total = total + box_elements(spans[name], rank) * itemsize(types[name].dtype)
    held = {c.producer for c in operator.connections if c.layer == "veu"} - {*operator.outputs}
    staged = [c for c in operator.computes if c.name in held]
    sizes = [int(box_elements(spans[c.name], rank).max(initial=0)) * itemsize(c.dtype) if c.name in spans else 0 for c in staged]
    offsets = place_tiles(sizes, last_readers(operator, [c.name for c in staged]))
    return total + max((o + s for o, s in zip(offsets, sizes, strict=True)), default=0)


def _delivered_elements(boxes: list[Spans], rank: int) -> Numbers:
    """Return the elements delivered for loads of one tensor: their hull, or the separate boxes if these are smaller."""
    hull = boxes[0]
    for box in boxes[1:]:
        hull = join_boxes(hull, box)
    separately = sum((box_elements(b, rank) for b in boxes[1:]), box_elements(boxes[0], rank))
    return np.minimum(box_elements(hull, rank), separately)


def _arithmetic_cycles(c: Compute, points: Numbers, chip: Chip) -> Counts:
    """Return the cycles of ``points`` outputs of ``c``: fewer outputs than threads leave issue slots empty."""
    each = max(1, ex.count_flops(c.body) + (1 if c.reduce else 0)) * math.prod(r.extent for r in c.reduce)
    rate = chip.matrix_flops if c.kind == "contraction" and c.decoded is None else chip.vector_flops
    busy = np.maximum(np.minimum(points, chip.threads), 1) / chip.threads
    return np.asarray(points * each / rate / busy, dtype=np.float64)


class Accountant:
    """A tile-by-tile counter of a superstep's cycles. ``staging`` is a tile's remaining memory for tasks (bytes)."""

    def __init__(
        self,
        chip: Chip,
        homes: Mapping[str, Home],
        storages: Mapping[str, Storage],
        types: Mapping[str, TensorType],
        staging: int,
    ) -> None:
        self.chip, self.homes, self.storages, self.types, self.staging = chip, homes, storages, types, staging

    def superstep(self, whole: Sequence[Batch], streamed: int = 0) -> StepCycles:
        """Return the cycles of the batches of one superstep, during which ``streamed`` bytes come from the host."""
        boxes = [exact_boxes(b, self.types) for b in whole]
        veus, parts, rounds = self._place_tasks(whole, boxes)
        count = int(rounds.max(initial=0)) + 1
        place = rounds * self.chip.tiles + veus
        size = count * self.chip.tiles

        def by_round(values: Any) -> Any:
            return np.bincount(place, weights=values, minlength=size).reshape(count, -1).max(axis=1).sum()

        sent, stored = self._peak_home_traffic(whole, boxes)
        exchange = max(by_round(parts["received"]), sent) + max(by_round(parts["written"]), stored)
        stream = math.ceil(streamed / self.chip.host_bytes * self.chip.clock)
        return StepCycles(
            tuple(dict.fromkeys(b.operator.name for b in whole)),
            len(veus),
            count,
            math.ceil(by_round(parts["compute"])),
            math.ceil(exchange / self.chip.exchange_bytes),
            2 * count * self.chip.sync_cycles,
            stream,
            streamed,
        )

    def compute_times(self, whole: Sequence[Batch]) -> list[ComputeTime]:
        """Return the compute interval of each task of a superstep, in cycles since the start of its compute phases. The compute
        phases are drawn consecutively: round after round, the tasks of a tile in row order."""
        veus, parts, rounds = self._place_tasks(whole, [exact_boxes(b, self.types) for b in whole])
        orders = np.concatenate([b.orders.ravel() for b in whole])
        names = [(b.operator.name, int(i)) for b in whole for i in b.tasks.ravel()]
        begun, done, now, result = 0.0, dict[int, float](), -1, list[ComputeTime]()
        for i in np.lexsort((orders, veus, rounds)):
            if rounds[i] != now:
                begun, done, now = max(done.values(), default=begun), {}, rounds[i]
            tile = int(veus[i])
            start = done.get(tile, begun)
            done[tile] = start + float(parts["compute"][i])
            name, index = names[i]
            result.append(ComputeTime(name, index, tile, start, done[tile]))
        return result

    def _place_tasks(self, whole: Sequence[Batch], boxes: Sequence[ExactBoxes]) -> tuple[Numbers, dict[str, Any], Numbers]:
        """Return the tiles of all tasks, their costs by field of TaskCosts, and their rounds."""
        costs = [_count_costs(b, made, self.types, self.chip) for b, made in zip(whole, boxes, strict=True)]
        veus = np.concatenate([b.veus.ravel() for b in whole])
        orders = np.concatenate([b.orders.ravel() for b in whole])
        parts = {
            k: np.concatenate([getattr(c, k).ravel() for c in costs]) for k in ("received", "written", "footprint", "compute")
        }
        return veus, parts, self._assign_rounds(veus, orders, parts["footprint"])

    def _assign_rounds(self, veus: Numbers, orders: Numbers, footprint: Numbers) -> Numbers:
        """Return the round of each task: a tile stages as many tasks at once, in row order, as fit."""
        rounds = np.zeros(len(veus), dtype=np.int64)
        full = np.bincount(veus, weights=footprint, minlength=self.chip.tiles)
        if full.max(initial=0) <= self.staging:
            return rounds
        used: dict[int, tuple[int, int]] = {}
        for i in np.argsort(orders, kind="stable"):
            tile, need = int(veus[i]), int(footprint[i])
            number, taken = used.get(tile, (0, 0))
            if taken and taken + need > self.staging:
                number, taken = number + 1, 0
            used[tile] = (number, taken + need)
            rounds[i] = number
        return rounds

    def _peak_home_traffic(self, whole: Sequence[Batch], boxes: Sequence[ExactBoxes]) -> tuple[float, float]:
        """Return the maximum bytes that one home tile sends, and that one receives back."""
        sent, stored = np.zeros(self.chip.tiles), np.zeros(self.chip.tiles)
        for made in boxes:
            for read in made.reads:
                self._spread_bytes(sent, read.tensor, read.box)
            for name, box in made.written.items():
                self._spread_bytes(stored, name, box)
        return float(sent.max()), float(stored.max())

    def _spread_bytes(self, tiles: Counts, name: str, box: Spans) -> None:
        """Add the bytes of all distinct boxes of a tensor, spread evenly over the home tiles that they cover."""
        storage = self.storages[name]
        if storage.buffer not in self.homes:
            return
        home = self.homes[storage.buffer]
        low = [int(s.low.min(initial=0)) for s in box]
        high = [int(s.high.max(initial=-1)) for s in box]
        if any(b < a for a, b in zip(low, high, strict=True)):
            return
        ends = [(a * s, b * s) for a, b, s in zip(low, high, storage.strides, strict=True)]
        first = (storage.offset + sum(min(e) for e in ends)) // home.block
        last = (storage.offset + sum(max(e) for e in ends)) // home.block
        different = box_elements(box, box[0].low.ndim if box else 0).sum() if box else 1
        tiles[first : last + 1] += float(different) * itemsize(self.types[name].dtype) / (last - first + 1)


#: Columns of the cycle table: field of StepCycles and width.
COLUMNS = (("tasks", 7), ("rounds", 6), ("compute", 10), ("exchange", 10), ("sync", 8), ("stream", 10))


def cycle_report(steps: Sequence[StepCycles], chip: Chip) -> str:
    """Return the cycle table of a program, with one line per superstep and a total."""
    head = " ".join(f"{name:>{width}}" for name, width in COLUMNS)
    lines = [str(chip), f"{'step':>5} {head}  operators"]
    for number, step in enumerate(steps):
        figures = " ".join(f"{getattr(step, name):>{width}}" for name, width in COLUMNS)
        more = len(step.operators) - 4
        names = ", ".join(step.operators[:4]) + (f" and {more} more" if more > 0 else "")
        lines.append(f"{number:>5} {figures}  {names}")
    sums = " ".join(f"{sum(getattr(s, name) for s in steps):>{width}}" for name, width in COLUMNS)
    cycles = sum(s.total for s in steps)
    lines += [f"total {sums}", f"{cycles} cycles, {cycles / chip.clock * 1e6:.1f} us simulated"]
    return "\n".join(lines)
