"""Executors with a planted mistake in how rows run, wait and signal, and in what their tasks write.

``Rows`` is right: a thread for every row, and counters between them, as hardware has it. Each class below is it, or the toy's
or the simulator's program, with one mistake.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rammer.device.manifest import Array, RunResult
from rammer.ir.program import RProgram, Storage, Task, Wait
from rammer.runtime.host_memory import HostMemory

import rammer_toy
from rammer_ipu_sim.chip import Chip
from rammer_ipu_sim.executor import Drop, LoadedProgram

#: Seconds after which a thread that nobody waits for any more goes on, and ends.
LONGEST = 20


class Rows(rammer_toy.ToyProgram):
    """The toy's program, a thread a row."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.changed = threading.Condition()
        self.finished = dict.fromkeys(program.counter, 0)

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        self.memory.write_inputs(inputs)
        self.reset()
        start = time.perf_counter()
        threads = [threading.Thread(target=self.row, args=(row,)) for row in self.program.rows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return RunResult(self.memory.read_outputs(), time.perf_counter() - start)

    def reset(self) -> None:
        """Before a run."""
        self.finished = dict.fromkeys(self.program.counter, 0)

    def row(self, tasks: tuple[Task, ...]) -> None:
        """All of a row."""
        for task in tasks:
            for wait in task.waits:
                self.wait(wait)
            self.task(task)
            self.signal(task)

    def wait(self, wait: Wait) -> None:
        """Until the counter is there."""
        with self.changed:
            self.changed.wait_for(lambda: self.finished[wait.counter] >= self.enough(wait), LONGEST)

    def enough(self, wait: Wait) -> int:
        """What the counter must have reached."""
        return wait.threshold

    def task(self, task: Task) -> None:
        """One task."""
        self.memory.run_task(self.program.operator[task.operator], task.index)

    def signal(self, task: Task) -> None:
        """Count it."""
        with self.changed:
            for counter in self.program.counters:
                if counter.operator == task.operator and self.counts(counter.first, counter.last, task.index):
                    self.finished[counter.name] += 1
            self.changed.notify_all()

    def counts(self, first: int, last: int, index: int) -> bool:
        """Whether a counter of these tasks counts this one."""
        return first <= index < last


# --- waits and signals ------------------------------------------------------------------------------


class SignalsFirst(Rows):
    """A task is told finished before it has run."""

    def row(self, tasks: tuple[Task, ...]) -> None:
        for task in tasks:
            for wait in task.waits:
                self.wait(wait)
            self.signal(task)
            self.task(task)


class FirstWait(Rows):
    """Of a task's waits only the first counts."""

    def row(self, tasks: tuple[Task, ...]) -> None:
        super().row(tuple(replace(t, waits=t.waits[:1]) for t in tasks))


class LastWait(Rows):
    """Of a task's waits only the last counts."""

    def row(self, tasks: tuple[Task, ...]) -> None:
        super().row(tuple(replace(t, waits=t.waits[-1:]) for t in tasks))


class WaitsOnce(Rows):
    """A row waits before its first task alone."""

    def row(self, tasks: tuple[Task, ...]) -> None:
        super().row((*tasks[:1], *(replace(t, waits=()) for t in tasks[1:])))


class OneShort(Rows):
    """A wait ends when one task of the counted ones still runs."""

    def enough(self, wait: Wait) -> int:
        return max(1, wait.threshold - 1)


class AnyOne(Rows):
    """A counter is a flag: the first task that has finished sets it."""

    def enough(self, wait: Wait) -> int:
        return 1


class NoReset(Rows):
    """Counters keep what they counted in the run before."""

    def reset(self) -> None:
        pass


class NoBands(Rows):
    """A counter of some tasks counts all of the operator's."""

    def counts(self, first: int, last: int, index: int) -> bool:
        return True


# --- rows and tasks ---------------------------------------------------------------------------------


class DroppedRows(Rows):
    """Rows beyond the device's units are left out, with all that waits for them."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = [rows[: rammer_toy.VEUS] for rows in self.waves]

    run = rammer_toy.ToyProgram.run


class UpToAnEmptyRow(rammer_toy.ToyProgram):
    """An empty row ends the table."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        empty = next((i for i, row in enumerate(program.rows) if not row), len(program.rows))
        kept = {(t.operator, t.index) for row in program.rows[:empty] for t in row}
        super().__init__(program, constants, limit)
        self.waves = [[[t for t in tasks if (t[0].name, t[1]) in kept] for tasks in rows] for rows in self.waves]


class Ranges(rammer_toy.ToyProgram):
    """What a row does of an operator is taken for a range in steps of what the first two are apart."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        for rows in self.waves:
            for tasks in rows:
                numbers = [i for o, i in tasks if o is tasks[0][0]]
                if len(numbers) == len(tasks) > 1:
                    step = numbers[1] - numbers[0]
                    made = (numbers[0] + step * k for k in range(len(tasks)))
                    tasks[:] = [(tasks[0][0], i) for i in made if 0 <= i < tasks[0][0].task_count]


class FirstWave(rammer_toy.ToyProgram):
    """Only what waits for nothing runs."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = self.waves[:1]


class WholeTiles(rammer_toy.ToyProgram):
    """A tile that does not fit whole is left out."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = [[[t for t in tasks if self.whole(*t)] for tasks in rows] for rows in self.waves]

    @staticmethod
    def whole(operator: rammer_toy.ROperator, index: int) -> bool:
        """Whether no axis clips the tile, or none is whole."""
        box = operator.task_box(index)
        return all(hi - lo == t or t > a.extent for (lo, hi), t, a in zip(box, operator.tile, operator.anchor.axes, strict=True))


class Spills(Rows):
    """A task writes one element beyond the last of its tensor, as a vector store does."""

    def task(self, task: Task) -> None:
        super().task(task)
        for name in self.program.operator[task.operator].outputs:
            storage = self.program.storage[name]
            flat, end = self.memory.buffers[storage.buffer], storage.span()[1]
            flat[end : end + 1] = 0


class NoStrides(rammer_toy.ToyProgram):
    """Every tensor is taken for a dense one from its first element on."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        def packed(s: Storage) -> Storage:
            dense = tuple(int(np.prod(s.shape[i + 1 :])) for i in range(len(s.shape)))
            return replace(s, strides=dense)

        super().__init__(replace(program, storages=tuple(map(packed, program.storages))), constants, limit)


class OutputsByName(rammer_toy.ToyProgram):
    """A port is known by its name as an identifier."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        named = {"".join(c if c.isalnum() else "_" for c in n): a for n, a in result.outputs.items()}
        return RunResult(named, result.seconds)


class Shared(rammer_toy.ToyProgram):
    """The device has one set of constants: of two programs, what is named alike is what was loaded last."""

    memories: dict[tuple[str, tuple[int, ...]], list[HostMemory]] = {}  # noqa: RUF012

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        for name, value in constants.items():
            alike = self.memories.setdefault((name, value.shape), [])
            alike.append(self.memory)
            for memory in alike:
                memory.tensors[name][...] = value


class RowsInTurn(Rows):
    """As many threads as units, each of which takes a row when it has finished one: a row may wait for one that never begins."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        self.memory.write_inputs(inputs)
        self.reset()
        left = list(self.program.rows)

        def walk() -> None:
            while left:
                self.row(left.pop(0))

        threads = [threading.Thread(target=walk, daemon=True) for _ in range(rammer_toy.VEUS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return RunResult(self.memory.read_outputs(), 1e-4)


# --- the simulator ----------------------------------------------------------------------------------


class Cycles(LoadedProgram):
    """A run's time is a number of cycles."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        return replace(result, seconds=result.seconds * self.chip.clock)


class LostTransfer(LoadedProgram):
    """The first transfer of the first operator of the last superstep is lost."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], chip: Chip, stream: bool = True) -> None:
        super().__init__(program, constants, chip, stream)
        batch = self.supersteps[-1].plans[0].batch if self.supersteps and self.supersteps[-1].plans else None
        if batch is not None and batch.operator.inputs:
            drop = Drop(len(self.supersteps) - 1, batch.operator.name, int(batch.tasks.flat[-1]), 0)
            super().__init__(program, constants, chip, stream, drop)
