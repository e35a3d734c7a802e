"""What a stage takes: by the times of its kernels, or by running it where the device can be asked."""

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

#: Dependences among operators, and (shares of vEUs, alone, crowded) of every kernel of each: what is equal in these takes as
#: long.
Signature: TypeAlias = "tuple[tuple[int, ...], tuple[tuple[tuple[int, float, float], ...], ...]]"


@dataclass
class StageClock:
    """Seconds of stages of ``graph``. What was measured counts; the rest is predicted, times how far measurements are from
    predictions (geometric mean)."""

    graph: OperatorGraph
    device: VDevice
    measured: dict[tuple[int, ...], float] = field(default_factory=dict)
    _ratios: list[float] = field(default_factory=list)
    _predicted: dict[tuple[int, ...], float] = field(default_factory=dict)
    _kinds: dict[Signature, int] = field(default_factory=dict)

    def seconds(self, stage: Sequence[str]) -> float:
        """Of operators in topological order, launches included."""
        return self.together([self.kind(group) for group in connected_groups(stage, self.graph.after)], stage)

    def together(self, kinds: Iterable[int], stage: Sequence[str]) -> float:
        """Of a stage whose groups are of these kinds, in any order."""
        key = tuple(sorted(kinds))
        predicted = self._predicted.get(key)
        if predicted is None:
            predicted = self._predicted[key] = stage_latency(self.graph, stage, self.device)
        if not self.measured:
            return predicted
        return self.measured.get(key, predicted * self._scale)

    def kind(self, group: Sequence[str]) -> int:
        """A number for all groups that take equally long."""
        return self._kinds.setdefault(self.signature(group), len(self._kinds))

    def least(self, group: Sequence[str]) -> Least:
        """What a stage with ``group`` (operators in topological order) takes at the least, whichever kernels it has: no
        measurement is further below its prediction than the one furthest below."""
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
        """Run the stages that were not run yet; whether there was any."""
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
        """Equal for blocks that take equally long, in other programs as well."""
        return Dag.of(names, self.graph.after).pred, tuple(self._kernel_times(n) for n in names)

    def _kernel_times(self, name: str) -> tuple[tuple[int, float, float], ...]:
        return tuple((k.shares, k.alone, k.crowded) for k in self.graph.kernels[name])

    @property
    def _scale(self) -> float:
        ratios = [r for r in self._ratios if r > 0]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def stage_kernels(graph: OperatorGraph, stage: Sequence[str], device: VDevice) -> tuple[RKernel, ...]:
    """The kernel choice under which the stage ends first."""
    return min(kernel_choices(graph, stage, device), key=lambda kernels: predict_latency(kernels, graph.after, device))


def stage_latency(graph: OperatorGraph, stage: Sequence[str], device: VDevice) -> float:
    """Seconds of a stage (operators in topological order) by the times of its kernels, launches included."""
    return min(predict_latency(kernels, graph.after, device) for kernels in kernel_choices(graph, stage, device))


def in_waves(kernels: Mapping[str, tuple[RKernel, ...]], after: Mapping[str, tuple[str, ...]], device: VDevice) -> float:
    """Seconds of operators (in topological order) wave by wave, by the times of their kernels, launches included. Those of one
    wave start together: each but the first takes ``device.start`` less than alone, all as long as the longest at the least."""
    graph = OperatorGraph(kernels, after)
    return sum(_of_wave(graph, level, device) for level in graph.levels())


def _of_wave(graph: OperatorGraph, level: Sequence[str], device: VDevice) -> float:
    longest = max(stage_latency(graph, [name], device) for name in level)
    return max(stage_latency(graph, level, device) - device.start * (len(level) - 1), longest)


def connected_groups(stage: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The connected parts of a stage; all in topological order."""
    dag = Dag.of(stage, after)
    return [[stage[i] for i in iter_bits(part)] for part in connected_components(dag, (1 << dag.size) - 1)]
