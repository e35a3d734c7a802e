"""Execution of an rProgram superstep by superstep on the simulated chip."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.device.manifest import Array, Bound, Loaded, RunResult
from rammer.device.shared_constants import ConstantForm, SharedConstants, WantedForm, form_of
from rammer.errors import BadInput, DeviceFailure
from rammer.ir import expr as ex
from rammer.ir.compute import contraction_operands
from rammer.ir.constants import as_array, in_memory, parts_of
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.program import MoveTime, RProgram
from rammer.ir.types import itemsize
from rammer.runtime.host_bound import HostBound, HostRuns
from rammer.runtime.host_memory import is_whole_buffer as whole
from rammer.verify.multi_device import CROSSING

from rammer_ipu_sim.batch import BatchPlan, plan_batch
from rammer_ipu_sim.chip import Chip
from rammer_ipu_sim.chips import ChipClock, ChipMemories, ChipStep, Played, chips_report, homes_of, over_chips
from rammer_ipu_sim.cycles import Accountant, StepCycles, cycle_report, task_costs
from rammer_ipu_sim.deliver import fill_outside, gather_boxes, scatter_tiles, tensor_view
from rammer_ipu_sim.memory import Home, HomeMemory, make_poisoned, peak_tile_bytes
from rammer_ipu_sim.supersteps import (
    Batch,
    Fill,
    group_batches,
    halve_batch,
    isolate_task,
    lengths_of,
    mask_batch,
    mask_tasks,
    split_supersteps,
)

#: Number of length sets whose superstep plans are cached.
PLANNED = 4
#: A superstep in which all tiles are past their lengths.
IDLE = StepCycles((), 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Drop:
    """An injected fault: in ``superstep`` the transfer of ``operator``'s ``task`` for its ``load`` is lost. Loads are counted
    among those of tensors from outside the operator."""

    superstep: int
    operator: str
    task: int
    load: int


@dataclass(frozen=True, eq=False)
class HeldConstant:
    """The flat values of a constant's buffer, in the tiles or streamed."""

    values: Array


@dataclass(frozen=True)
class Superstep:
    """The plan of one superstep: batch plans, fills past the lengths of a run, and buffers that die with its reads. ``count``
    returns its cycles, with several chips by chip."""

    plans: tuple[BatchPlan, ...]
    fills: tuple[Fill, ...]
    dead: tuple[str, ...]
    count: Callable[[], StepCycles | ChipStep]

    @cached_property
    def chips(self) -> StepCycles | ChipStep:
        """The cycles, counted when first read: a run does not need them."""
        return self.count()

    @property
    def cycles(self) -> StepCycles:
        """The cycles, with several chips those of the slowest chip."""
        return self.chips.slowest if isinstance(self.chips, ChipStep) else self.chips


