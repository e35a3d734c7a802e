"""Stage times: predicted from the times of kernels, or measured on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.schedule.ios_dp import Dag, Least, connected_components, iter_bits
from rammer.schedule.policy import OperatorGraph
from rammer.schedule.task_placement import kernel_choices, levels_of, predict_latency

#: Dependences among operators, and (shares of vEUs, alone, crowded) of every kernel of each. Equal signatures have equal times.
Signature: TypeAlias = "tuple[tuple[int, ...], tuple[tuple[tuple[int, float, float], ...], ...]]"


@dataclass
class StageClock:
    """The times of stages of ``graph`` in seconds. Measured times take precedence. Predictions are scaled by the geometric mean
    ratio of measured to predicted times."""

    graph: OperatorGraph
    device: VDevice
    measured: dict[tuple[int, ...], float] = field(default_factory=dict)
    _ratios: list[float] = field(default_factory=list)
    _predicted: dict[tuple[int, ...], float] = field(default_factory=dict)
    _kinds: dict[Signature, int] = field(default_factory=dict)

    def seconds(self, stage: Sequence[str]) -> float:
        """Return the seconds of operators in topological order, launches included."""
        return self.together([self.kind(group) for group in connected_groups(stage, self.graph.after)], stage)

    def together(self, kinds: Iterable[int], stage: Sequence[str]) -> float:
        """Return the seconds of a stage whose groups are of these kinds, in any order."""
        key = tuple(sorted(kinds))
        predicted = self._predicted.get(key)
        if predicted is None:
            predicted = self._predicted[key] = stage_latency(self.graph, stage, self.device)
        if not self.measured:
            return predicted
        return self.measured.get(key, predicted * self._scale)

    def kind(self, group: Sequence[str]) -> int:
        """Return a number that is equal for all groups with equal times."""
        return self._kinds.setdefault(self.signature(group), len(self._kinds))

    def least(self, group: Sequence[str]) -> Least:
        """Return a lower bound on the time of a stage with ``group`` (operators in topological order), for any kernels. The bound
        is scaled by the smallest ratio of measured to predicted time."""
        path: dict[str, float] = {}
        share = 0.0
        for name in group:
            kernels = [(k.shares, min(k.alone, k.crowded)) for k in self.graph.kernels[name]]
            share += min(shares * seconds for shares, seconds in kernels) / self.device.veus
            alone = min(-(-shares // self.device.veus) * seconds for shares, seconds in kernels)
            path[name] = alone + max((path[p] for p in self.graph.after.get(name, ()) if p in path), default=0.0)
        launches = len(levels_of(group, self.graph.after)) * self.device.launch
        low = min(self._ratios, default=1.0)
        return low * launches, low * max(path.values()), low * share

    def measure(self, stages: Sequence[Sequence[str]]) -> bool:
        """Measure the stages without a measured time; return True if any were measured."""
        fresh = {tuple(sorted(map(self.kind, connected_groups(s, self.graph.after)))): s for s in stages}
        fresh = {key: stage for key, stage in fresh.items() if key not in self.measured}
        for key, stage in fresh.items():
            predicted = stage_latency(self.graph, stage, self.device)
            found = self.graph.timed(stage_kernels(self.graph, stage, self.device)) if self.graph.timed else None
            if found is not None and predicted > 0:
                self._ratios.append(found / predicted)
            self.measured[key] = predicted * self._scale if found is None else found
        return bool(fresh)

    def signature(self, names: Sequence[str]) -> Signature:
        """Return a signature that is equal for blocks with equal times, across programs."""
        return Dag.of(names, self.graph.after).pred, tuple(self._kernel_times(n) for n in names)

    def _kernel_times(self, name: str) -> tuple[tuple[int, float, float], ...]:
        return tuple((k.shares, k.alone, k.crowded) for k in self.graph.kernels[name])

    @property
    def _scale(self) -> float:
        ratios = [r for r in self._ratios if r > 0]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def stage_kernels(graph: OperatorGraph, stage: Sequence[str], device: VDevice) -> tuple[RKernel, ...]:
    """Return the kernel choice with the earliest end of the stage."""
    return min(kernel_choices(graph, stage, device), key=lambda kernels: predict_latency(kernels, graph.after, device))


def stage_latency(graph: OperatorGraph, stage: Sequence[str], device: VDevice) -> float:
    """Return the seconds of a stage (operators in topological order) by its kernel times, launches included."""
    return min(predict_latency(kernels, graph.after, device) for kernels in kernel_choices(graph, stage, device))


def in_waves(kernels: Mapping[str, tuple[RKernel, ...]], after: Mapping[str, tuple[str, ...]], device: VDevice) -> float:
    """Return the seconds of operators (in topological order) wave by wave, by kernel times, launches included.

    The operators of one wave start together. Each after the first costs ``device.start`` less than alone. A wave is at least as
    long as its longest operator."""
    graph = OperatorGraph(kernels, after)
    return sum(_of_wave(graph, level, device) for level in graph.levels())


def _of_wave(graph: OperatorGraph, level: Sequence[str], device: VDevice) -> float:
    longest = max(stage_latency(graph, [name], device) for name in level)
    return max(stage_latency(graph, level, device) - device.start * (len(level) - 1), longest)


def connected_groups(stage: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the connected parts of a stage, all in topological order."""
    dag = Dag.of(stage, after)
    return [[stage[i] for i in iter_bits(part)] for part in connected_components(dag, (1 << dag.size) - 1)]
