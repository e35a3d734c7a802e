"""A program's rows as data that its kernels walk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rammer.device.manifest import Array
from rammer.ir.program import RProgram, Task, waves

from rammer_rocm.source import RUN_WORDS


@dataclass(frozen=True)
class WaveTable:
    """The rows as data: ``starts[wave * veus + veu]`` indexes ``runs``, ``filled`` counts a wave's busy rows."""

    starts: Array
    runs: Array
    filled: Array
    sets: tuple[tuple[int, ...], ...]
    kernel_of_wave: tuple[int, ...]


def make_table(program: RProgram, function_of: Mapping[str, int], row_of: Mapping[str, int]) -> WaveTable:
    """Fold every wave's rows into runs of equally spaced tasks of one operator."""
    starts, runs, filled = [0], list[tuple[int, ...]](), list[int]()
    members: dict[tuple[int, ...], int] = {}
    kernel_of_wave = []
    for wave in waves(program):
        rows: list[list[Task]] = [[] for _ in range(program.veus)]
        for placed in wave:
            rows[placed.veu].append(placed.task)
        for row in rows:
            runs += _runs(row, function_of, row_of)
            starts.append(len(runs))
        filled.append(sum(1 for row in rows if row))
        used = tuple(sorted({function_of[t.task.operator] for t in wave}))
        kernel_of_wave.append(members.setdefault(used, len(members)))
    flat = np.array(runs or [(0,) * RUN_WORDS], dtype=np.int32)
    return WaveTable(np.array(starts, np.int32), flat, np.array(filled or [0], np.int32), tuple(members), tuple(kernel_of_wave))


def _runs(row: Sequence[Task], function_of: Mapping[str, int], row_of: Mapping[str, int]) -> list[tuple[int, ...]]:
    result = list[tuple[int, ...]]()
    for operator, group in groupby(row, key=lambda t: t.operator):
        indices = [t.index for t in group]
        while indices:
            step = indices[1] - indices[0] if len(indices) > 1 else 1
            count = 1
            while count < len(indices) and indices[count] == indices[0] + count * step:
                count += 1
            result.append((function_of[operator], row_of[operator], indices[0], count, step))
            del indices[:count]
    return result