class LoadedProgram(Loaded):
    """A program resident in the simulated tiles. ``seconds`` of its runs are simulated."""

    def __init__(
        self,
        program: RProgram,
        constants: Mapping[str, Array],
        chip: Chip,
        stream: bool = True,
        drop_transfer: Drop | None = None,
        shared: SharedConstants[HeldConstant] | None = None,
    ) -> None:
        self.program, self.chip = program, chip
        self.clock = ChipClock(program, chip) if over_chips(program, chip) else None
        whole = _batch_supersteps(program, drop_transfer)
        self.streamed = self._choose_streamed(whole, stream)
        self.homes = self._assign_homes(self.streamed)
        self.constants = self._acquire_constants(constants, shared if shared is not None else SharedConstants())
        self.memory = (ChipMemories if self.clock else HomeMemory)(
            chip, self.homes, {n: held.values for n, held in self.constants.items()}
        )
        self.whole = whole
        self.supersteps = self._plan_supersteps()
        self.lengths = tuple(dict.fromkeys(n for o in program.operators for n in o.lengths))
        self.skipped = 0  #: Iterations below the maximum trip count that a run skips.
        self.shorter: dict[tuple[int, ...], list[Superstep]] = {}
        self.open = True

    # --- loading ------------------------------------------------------------------------------

    def _choose_streamed(self, whole: Sequence[Sequence[Batch]], stream: bool) -> frozenset[str]:
        """Return the constant buffers that stay in host memory. Raises DeviceFailure if streaming does not free enough memory."""
        computing = [[b for b in group if not self.clock or b.operator.family not in CROSSING] for group in whole]
        need, where = _largest_task(computing, self.program, self.chip)  # transfers copy from home to home
        names: set[str] = set()
        candidates = sorted((b for b in self.program.buffers if b.kind == "constant"), key=lambda b: (-b.size, b.name))
        while True:
            taken = peak_tile_bytes(self._assign_homes(names))
            if taken + need <= self.chip.sram:
                return frozenset(names)
            if not stream or not candidates:
                raise self._out_of_memory(need, where, taken, stream)
            excess = (taken + need - self.chip.sram) * self.chip.tiles
            while candidates and excess > 0:
                buffer = candidates.pop(0)
                names.add(buffer.name)
                excess -= buffer.nbytes

    def _assign_homes(self, streamed: Collection[str]) -> dict[str, Home]:
        return homes_of([b for b in self.program.buffers if b.name not in streamed], self.chip, self.clock is not None)

    def _out_of_memory(self, need: int, where: str, taken: int, stream: bool) -> DeviceFailure:
        limit = self.chip.sram
        what = f"out of memory: {where} needs {need} bytes besides {taken} bytes of buffers"
        hint = "use smaller tiles" if stream or need > limit else "allow streaming of constants, or use smaller tiles"
        return DeviceFailure(f"{what}; the limit is {limit} bytes", f"{self.program.name} on {self.chip}", hint)

    def _acquire_constants(
        self, constants: Mapping[str, Array], shared: SharedConstants[HeldConstant]
    ) -> dict[str, HeldConstant]:
        """Return the constants by buffer. Constants that fill their buffer may be shared with other programs."""
        own, wanted = dict[str, Array](), dict[str, WantedForm]()
        for name, value in parts_of(constants).items():
            if name not in self.program.storage:
                continue
            storage = self.program.storage[name]
            buffer = self.program.buffer[storage.buffer]
            if whole(storage, buffer) and buffer.kind == "constant" and value.dtype == np.dtype(buffer.dtype):
                wanted[buffer.name] = WantedForm(form_of(value, "", buffer.nbytes), value, _flatten_values)
            else:
                image = own.setdefault(buffer.name, make_poisoned((buffer.size,), buffer.dtype))
                tensor_view(image, storage)[...] = as_array(value)
        held = shared.take({w.form: w for w in wanted.values()}, _make_held_constants)
        return {n: held[w.form] for n, w in wanted.items()} | {n: HeldConstant(a) for n, a in own.items()}

    def _plan_supersteps(self) -> list[Superstep]:
        """Return the plan of all supersteps with all their tasks."""
        deaths = _dying_buffers(self.program, self.whole)
        return [
            Superstep(
                tuple([p for b in group for p in plan_within_memory(b, self.program)]),
                (),
                tuple(deaths.get(number, ())),
                partial(self._count_cycles, group),
            )
            for number, group in enumerate(self.whole)
        ]

    def _plan_shorter(self, point: Mapping[str, int]) -> list[Superstep]:
        """Return the plan of all supersteps without the tasks past the lengths of ``point``."""
        result = []
        for group, step in zip(self.whole, self.supersteps, strict=True):
            masked = [(plan, *mask_tasks(plan.batch, point)) for plan in step.plans]
            plans = tuple([plan.select(part, point) for plan, parts, _ in masked for part in parts])
            fills = tuple([fill for _, _, fills in masked for fill in fills])
            result.append(Superstep(plans, fills, step.dead, partial(self._count_cycles, group, point)))
        return result

    def _count_cycles(self, group: Sequence[Batch], point: Mapping[str, int] | None = None) -> StepCycles | ChipStep:
        """Return the cycles of a superstep, of its tasks at the lengths ``point``."""
        kept = group if point is None else [part for b in group for part in mask_batch(b, point)]
        used = {self.program.storage[n].buffer for b in kept for n in b.operator.inputs} & self.streamed
        if self.clock:
            return self.clock.step(kept, self.accountant, used)
        return self.accountant.superstep(kept, sum(self.program.buffer[n].nbytes for n in used)) if kept else IDLE

    @cached_property
    def accountant(self) -> Accountant:
        """Return an accountant for the cycles of supersteps, with the chip's free memory."""
        staging = self.chip.sram - peak_tile_bytes(self.homes)
        return Accountant(self.chip, self.homes, self.program.storage, self.program.types, staging)

    def at(self, inputs: Mapping[str, Array]) -> list[Superstep]:
        """Return the supersteps of a run with these inputs."""
        if not self.lengths:
            return self.supersteps
        point = lengths_of(self.program, self.lengths, inputs)
        key = tuple(point.values())
        if key not in self.shorter:
            if len(self.shorter) >= PLANNED:
                del self.shorter[next(iter(self.shorter))]
            self.shorter[key] = self._plan_shorter(point)
        return self.shorter[key]

    # --- running ------------------------------------------------------------------------------

    @property
    def kernels(self) -> int:
        """Number of supersteps of one run."""
        return len(self.supersteps) * self.program.turns + count_exchanges(self.program)

    @property
    def cycles(self) -> list[StepCycles]:
        """The cycles of every superstep."""
        return [s.cycles for s in self.supersteps]

    def report(self) -> str:
        """Return the cycle table, or the chips' table for several chips."""
        return cycle_report(self.cycles, self.chip) if self.clock is None else chips_report(self.clock, self.played())

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Execute one run; inputs by ONNX name. Raises BadInput for a missing input or a wrong type or shape."""
        if not self.open:
            raise DeviceFailure("the program was closed", self.program.name)
        for b in self.program.buffers:
            if b.kind not in ("constant", "state"):
                self.memory.poison(b.name)
        self._write_inputs(inputs)
        steps = self.at(inputs)
        with np.errstate(all="ignore"):
            moves, turns = self._turns(steps)
        outputs = {p.external: self._tensor(p.tensor).copy() for p in self.program.outputs}
        return RunResult(outputs, partial(self.seconds, steps, moves, turns), tuple(self._run_notes(steps, turns)))

    def seconds(self, steps: Sequence[Superstep], moves: int = 0, turns: int = 1) -> float:
        """Return the seconds of a run of ``turns`` iterations of ``steps``, with the cycles of its moves."""
        return self.played(steps).whole if self.clock else (moves + turns * sum(s.cycles.total for s in steps)) / self.chip.clock

    def played(self, steps: Sequence[Superstep] | None = None, runs: int = 1) -> Played:
        """Return the times of a program over several chips, with ``runs`` in flight."""
        assert self.clock is not None
        counted = [s.chips for s in (self.supersteps if steps is None else steps)]
        return self.clock.play([c for c in counted if isinstance(c, ChipStep)], runs)

    def _move_buffers(self, when: MoveTime, turn: int = 0) -> int:
        return moved(self.program, self.chip, self.memory, when, turn, self.skipped)

    def _turns(self, steps: Sequence[Superstep]) -> tuple[int, int]:
        """Run all iterations (most programs have one) and return the cycles of moves and the number of iterations. Between
        iterations, arena and output buffers are poisoned, except targets of the moves."""
        count = self.program.turns_at(lambda name: int(self._tensor(name).item()))
        kept, self.skipped = {m.target for m in self.program.moves("after")}, self.program.turns - count
        cycles = self._move_buffers("once") + self._move_buffers("first")
        for turn in range(count):
            for b in self.program.buffers:
                if turn and b.kind in ("arena", "output") and b.name not in kept:
                    self.memory.poison(b.name)
            cycles += self._move_buffers("before", turn)
            for step in steps:
                self._run_superstep(step)
            for move in (*self.program.moves("first"), *self.program.moves("before")):
                self.memory.poison(move.target)
            cycles += self._move_buffers("after", turn)
        return cycles + self._move_buffers("last"), count

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Bind fixed host arrays; the simulated host reads and writes them in every run."""
        return HostBound(self.program, self.run, inputs, outputs, stream, HostRuns("simulated cycles"))

    def _write_inputs(self, inputs: Mapping[str, Array]) -> None:
        images: dict[str, Array] = {}
        for port in self.program.inputs:
            if port.external not in inputs:
                raise BadInput(f"input {port.external!r} is missing", self.program.name)
            storage = self.program.storage[port.tensor]
            buffer = self.program.buffer[storage.buffer]
            value = np.asarray(inputs[port.external])
            if value.shape != storage.shape or value.dtype != np.dtype(buffer.dtype):
                have, want = f"{value.dtype}{list(value.shape)}", f"{buffer.dtype}{list(storage.shape)}"
                raise BadInput(f"input {port.external!r} is {have}, not {want}", self.program.name)
            image = images.setdefault(buffer.name, make_poisoned((buffer.size,), buffer.dtype))
            tensor_view(image, storage)[...] = value
        for name, image in images.items():
            self.memory.write(name, image)

    def _read_buffer(self, name: str) -> Array:
        return self.memory.read(name)

    def _tensor(self, name: str) -> Array:
        storage = self.program.storage[name]
        return tensor_view(self._read_buffer(storage.buffer), storage)

    def _run_superstep(self, step: Superstep) -> None:
        """Run exchange in, compute and exchange out: tasks do not see each other's writes in this superstep."""
        images: dict[str, Array] = {}
        staged: list[dict[str, Array]] = []
        for plan in step.plans:
            staged.append(self._deliver_stages(plan, images))
        for name in step.dead:
            self.memory.poison(name)
        written: dict[str, Array] = {}
        for batch, fills in step.fills:
            for tensor, fill in zip(batch.operator.outputs, fills, strict=True):
                if fill is not None:
                    view = self._written_view(tensor, written)
                    tile = np.full((*(1 for _ in batch.operator.tile), *batch.operator.tile), fill, view.dtype)
                    scatter_tiles(batch, tensor, tile, view)
        for plan, local in zip(step.plans, staged, strict=True):
            self._evaluate_steps(plan, local)
            operator = plan.batch.operator
            for tensor, held in plan.outputs:  # the anchor's extents also bound the other outputs
                ends = [slice(None) if d is None else slice(plan.extents[d]) for d in operator.shared[tensor]]
                within: Any = (*ends, ...)  # keeps a view for a scalar, too
                scatter_tiles(plan.batch, tensor, local[held], self._written_view(tensor, written)[within])
            local.clear()
        for name, image in written.items():
            self.memory.write(name, image)

    def _written_view(self, tensor: str, written: dict[str, Array]) -> Array:
        """Return a view of a tensor in the new image of its buffer."""
        storage = self.program.storage[tensor]
        if storage.buffer not in written:
            written[storage.buffer] = self.memory.read(storage.buffer)
        return tensor_view(written[storage.buffer], storage)

    def _deliver_stages(self, plan: BatchPlan, images: dict[str, Array]) -> dict[str, Array]:
        local: dict[str, Array] = {}
        for stage in plan.stages:
            storage = self.program.storage[stage.tensor]
            if storage.buffer not in images:
                images[storage.buffer] = self._read_buffer(storage.buffer)
            tensor = tensor_view(images[storage.buffer], storage)
            if plan.batch.lost in stage.loads:
                local[stage.name] = make_poisoned((*stage.dims, *stage.extents), tensor.dtype.name)
            else:
                local[stage.name] = gather_boxes(stage, tensor)
        return local

    def _evaluate_steps(self, plan: BatchPlan, local: dict[str, Array]) -> None:
        """Evaluate the plan's Computes over ``local`` memory only."""
        local.update(plan.auxiliary)
        for step in plan.steps:
            values = evaluate_compute(step.compute, local).reshape(step.shape)
            local[step.held.name] = values
            for copy, fill in step.masks:
                local[copy] = fill_outside(step.held, values, self.program.types[step.held.name].shape, fill)

    def _run_notes(self, steps: Sequence[Superstep], turns: int) -> Iterator[str]:
        yield f"simulated: {self.chip}, {self.kernels} supersteps"
        cycles = [s.cycles for s in steps] if self.streamed else []
        streamed = turns * sum(c.streamed for c in cycles)
        if streamed:
            rate = self.chip.host_bytes / 1e9
            seconds = turns * sum(c.stream for c in cycles) / self.chip.clock
            share = f"{seconds * 1e6:.1f} us of the total"
            yield f"streamed {streamed} bytes of constants from host memory at {rate:.1f} GB/s: {share}"

    def close(self) -> None:
        """Free the simulated memory of the program."""
        self.open = False
        self.memory = HomeMemory(self.chip, {})
        self.constants.clear()


