"""Rammer's three measurements, taken from the simulator's cycle counter."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rammer.device.manifest import Array, Binding, Profiler
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import Buffer, RProgram, Storage
from rammer.ir.types import TensorType, row_major

from rammer_ipu_sim.chip import Chip
from rammer_ipu_sim.cycles import Accountant, task_costs
from rammer_ipu_sim.executor import LoadedProgram
from rammer_ipu_sim.memory import plan_homes
from rammer_ipu_sim.supersteps import group_batches, make_placed_tasks


class SimulatedProfiler(Profiler):
    """A profiler whose times are cycles of the simulated clock, repeatable to the cycle."""

    def __init__(self, chip: Chip, stream: bool = True) -> None:
        self.chip, self.stream = chip, stream

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Return the seconds of one rTask alone, and with a task on every tile; a superstep's syncs are excluded."""
        return operator_times(kernel.operator, binding.types, self.chip)

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Return the threads of a tile, and the local memory that the exchange fills for one task."""
        return task_resources(kernel.operator, binding.types, self.chip)

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Return the seconds of one run on random inputs. Cycles repeat exactly, so ``iterations`` is ignored. Cycles do not
        depend on values either, so only loop programs are executed: their inputs determine the trip count."""
        from rammer.tuning.kernel_probe import random_inputs

        loaded = LoadedProgram(program, constants, self.chip, self.stream)
        try:
            inputs = random_inputs(program, np.random.default_rng(0))
            if program.repeat is not None:
                return loaded.run(inputs).seconds
            return loaded.seconds(loaded.at(inputs))
        finally:
            loaded.close()


def operator_times(operator: ROperator, types: Mapping[str, TensorType], chip: Chip) -> tuple[float, float]:
    """Return the counted seconds of a superstep with one task, and with one task per tile; 0 for an operator without tasks."""
    if not operator.task_count:
        return 0.0, 0.0
    alone, crowded = (_superstep_seconds(operator, types, chip, count) for count in (1, operator.task_count))
    return alone, crowded


def counted_seconds(operator: ROperator, types: Mapping[str, TensorType], chip: Chip) -> float:
    """Return the counted seconds of all tasks: as many supersteps as a tile has tasks."""
    return -(-operator.task_count // chip.tiles) * _superstep_seconds(operator, types, chip, operator.task_count)


def _superstep_seconds(operator: ROperator, types: Mapping[str, TensorType], chip: Chip, tasks: int) -> float:
    """Return the counted seconds of a superstep of ``tasks`` tasks, at most one per tile."""
    names = (*operator.inputs, *operator.outputs)
    buffers = [Buffer(n, types[n].dtype, types[n].size, "input") for n in names]
    storages = {n: _dense_storage(n, types[n]) for n in names}
    accountant = Accountant(chip, plan_homes(buffers, chip.tiles), storages, types, chip.sram)
    count = min(tasks, chip.tiles)
    step = accountant.superstep(group_batches(operator, make_placed_tasks(range(count), [0] * count, range(count))))
    return (step.compute + step.exchange) / chip.clock


def _dense_storage(name: str, kind: TensorType) -> Storage:
    return Storage(name, name, 0, kind.shape, row_major(kind.shape))


def task_resources(operator: ROperator, types: Mapping[str, TensorType], chip: Chip) -> Resources:
    """Return the local bytes of the largest task; registers and spills are not modelled."""
    count = operator.task_count
    whole = group_batches(operator, make_placed_tasks([0] * count, [0] * count, range(count)))
    need = max((int(task_costs(b, types, chip).footprint.max()) for b in whole), default=0)
    return Resources(threads=chip.threads, local_bytes=need)
