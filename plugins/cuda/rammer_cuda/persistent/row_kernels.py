"""Kernels that a block of a persistent kernel can call, with their prices on its rows.

One launch has one block shape. Kernels of more threads, or of several blocks per task, cannot be called from it. Their operators
are offered other kernels."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Final

from rammer.codegen import Choice, Unsuited
from rammer.device.execution_forms import ExecutionForm
from rammer.device.manifest import Binding
from rammer.fusion.tile_search import candidates
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.operator import ROperator

from rammer_cuda.families import FAMILIES, family_of
from rammer_cuda.family import Family
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.part import dynamic_bytes
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent.bodies import callable_part
from rammer_cuda.source import Writer

#: Choices of an operator: the number of fastest ones, and the limits of tasks per row for each of which the fastest is added.
#: During a long operator, a short one should have few tasks, on rows that would be idle.
FAST, FEWER = 3, (1.0, 0.5, 0.25, 0.125, 0.0625)
#: The same numbers for the halves of a split sum, which is tried for several numbers of parts.
HALVES = (2, FEWER[:1])
#: Seconds from one task's end until the next one on its row is as advanced as a starting block of a launch. Measured on an H200
#: without waits (SqueezeNet's expanding convolutions, 0.77 us).
BETWEEN: Final = 0.75e-6
#: Maximum choices of an operator whose text is written to check that a block can call them.
WRITTEN = 24
#: Tiles of a generic operator among which those of few tasks are searched.
TILES = 64
#: Bytes of shared memory for the block's table entries.
ENTRIES = 4 << 10
#: Maximum operators whose ranked kernels are cached. The blocks of a form are tried one after another.
CACHED = 512


@dataclass
class RowKernels:
    """The kernels of operators on the rows of persistent kernels, for any block. It caches alternative kernels, best prediction
    first, the predicted seconds of all tasks of tiled operators, and their threads, by operator key."""

    gpu: Gpu
    writer: Writer
    families: Sequence[Family] = FAMILIES
    _ranked: dict[str, list[Choice]] = field(default_factory=dict)
    _prices: dict[str, float] = field(default_factory=dict)
    _threads: dict[str, float] = field(default_factory=dict)

    def of(
        self, form: ExecutionForm, operator: ROperator, binding: Binding, part: bool
    ) -> list[tuple[Choice, tuple[float, float]]]:
        """Return the choices of an operator in ``form``, each with the seconds of a round of tasks, alone and crowded. A ``part``
        of a split sum has fewer choices."""
        if len(self._ranked) > CACHED:
            self._ranked.clear()
        row = _Row(self, form, binding)
        choices = [*row.alternatives(operator, HALVES)] if part else row.choices(operator)
        return [(c, row.round(c)) for c in choices]

    def seconds(self, operator: ROperator, binding: Binding) -> float:
        """Return the predicted seconds of all tasks of a tiled operator."""
        key = binding.key(operator)
        if key not in self._prices:
            self._prices[key] = family_of(operator).seconds(operator, binding, self.gpu) if operator.task_count else 0.0
        return self._prices[key]

    def threads(self, operator: ROperator, binding: Binding) -> float:
        """Return the threads of the operator's block, as far as known before its kernel is written. Most kernels considered have
        too many threads."""
        family, key = family_of(operator), binding.key(operator)
        if family.threads is not None and key not in self._threads:
            try:
                self._threads[key] = family.threads(operator, binding)
            except Unsuited:
                self._threads[key] = inf
        return self._threads.get(key, 0)

    def ranked(self, operator: ROperator, binding: Binding) -> list[Choice]:
        """Return other kernels of one block per task, best predicted first.

        Results must not depend on which form wins a measurement: kernels that round operands differently are excluded."""
        key = binding.key(operator)
        if key not in self._ranked:
            bare, rounding = replace(operator, tile=(), family="", config=()), family_of(operator).operand_rounding
            usable = [
                f
                for f in self.families
                if f.supported_by(self.gpu) and not f.is_fallback and f.persistent is None and f.operand_rounding == rounding
            ]
            found = heapq.merge(*(f.candidates(bare, binding, self.gpu) for f in usable), key=lambda c: c.seconds)
            self._ranked[key] = [c for c in found if family_of(c.operator).spread(c.operator) == 1]
        return self._ranked[key]


@dataclass(frozen=True)
class _Row:
    """The rows of a form: blocks of ``form.threads``, ``form.rows`` of them per SM."""

    known: RowKernels
    form: ExecutionForm
    binding: Binding

    @property
    def veus(self) -> int:
        """The number of rows."""
        return self.known.gpu.sms * self.form.rows

    def choices(self, operator: ROperator) -> list[Choice]:
        """Return the operator unchanged or with callable kernels, the best predicted first."""
        family = family_of(operator)
        if operator.skips and family.name and not family.persistent:  # a block cannot call it: the core's emitter writes it
            return [Choice(self._seconds(replace(operator, family="", config=())), operator)]
        if not operator.task_count or family.persistent:
            return [Choice(self._seconds(operator), operator)]
        if not family.name:
            return [*self._generic_choices(operator)]
        mine = self._callable_kernel(operator)
        if mine is not None and self.form.keeps and operator.task_count <= self.veus:
            return [Choice(self._serial_seconds(operator, mine), operator)]
        found = self.alternatives(operator, (FAST, FEWER))
        found |= dict.fromkeys([Choice(self._serial_seconds(operator, mine), operator)] if mine is not None else [])
        return sorted(found, key=lambda c: c.seconds) or [Choice(self._seconds(operator), operator)]

    def alternatives(self, operator: ROperator, kinds: tuple[int, tuple[float, ...]]) -> dict[Choice, None]:
        """Return other callable kernels: the fastest ones and some of few tasks."""
        ranked, (fast, fewer) = self.known.ranked(operator, self.binding), kinds
        found = dict.fromkeys(islice(self._callable_choices(operator, ranked), fast))
        for share in fewer:
            few = (c for c in ranked if c.operator.task_count <= share * self.veus)
            found |= dict.fromkeys(islice(self._callable_choices(operator, islice(few, WRITTEN)), 1))
        return found

    def _generic_choices(self, operator: ROperator) -> dict[Choice, None]:
        """Return a generic kernel, which every block can call, and the best tiles of fewer tasks. A launch hides the start of a
        block by other blocks, and so prefers many tasks. On a row each task takes ``BETWEEN`` in addition."""
        found = {Choice(self._seconds(operator), operator): None}
        if operator.task_count > self.veus and not operator.skips:
            bare, gpu = replace(operator, tile=(), config=()), self.known.gpu
            tiles = [o for o in candidates(bare, self.binding, gpu.vdevice, TILES) if self._footprint(o) <= self._shared_capacity]
            for share in FEWER:
                few = [Choice(self._seconds(o), o) for o in tiles if o.task_count <= share * self.veus]
                found |= dict.fromkeys(sorted(few, key=lambda c: c.seconds)[:1])
        return found

    def _footprint(self, operator: ROperator) -> int:
        return task_cost(operator, self.binding.types, self.known.gpu.vdevice, self.binding.storages).footprint

    def round(self, choice: Choice) -> tuple[float, float]:
        """Return the seconds of a round of tasks, one on each row: alone, and with all rows busy. Blocks of one SM share its
        lanes."""
        o, gpu = choice.operator, self.known.gpu
        alone = choice.seconds / max(1, -(-o.task_count // self.veus)) + BETWEEN
        return alone, max(alone, self.form.rows * o.flops / max(o.task_count, 1) / gpu.flops)

    def _seconds(self, operator: ROperator) -> float:
        return self.known.seconds(operator, self.binding)

    def _callable_choices(self, operator: ROperator, choices: Iterable[Choice]) -> Iterator[Choice]:
        """Yield the callable choices with their serial times; choices may be of an equal operator."""
        for c in choices:
            mine = operator.tiled_as(c.operator)
            if kernel := self._callable_kernel(mine):
                yield Choice(self._serial_seconds(mine, kernel), mine)

    def _callable_kernel(self, operator: ROperator) -> TaskKernel | None:
        if self.known.threads(operator, self.binding) > self.form.threads:
            return None
        kernel = callable_part(operator, self.binding, self.form.threads, self.known.writer.written)
        return kernel if kernel and dynamic_bytes(kernel) <= self._shared_capacity else None

    @property
    def _shared_capacity(self) -> int:
        """Shared memory for a task: the system uses 1 KiB of each block (CUDA C++ programming guide, "Shared Memory 9.x")."""
        return (self.known.gpu.shared + 1024) // self.form.rows - 1024 - ENTRIES

    def _serial_seconds(self, operator: ROperator, kernel: TaskKernel) -> float:
        """Return the seconds if a vEU runs in sequence the tasks that a launch would run concurrently on its SM."""
        rounds = -(-operator.task_count // self.veus)
        return self._seconds(operator) * max(1, min(rounds, self.known.gpu.threads // kernel.threads // self.form.rows))