def _make_held_constants(wanted: Mapping[ConstantForm, WantedForm]) -> dict[ConstantForm, HeldConstant]:
    return {form: how.given(HeldConstant) for form, how in wanted.items()}


def _flatten_values(values: Array) -> Array:
    """Return the values in order, in read-only memory."""
    return np.array(values).reshape(-1) if values.flags.writeable else np.ascontiguousarray(in_memory(values)).reshape(-1)


def _batch_supersteps(program: RProgram, drop: Drop | None) -> list[list[Batch]]:
    """Return every superstep's tasks as batches. Raises BadInput if ``drop`` names no transfer."""
    result = []
    for number, step in enumerate(split_supersteps(program)):
        group: list[Batch] = []
        for name, where in step.items():
            parts = group_batches(program.operator[name], where)
            if drop is not None and (drop.superstep, drop.operator) == (number, name):
                parts = isolate_task(parts, drop.task, drop.load)
            group += parts
        result.append(group)
    if drop is not None and not any(b.lost >= 0 for g in result for b in g):
        raise BadInput(f"{drop} is not a transfer of this program", program.name)
    return result


def _largest_task(whole: Sequence[Sequence[Batch]], program: RProgram, chip: Chip) -> tuple[int, str]:
    """Return the bytes of local memory of the largest task, and its name with its tile."""
    best, where = 0, "no task"
    for group in whole:
        for batch in group:
            need = task_costs(batch, program.types, chip).footprint
            if need.size and int(need.max()) > best:
                spot = int(need.argmax())
                best = int(need.max())
                task, tile = int(batch.tasks.flat[spot]), int(batch.veus.flat[spot])
                where = f"task {batch.operator.name}[{task}] on tile {tile}"
    return best, where


