"""Placing equal tasks on the least loaded vEUs or where their weights are, and the kernel choices that the policies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.schedule.policy import OperatorGraph

#: Stands in for a task time of zero, so that unmeasured tasks still spread evenly (seconds).
TINY = 1e-12

Row = list[tuple[str, int]]
#: Static operands, tile and grid: operators that agree in these have equal tasks.
_Weights: TypeAlias = "tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]"


def fastest_kernel(kernels: Sequence[RKernel], device: VDevice) -> RKernel:
    """The kernel whose operator finishes first with the device to itself."""
    return min(kernels, key=lambda k: k.operator_time(device.veus))


def leanest_kernel(kernels: Sequence[RKernel]) -> RKernel:
    """The resource-efficient kernel: least vEU time in all, with every vEU busy (Rammer, section 4.2)."""
    return min(kernels, key=RKernel.busy_time)


def spread_tasks(loads: NDArray[np.float64], tasks: int, seconds: float) -> NDArray[np.int64]:
    """How many of ``tasks`` equal tasks each vEU gets, each task going to the least loaded one.

    The same as one greedy step a task, in one sort: the slots ``load + i * seconds`` taken cheapest first.
    """
    # Never so small beside the loads that the slots below overflow.
    step = max(seconds, TINY, 1e-9 * float(loads.max(initial=0.0)))
    veus = len(loads)
    if (loads == loads[0]).all():
        return tasks // veus + (np.arange(veus) < tasks % veus).astype(np.int64)
    # The slot of a vEU's (i+1)-th task costs what is on it before, in steps; rounding keeps equal sums equal.
    whole, part = np.divmod(np.rint(loads * (1e6 / step)).astype(np.int64), 1_000_000)
    # All slots of less than ``level`` whole steps are taken: of the ``n`` lowest vEUs each up to there.
    low = np.sort(whole)
    n = np.arange(1, veus + 1)
    level = int(((tasks + np.cumsum(low)) // n)[low * n - np.cumsum(low) <= tasks][-1])
    counts: NDArray[np.int64] = np.maximum(level - whole, 0)
    # What is left is less than a slot for each vEU at ``level``: the cheapest of those, then the emptiest.
    left, at = tasks - int(counts.sum()), np.flatnonzero(whole <= level)
    counts[at[np.lexsort((counts[at], part[at]))[:left]]] += 1
    return counts


def append_tasks(rows: Sequence[Row], name: str, placed: Sequence[int]) -> None:
    """Append task i of ``name`` to row ``placed[i]``."""
    for task, veu in enumerate(placed):
        rows[veu].append((name, task))


def busy_fraction(kernels: Sequence[RKernel], device: VDevice) -> float:
    """Fraction of the vEUs occupied while these operators run side by side."""
    return min(1.0, sum(k.shares for k in kernels) / device.veus)


@dataclass
class WeightAffinity:
    """Where static operands live: equal tasks of operators that share weights go to the vEU that had them before, as
    long as that delays nobody, so that an executor can keep the weights there.

    ``shared`` names, for each operator, static operands that another operator reads too.
    """

    shared: Mapping[str, tuple[str, ...]]
    at: dict[_Weights, list[int]] = field(default_factory=dict)

    def known(self, kernel: RKernel) -> bool:
        """Whether an operator with the same static operands, tile and grid was placed before."""
        return self._weights(kernel.operator) in self.at

    def _weights(self, operator: ROperator) -> _Weights:
        return self.shared.get(operator.name, ()), operator.tile, operator.grid

    def place(self, kernel: RKernel, loads: NDArray[np.float64], seconds: float) -> list[int]:
        """The vEU of every task of ``kernel``, which shares weights with others, given when each vEU is free."""
        operator = kernel.operator
        weights = self._weights(operator)
        before = self.at.get(weights)
        if before is None:
            busy = loads.copy()
            busy[list({v for placed in self.at.values() for v in placed})] += (
                0.5 * seconds
            )  # first those that keep nobody's weights
            before = self.at[weights] = _spread_out(spread_tasks(busy, operator.task_count, seconds))
            return before
        away = _spread_out(spread_tasks(loads, operator.task_count, seconds))
        return before if _finish_time(before, loads, seconds) <= _finish_time(away, loads, seconds) else away


def _spread_out(counts: NDArray[np.int64]) -> list[int]:
    """The vEU of each task: runs of tasks stay together and print folded."""
    return np.repeat(np.arange(len(counts)), counts).tolist()


def _finish_time(placed: Sequence[int], loads: NDArray[np.float64], seconds: float) -> float:
    """When the last of the vEUs in ``placed`` is done with its tasks."""
    counts = np.bincount(placed, minlength=len(loads))
    return float((loads + counts * seconds)[counts > 0].max(initial=0.0))


def side_by_side(
    kernels: Sequence[RKernel],
    after: Mapping[str, Sequence[str]],
    device: VDevice,
    rows: Sequence[Row] | None = None,
    affinity: WeightAffinity | None = None,
) -> float:
    """Seconds for operators that share the vEUs, waiting only for each other's results; appends tasks to ``rows``.

    List scheduling: level by level of the dependences among them, longest tasks first, onto the least
    loaded vEUs or those for which they have ``affinity``; a task that keeps several busy stands in the row of one. No operator
    ends sooner than one task of it alone. Each level costs one launch, since the executors that run in waves need as many.
    """
    chosen = {k.operator.name: k for k in kernels}
    affinity = affinity or WeightAffinity({})
    loads, finish = np.zeros(device.veus), dict[str, float]()
    levels = levels_of(tuple(chosen), after)
    for level in levels:
        members = [chosen[n] for n in level]
        share = busy_fraction(members, device)
        for kernel in sorted(members, key=lambda k: (not affinity.known(k), -k.task_time(share))):
            name, seconds = kernel.operator.name, kernel.task_time(share)
            ready = max((finish[p] for p in after.get(name, ()) if p in finish), default=0.0)
            free = np.maximum(loads, ready)
            placed = affinity.place(kernel, free, seconds) if affinity.shared.get(name) and kernel.spread == 1 else None
            counts = spread_tasks(free, kernel.shares, seconds) if placed is None else np.bincount(placed, minlength=len(loads))
            used = counts > 0
            loads[used] = free[used] + counts[used] * seconds
            finish[name] = max(float(loads[used].max(initial=ready)), ready + _least_latency(kernel))
            if rows is not None:
                append_tasks(rows, name, _spread_out(counts)[:: kernel.spread] if placed is None else placed)
    return max(float(loads.max(initial=0.0)), *finish.values(), 0.0) + len(levels) * device.launch


def predict_latency(kernels: Sequence[RKernel], after: Mapping[str, Sequence[str]], device: VDevice) -> float:
    """The seconds of ``side_by_side``, which does not say where tasks go: vEUs that are free at one time are counted."""
    chosen = {k.operator.name: k for k in kernels}
    loads, finish = {0.0: device.veus}, dict[str, float]()
    levels = levels_of(tuple(chosen), after)
    for level in levels:
        members = [chosen[n] for n in level]
        share = busy_fraction(members, device)
        timed = [(k.task_time(share), k) for k in members]
        for seconds, kernel in sorted(timed, key=lambda pair: -pair[0]):
            name = kernel.operator.name
            ready = max((finish[p] for p in after.get(name, ()) if p in finish), default=0.0)
            loads, end = _shared_out(loads, ready, kernel.shares, seconds)
            finish[name] = max(end, ready + _least_latency(kernel))
    return max(*loads, *finish.values()) + len(levels) * device.launch


def _least_latency(kernel: RKernel) -> float:
    """What an operator takes on any number of vEUs: one task's latency, which a busy vEU hides behind other tasks."""
    return kernel.alone if kernel.shares else 0.0


