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
from rammer.ir.program import RProgram, waves

from rammer_rocm.executor import OpenClProgram
from rammer_rocm.opencl_runtime import import_opencl

#: Seconds between the two readings: a reading is about 10 us late, which is 0.02% of the interval.
PAUSE: Final = 0.05


class TracedProgram(OpenClProgram):
    """A program whose kernels record two times per task."""

    traced = True

    def recorders(self, context: Any) -> Sequence[Any]:
        """Return the record buffer (two 64-bit words per task) and the first record of each run of the table."""
        cl, counts = import_opencl(), self.table.runs[:, 3]
        firsts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
        self.records = cl.Buffer(context, cl.mem_flags.READ_WRITE, 16 * max(int(counts.sum()), 1))
        self.firsts = cl.Buffer(context, cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=firsts)
        return self.records, self.firsts

    def times(self) -> Array:
        """Return the start and end of every task of the last run, in ticks."""
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

    def close(self) -> None:
        """Free the device memory, including the records."""
        super().close()
        self.records.release()
        self.firsts.release()


def record_trace(loaded: TracedProgram, inputs: Mapping[str, Array]) -> list[Span]:
    """Record the tasks of the second of two runs, by table rows: OpenCL does not report the compute unit of a row."""
    for _ in range(2):
        loaded.run(inputs)
    times = loaded.times()
    if not (times[:, 0] > 0).all() or not (times[:, 1] >= times[:, 0]).all():
        raise DeviceFailure(f"program {loaded.program.name}: some tasks recorded no times")
    seconds = (times - times[:, 0].min()).astype(np.float64) * loaded.tick()
    return [
        Span(veu, operator, index, float(begin), float(end))
        for (veu, operator, index), (begin, end) in zip(_list_tasks(loaded.program), seconds, strict=True)
    ]


def _list_tasks(program: RProgram) -> list[tuple[int, str, int]]:
    """Return row, operator and index of every task, in table order: by wave, then by row."""
    result = list[tuple[int, str, int]]()
    for wave in waves(program):
        rows: list[list[tuple[int, str, int]]] = [[] for _ in range(program.veus)]
        for placed in wave:
            rows[placed.veu].append((placed.veu, placed.task.operator, placed.task.index))
        result += [task for row in rows for task in row]
    return result