def _dying_buffers(program: RProgram, whole: Sequence[Sequence[Batch]]) -> dict[int, list[str]]:
    """Map supersteps to arena buffers whose last reader runs in it and that are not written later."""
    keep = {program.storage[p.tensor].buffer for p in program.outputs}
    last: dict[str, int] = {}
    for number, group in enumerate(whole):
        for batch in group:
            for name in batch.operator.inputs:
                last[program.storage[name].buffer] = number
            for name in batch.operator.outputs:
                last.pop(program.storage[name].buffer, None)
    result: dict[int, list[str]] = {}
    for name, number in last.items():
        if program.buffer[name].kind == "arena" and name not in keep:
            result.setdefault(number, []).append(name)
    return result


#: Bytes of host memory that the simulation of one batch may use.
BUDGET: Final = 1 << 24


def plan_within_memory(batch: Batch, program: RProgram) -> list[BatchPlan]:
    """Return the batch's plan, or plans of smaller batches if simulating it at once needs too much memory."""
    plan = plan_batch(batch, program.types)
    if batch.tasks.size <= 1 or _host_bytes(plan, program) <= BUDGET:
        return [plan]
    return [p for half in halve_batch(batch) for p in plan_within_memory(half, program)]


def _host_bytes(plan: BatchPlan, program: RProgram) -> int:
    """Return the bytes of host memory to simulate a plan: staged boxes, interior tensors, unfolded operands."""
    total = 0
    for stage in plan.stages:
        total += math.prod((*stage.dims, *stage.extents)) * itemsize(program.types[stage.tensor].dtype)
    for step in plan.steps:
        extents = {a.name: a.extent for a in (*step.compute.axes, *step.compute.reduce)}
        total += math.prod(step.shape) * itemsize(step.compute.dtype)
        for load in contraction_operands(step.compute) or ():
            total += math.prod(extents[a] for a in ex.axes_of(load)) * itemsize(step.compute.dtype)
    return total


