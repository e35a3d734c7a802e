"""Rammer's policy (OSDI'20, section 4.2): waves by breadth-first search, co-scheduled over the vEUs."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.policy import OperatorGraph, Policy, Schedule, rows_of
from rammer.schedule.task_placement import Row, WeightAffinity, kernel_choices, side_by_side
from rammer.schedule.wave_kernels import choose_together


@dataclass(frozen=True, slots=True)
class Wavefront(Policy):
    """A policy that runs all operators of a wave concurrently.

    It uses the fastest kernels until the wave fills the vEUs, then the better of these and the resource-efficient ones. If
    operators have more than these two kernels, or sums in parts, the kernels of a wave are chosen together. Only data dependences
    make a task wait.

    With ``lean=0`` kernels are always the fastest: co-scheduling alone, as in the paper's ablation.
    """

    lean: int = 1

    def __post_init__(self) -> None:
        if self.lean not in (0, 1):
            raise ValueError(f"lean must be 0 or 1, got {self.lean}")

    def __call__(self, graph: OperatorGraph, device: VDevice) -> Schedule:
        """Return a schedule; the predicted time is one launch a wave plus the time of the fullest vEU in each."""
        if self.lean and (graph.sums is not None or any(len(kernels) > 2 for kernels in graph.kernels.values())):
            graph = choose_together(graph, device)
        chosen: dict[str, RKernel] = {}
        rows: list[Row] = [[] for _ in range(device.veus)]
        levels, seconds, affinity = graph.levels(), 0.0, WeightAffinity(graph.shared_static())
        for level in levels:
            options = kernel_choices(graph, level, device)[: 1 + self.lean]
            best = min(options, key=lambda kernels: side_by_side(kernels, {}, device))
            seconds += side_by_side(best, {}, device, rows, affinity)
            chosen |= {k.operator.name: k for k in best}
        stages = tuple(map(tuple, levels))
        return Schedule(tuple(chosen[n] for n in graph.names), stages, rows_of(rows), False, seconds)

    @property
    def name(self) -> str:
        """The spelling of this policy for ``--policy``."""
        return "wavefront" if self.lean else "wavefront{lean=0}"

    def __str__(self) -> str:
        return self.name
