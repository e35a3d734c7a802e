"""Executors with a planted mistake in how rows run, wait and signal, or in the results that their tasks write.

``Rows`` is right: a thread for every row, with counters between threads, as in hardware. Each class below is this program, the
toy's or the simulator's, with one mistake."""

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

#: Seconds until a thread whose result is no longer needed stops waiting and ends.
LONGEST = 20


class Rows(rammer_toy.ToyProgram):
    """The toy's program with a thread for each row."""

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
        """Reset the counters before a run."""
        self.finished = dict.fromkeys(self.program.counter, 0)

    def row(self, tasks: tuple[Task, ...]) -> None:
        """Run all tasks of a row."""
        for task in tasks:
            for wait in task.waits:
                self.wait(wait)
            self.task(task)
            self.signal(task)

    def wait(self, wait: Wait) -> None:
        """Block until the counter reaches the threshold."""
        with self.changed:
            self.changed.wait_for(lambda: self.finished[wait.counter] >= self.enough(wait), LONGEST)

    def enough(self, wait: Wait) -> int:
        """Return the value that the counter must reach."""
        return wait.threshold

    def task(self, task: Task) -> None:
        """Run one task of a row."""
        self.memory.run_task(self.program.operator[task.operator], task.index)

    def signal(self, task: Task) -> None:
        """Count a task as finished."""
        with self.changed:
            for counter in self.program.counters:
                if counter.operator == task.operator and self.counts(counter.first, counter.last, task.index):
                    self.finished[counter.name] += 1
            self.changed.notify_all()

    def counts(self, first: int, last: int, index: int) -> bool:
        """Return True if a counter of these tasks counts this one."""
        return first <= index < last


# --- waits and signals ------------------------------------------------------------------------------


class SignalsFirst(Rows):
    """A program that signals a task before it has run."""

    def row(self, tasks: tuple[Task, ...]) -> None:
        for task in tasks:
            for wait in task.waits:
                self.wait(wait)
            self.signal(task)
            self.task(task)


class FirstWait(Rows):
    """A program that obeys only the first of a task's waits."""

    def row(self, tasks: tuple[Task, ...]) -> None:
        super().row(tuple(replace(t, waits=t.waits[:1]) for t in tasks))


class LastWait(Rows):
    """A program that obeys only the last of a task's waits."""

    def row(self, tasks: tuple[Task, ...]) -> None:
        super().row(tuple(replace(t, waits=t.waits[-1:]) for t in tasks))


class WaitsOnce(Rows):
    """A program whose rows wait only before their first task."""

    def row(self, tasks: tuple[Task, ...]) -> None:
        super().row((*tasks[:1], *(replace(t, waits=()) for t in tasks[1:])))


class OneShort(Rows):
    """A program whose waits end one task too early."""

    def enough(self, wait: Wait) -> int:
        return max(1, wait.threshold - 1)


class AnyOne(Rows):
    """A program whose counters are flags: the first finished task sets them."""

    def enough(self, wait: Wait) -> int:
        return 1


class NoReset(Rows):
    """A program whose counters start at the values of the previous run."""

    def reset(self) -> None:
        pass


class NoBands(Rows):
    """A program whose counters of some tasks count all tasks of the operator."""

    def counts(self, first: int, last: int, index: int) -> bool:
        return True


# --- rows and tasks ---------------------------------------------------------------------------------


class DroppedRows(Rows):
    """A program that skips rows beyond the device's units. It also skips all that waits for them."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = [rows[: rammer_toy.VEUS] for rows in self.waves]

    run = rammer_toy.ToyProgram.run


class UpToAnEmptyRow(rammer_toy.ToyProgram):
    """A program whose table ends at an empty row."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        empty = next((i for i, row in enumerate(program.rows) if not row), len(program.rows))
        kept = {(t.operator, t.index) for row in program.rows[:empty] for t in row}
        super().__init__(program, constants, limit)
        self.waves = [[[t for t in tasks if (t[0].name, t[1]) in kept] for tasks in rows] for rows in self.waves]


class Ranges(rammer_toy.ToyProgram):
    """A program that treats a row's tasks of an operator as a range. The step is the difference of the first two task numbers."""

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
    """A program that runs only tasks without waits."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = self.waves[:1]


class WholeTiles(rammer_toy.ToyProgram):
    """A program that skips tiles that are clipped at the end of an axis."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = [[[t for t in tasks if self.whole(*t)] for tasks in rows] for rows in self.waves]

    @staticmethod
    def whole(operator: rammer_toy.ROperator, index: int) -> bool:
        """Return True if each axis either does not clip the tile or is shorter than the tile."""
        box = operator.task_box(index)
        return all(hi - lo == t or t > a.extent for (lo, hi), t, a in zip(box, operator.tile, operator.anchor.axes, strict=True))


class Spills(Rows):
    """A program whose tasks write one element past their tensor's end, as a vector store does."""

    def task(self, task: Task) -> None:
        super().task(task)
        for name in self.program.operator[task.operator].outputs:
            storage = self.program.storage[name]
            flat, end = self.memory.buffers[storage.buffer], storage.span()[1]
            flat[end : end + 1] = 0


class NoStrides(rammer_toy.ToyProgram):
    """A program that treats every tensor as dense from its first element on."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        def packed(s: Storage) -> Storage:
            dense = tuple(int(np.prod(s.shape[i + 1 :])) for i in range(len(s.shape)))
            return replace(s, strides=dense)

        super().__init__(replace(program, storages=tuple(map(packed, program.storages))), constants, limit)


class OutputsByName(rammer_toy.ToyProgram):
    """A program whose output names are converted to identifiers."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        named = {"".join(c if c.isalnum() else "_" for c in n): a for n, a in result.outputs.items()}
        return RunResult(named, result.seconds)


class Shared(rammer_toy.ToyProgram):
    """A program whose device has one set of constants. Constants with equal names have the values that were loaded last."""

    memories: dict[tuple[str, tuple[int, ...]], list[HostMemory]] = {}  # noqa: RUF012

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        for name, value in constants.items():
            alike = self.memories.setdefault((name, value.shape), [])
            alike.append(self.memory)
            for memory in alike:
                memory.tensors[name][...] = value


class RowsInTurn(Rows):
    """A program with as many threads as units. Each thread runs one row after another, so a row may wait for one that never
    starts."""

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
    """A program whose run time is a number of cycles."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        return replace(result, clock=result.seconds * self.chip.clock)


class LostTransfer(LoadedProgram):
    """A program that loses the first transfer of the first operator of the last superstep."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], chip: Chip, stream: bool = True) -> None:
        super().__init__(program, constants, chip, stream)
        batch = self.supersteps[-1].plans[0].batch if self.supersteps and self.supersteps[-1].plans else None
        if batch is not None and batch.operator.inputs:
            drop = Drop(len(self.supersteps) - 1, batch.operator.name, int(batch.tasks.flat[-1]), 0)
            super().__init__(program, constants, chip, stream, drop)