#: The memory that holds the buffers.
Held: TypeAlias = HomeMemory | ChipMemories
#: Times of moves once per run, and of moves in every iteration.
ONCE: Final[tuple[MoveTime, ...]] = ("once", "first", "last")
EACH: Final[tuple[MoveTime, ...]] = ("before", "after")


def count_exchanges(program: RProgram) -> int:
    """Return the number of supersteps that only move, in all iterations."""
    once, each = (sum(bool(program.moves(when)) for when in times) for times in (ONCE, EACH))
    return once + each * program.turns


def moved(program: RProgram, chip: Chip, memory: Held, when: MoveTime, turn: int, skipped: int) -> int:
    """Execute the moves at time ``when`` and return the cycles of the tile that receives most. ``skipped`` is the number of
    iterations below the maximum trip count."""
    moves, received = program.moves(when), 0
    for move in moves:
        image, source = memory.read(move.target), memory.read(move.source)
        to, first, size = move.part(turn, skipped, len(image), len(source))
        image[to : to + size] = source[first : first + size]
        memory.write(move.target, image)
        received += min(memory.homes[move.target].block, size) * itemsize(program.buffer[move.target].dtype)
    exchange = math.ceil(received / chip.exchange_bytes)
    return exchange + chip.sync_cycles if moves else 0
