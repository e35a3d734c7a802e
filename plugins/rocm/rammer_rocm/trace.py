"""Start and end times of each task of a run, by a clock that the kernels read.

OpenCL reports only the times of launches. Every processor has a counter that its runtime's compiler can name (``source.CLOCK``).
Two readings at a fixed interval give the length of its ticks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from rammer.device.manifest import Array, Span
from rammer.errors import DeviceFailure
from rammer.ir.launches import Launch
from rammer.ir.program import waves

from rammer_rocm.launch_executor import LaunchProgram
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.persistent_executor import PersistentProgram
from rammer_rocm.table_executor import TableProgram

#: Seconds between the two readings: a reading is about 10 us late, which is 0.02% of the interval.
PAUSE: Final = 0.05


class Clocked:
    """Reads the clock of the kernels and the records of a traced program."""

    queue: Any
    binary: Any
    records: Any

    def times(self) -> Array:
        """Return the start and end of every task (of every group, for launches) of the last run, in ticks."""
        found = np.zeros((self.records.size // 16, 2), np.uint64)
        import_opencl().enqueue_copy(self.queue, found, self.records)
        return found

    def tick(self) -> float:
        """Return the length of a tick in seconds."""
        cl, words = import_opencl(), np.zeros(1, np.uint64)
        kernel = cl.Kernel(self.binary, "clock_now")
        readings = list[tuple[int, float]]()
        for pause in (0.0, 0.0, PAUSE):  # the first run of a kernel is slower
            time.sleep(pause)
            kernel(self.queue, (1,), (1,), self.records)
            self.queue.finish()
            now = time.perf_counter()
            cl.enqueue_copy(self.queue, words, self.records)
            readings.append((int(words[0]), now))
        (first, begun), (last, ended) = readings[-2:]
        if last <= first:
            raise DeviceFailure(f"the clock of {self.queue.device.name.strip()} does not advance: its tasks cannot be traced")
        return (ended - begun) / (last - first)


class TracedTable(Clocked, TableProgram):
    """A table program whose kernels record two times per task."""

    traced = True

    def recorders(self, context: Any) -> Sequence[Any]:
        """Return the record buffer (two 64-bit words per task) and the first record of each run of the table."""
        cl, counts = import_opencl(), self.table.runs[:, 3]
        firsts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
        self.records = cl.Buffer(context, cl.mem_flags.READ_WRITE, 16 * max(int(counts.sum()), 1))
        self.firsts = cl.Buffer(context, cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=firsts)
        return self.records, self.firsts

    def tasks(self) -> list[tuple[int, str, int]]:
        """Return row, operator and index of every record, in table order: by wave, then by row."""
        result = list[tuple[int, str, int]]()
        for wave in waves(self.program):
            rows: list[list[tuple[int, str, int]]] = [[] for _ in range(self.program.veus)]
            for placed in wave:
                rows[placed.veu].append((placed.veu, placed.task.operator, placed.task.index))
            result += [task for row in rows for task in row]
        return result

    def buffers(self) -> Sequence[Any]:
        """Return all device memory that the program owns, including the records."""
        return (*super().buffers(), self.records, self.firsts)


class TracedLaunches(Clocked, LaunchProgram):
    """A program of launches whose groups record two times."""

    traced = True

    def recorders(self, context: Any, joined: Sequence[Launch]) -> Sequence[Any]:
        """Return the record buffer (two 64-bit words per group of the run) and the first record of a kernel."""
        counts = [sum(map(self.groups_of, launches)) for launches in self.plan]
        return self._records(len(self.tasks())), np.int32(sum(counts[: [*self.plan].index([*joined])]))

    def _records(self, count: int) -> Any:
        if not hasattr(self, "records"):
            cl = import_opencl()
            self.records = cl.Buffer(self.queue.context, cl.mem_flags.READ_WRITE, 16 * max(count, 1))
        return self.records

    def tasks(self) -> list[tuple[int, str, int]]:
        """Return a row, the operator and the index of every record. Tasks of a launch have different rows where possible."""
        return [record for joined in self.plan for record in self.tasks_of(joined)]

    def tasks_of(self, launches: Sequence[Launch]) -> list[tuple[int, str, int]]:
        """Return the records of launches, one for each group."""
        result = list[tuple[int, str, int]]()
        for launch in launches:
            blocks = self.functions[launch.operator].blocks
            result += [
                (i % self.device.veus, launch.operator, task) for i, task in enumerate(launch.tasks) for _ in range(blocks)
            ]
        return result

    def buffers(self) -> Sequence[Any]:
        """Return all device memory that the program owns, including the records."""
        return (*super().buffers(), self.records)


class TracedPersistent(TracedLaunches, PersistentProgram):
    """A persistent program: the records of launches, then two times for each unit of work of levels."""

    def unit_recorders(self) -> Sequence[Any]:
        """Return the record buffer, and the first record of a unit."""
        return self._records(len(self.tasks())), np.int32(len(super().tasks()))

    def tasks(self) -> list[tuple[int, str, int]]:
        """Return a row, the operator and the index of every record."""
        return [*super().tasks(), *(record for i in self.inside for record in self.tasks_of(self.levels[i]))]


def record_trace(loaded: TracedTable | TracedLaunches | TracedPersistent, inputs: Mapping[str, Array]) -> list[Span]:
    """Record the tasks of the second of two runs, by table rows: OpenCL does not report the compute unit of a row. A task of
    several groups lasts from the first start to the last end."""
    for _ in range(2):
        loaded.run(inputs)
    times = loaded.times()
    if not (times[:, 0] > 0).all() or not (times[:, 1] >= times[:, 0]).all():
        raise DeviceFailure(f"program {loaded.program.name}: some tasks recorded no times")
    seconds = (times - times[:, 0].min()).astype(np.float64) * loaded.tick()
    spans = dict[tuple[int, str, int], tuple[float, float]]()
    for task, (begin, end) in zip(loaded.tasks(), seconds, strict=True):
        known = spans.get(task, (begin, end))
        spans[task] = min(known[0], float(begin)), max(known[1], float(end))
    return [Span(veu, operator, index, *times) for (veu, operator, index), times in spans.items()]
