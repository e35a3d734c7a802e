"""Baseline policies: sequential execution, and the greedy schedule that IOS (MLSys'21, section 6) is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.policy import OperatorGraph, Policy, Schedule, rows_of
from rammer.schedule.stage_clock import stage_kernels
from rammer.schedule.task_placement import Row, fastest_kernel, side_by_side


@dataclass(frozen=True, slots=True)
class Sequential(Policy):
    """A schedule of one operator per stage, each with its fastest kernel."""

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return a schedule; the predicted time is the sum of operator times plus one launch each."""
        kernels = tuple(fastest_kernel(graph.kernels[name], device) for name in graph.names)
        rows: list[Row] = [[] for _ in range(device.veus)]
        for kernel in kernels:
            for veu, row in enumerate(rows[: kernel.operator.task_count]):
                row += [(kernel.operator.name, i) for i in range(veu, kernel.operator.task_count, device.veus)]
        seconds = sum(k.operator_time(device.veus) + device.launch for k in kernels)
        return Schedule(kernels, tuple((n,) for n in graph.names), rows_of(rows), True, seconds)

    def __str__(self) -> str:
        return "sequential"


@dataclass(frozen=True, slots=True)
class Greedy(Policy):
    """A schedule of stages with every operator whose predecessors have all run; each stage waits for the previous one.

    Stages equal the waves of the wavefront policy, but end together, as the stages of IOS do. So this policy differs from IOS
    only in the operators that share a stage."""

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return a schedule; the predicted time is the sum of stage latencies."""
        chosen: dict[str, RKernel] = {}
        rows: list[Row] = [[] for _ in range(device.veus)]
        levels, seconds = graph.levels(), 0.0
        for level in levels:
            kernels = stage_kernels(graph, level, device)
            seconds += side_by_side(kernels, graph.after, device, rows)
            chosen |= {k.operator.name: k for k in kernels}
        return Schedule(tuple(chosen[n] for n in graph.names), tuple(map(tuple, levels)), rows_of(rows), True, seconds)

    def __str__(self) -> str:
        return "greedy"