def _shared_out(loads: Mapping[float, int], ready: float, tasks: int, seconds: float) -> tuple[dict[float, int], float]:
    """How many vEUs are free when, once they have taken equal tasks that begin at ``ready``, each the next free one; and when the
    last task ends. As ``spread`` does it."""
    step = max(seconds, TINY, 1e-9 * max(ready, *loads))
    slots = []  # whole steps and millionths of one until these vEUs begin, what is on them, when they begin, how many they are
    for load, n in loads.items():
        at = max(load, ready)
        slots.append((*divmod(round(at * (1e6 / step)), 1_000_000), load, at, n))
    veus = total = level = 0
    for whole, _, _, _, n in sorted(slots):
        if whole * veus - total > tasks:
            break
        veus, total = veus + n, total + whole * n
        level = (tasks + total) // veus
    left = tasks - sum(max(level - whole, 0) * n for whole, _, _, _, n in slots)
    after, end = dict[float, int](), ready
    for whole, _, load, at, n in sorted(slots, key=lambda slot: (slot[1], -slot[0], -slot[2])):
        more = min(left, n) if whole <= level else 0
        left -= more
        for count, many in ((max(level - whole, 0) + 1, more), (max(level - whole, 0), n - more)):
            if many:
                then = at + count * seconds if count else load
                after[then] = after.get(then, 0) + many
                end = max(end, then) if count else end
    return after, end


def kernel_choices(graph: OperatorGraph, names: Sequence[str], device: VDevice) -> list[tuple[RKernel, ...]]:
    """Kernel choices for operators side by side: the fastest, and once they fill the vEUs the leanest too."""
    quick = tuple(fastest_kernel(graph.kernels[n], device) for n in names)
    if sum(k.shares for k in quick) < device.veus:
        return [quick]
    lean = tuple(leanest_kernel(graph.kernels[n]) for n in names)
    return [quick] if lean == quick else [quick, lean]


def levels_of(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Breadth-first levels of ``names`` (in topological order), looking only at dependences among them."""
    depth: dict[str, int] = {}
    result: list[list[str]] = []
    for name in names:
        depth[name] = max((depth[p] + 1 for p in after.get(name, ()) if p in depth), default=0)
        while len(result) <= depth[name]:
            result.append([])
        result[depth[name]].append(name)
    return result
