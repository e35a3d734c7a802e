"""Baseline policy: one operator after another, its tasks round-robin over the vEUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rammer.ir.device import VDevice
from rammer.schedule.place import Row, fastest
from rammer.schedule.policy import OperatorGraph, Schedule, rows_of


@dataclass(frozen=True, slots=True)
class Sequential:
    """Each operator is a stage of its own, with its fastest kernel."""

    name: ClassVar[str] = "sequential"

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Predicts the sum of operator times plus one launch each."""
        kernels = tuple(fastest(graph.kernels[name], device) for name in graph.names)
        rows: list[Row] = [[] for _ in range(device.veus)]
        for kernel in kernels:
            for veu, row in enumerate(rows[: kernel.operator.task_count]):
                row += [(kernel.operator.name, i) for i in range(veu, kernel.operator.task_count, device.veus)]
        seconds = sum(k.operator_time(device.veus) + device.launch for k in kernels)
        return Schedule(kernels, tuple((n,) for n in graph.names), rows_of(rows), True, seconds)

    def __str__(self) -> str:
        return self.name
