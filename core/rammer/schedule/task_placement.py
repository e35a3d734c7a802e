"""Placement of equal tasks on the least loaded vEUs or near their weights, and the kernel choices that the policies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.schedule.policy import OperatorGraph

#: Replaces a task time of zero, so that unmeasured tasks still spread evenly (seconds).
TINY = 1e-12
#: Maximum delay, as a fraction of a wave, for which a staged device gets an operator's tasks on all vEUs, not only on idle ones.
EVEN = 0.1

Row = list[tuple[str, int]]
#: Static operands, tile and grid: operators with equal values have equal tasks.
_Weights: TypeAlias = "tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]"


def fastest_kernel(kernels: Sequence[RKernel], device: VDevice) -> RKernel:
    """Return the kernel whose operator finishes first on an otherwise idle device."""
    return min(kernels, key=lambda k: k.operator_time(device.veus))


def leanest_kernel(kernels: Sequence[RKernel]) -> RKernel:
    """Return the resource-efficient kernel: least total vEU time with every vEU busy (Rammer, section 4.2)."""
    return min(kernels, key=RKernel.busy_time)


def spread_tasks(loads: NDArray[np.float64], tasks: int, seconds: float) -> NDArray[np.int64]:
    """Return the number of ``tasks`` equal tasks for each vEU; each task is placed on the least loaded one. The result equals one
    greedy step a task, but uses one sort: the slots ``load + i * seconds`` in ascending order."""
    # Large enough, relative to the loads, that the slots below do not overflow.
    step = max(seconds, TINY, 1e-9 * float(loads.max(initial=0.0)))
    veus = len(loads)
    if (loads == loads[0]).all():
        return tasks // veus + (np.arange(veus) < tasks % veus).astype(np.int64)
    # The slot of a vEU's (i+1)-th task costs its load before that task, in steps; rounding preserves equality of sums.
    whole, part = np.divmod(np.rint(loads * (1e6 / step)).astype(np.int64), 1_000_000)
    # All slots of less than ``level`` whole steps are used: on each of the ``n`` lowest vEUs up to that level.
    low = np.sort(whole)
    n = np.arange(1, veus + 1)
    level = int(((tasks + np.cumsum(low)) // n)[low * n - np.cumsum(low) <= tasks][-1])
    counts: NDArray[np.int64] = np.maximum(level - whole, 0)
    # Less than one slot for each vEU at ``level`` remains: first the cheapest slots, then the emptiest vEUs.
    left, at = tasks - int(counts.sum()), np.flatnonzero(whole <= level)
    counts[at[np.lexsort((counts[at], part[at]))[:left]]] += 1
    return counts


def _spread_evenly(loads: NDArray[np.float64], tasks: int) -> NDArray[np.int64]:
    """Return the number of ``tasks`` for each vEU, equal but for one more on the least loaded ones."""
    counts = np.full(len(loads), tasks // len(loads), np.int64)
    counts[np.argsort(loads, kind="stable")[: tasks % len(loads)]] += 1
    return counts


def append_tasks(rows: Sequence[Row], name: str, placed: Sequence[int]) -> None:
    """Append task i of ``name`` to row ``placed[i]``."""
    for task, veu in enumerate(placed):
        rows[veu].append((name, task))


def busy_fraction(kernels: Sequence[RKernel], device: VDevice) -> float:
    """Return the fraction of the vEUs occupied while these operators run concurrently."""
    return min(1.0, sum(k.shares for k in kernels) / device.veus)


@dataclass
class WeightAffinity:
    """Placement of tasks by their static operands.

    Equal tasks of operators that share weights are placed on the same vEU as before, unless that delays them. So an executor can
    retain the weights there.

    ``shared`` names, for each operator, static operands that another operator reads too.
    """

    shared: Mapping[str, tuple[str, ...]]
    at: dict[_Weights, list[int]] = field(default_factory=dict)

    def known(self, kernel: RKernel) -> bool:
        """Return True if an operator with equal static operands, tile and grid was placed before."""
        return self._weights(kernel.operator) in self.at

    def _weights(self, operator: ROperator) -> _Weights:
        return self.shared.get(operator.name, ()), operator.tile, operator.grid

    def place(self, kernel: RKernel, loads: NDArray[np.float64], seconds: float) -> list[int]:
        """Return the vEU of every task of ``kernel``, which shares weights with others; ``loads`` has the time when each vEU is
        free."""
        operator = kernel.operator
        weights = self._weights(operator)
        before = self.at.get(weights)
        if before is None:
            busy = loads.copy()
            busy[list({v for placed in self.at.values() for v in placed})] += 0.5 * seconds  # prefer vEUs without weights
            before = self.at[weights] = _spread_out(spread_tasks(busy, operator.task_count, seconds))
            return before
        away = _spread_out(spread_tasks(loads, operator.task_count, seconds))
        return before if _finish_time(before, loads, seconds) <= _finish_time(away, loads, seconds) else away


def _spread_out(counts: NDArray[np.int64]) -> list[int]:
    """Return the vEU of each task: runs of tasks stay together and print folded."""
    return np.repeat(np.arange(len(counts)), counts).tolist()


def _finish_time(placed: Sequence[int], loads: NDArray[np.float64], seconds: float) -> float:
    """Return the time when the last of the vEUs in ``placed`` finishes its tasks."""
    counts = np.bincount(placed, minlength=len(loads))
    return float((loads + counts * seconds)[counts > 0].max(initial=0.0))


def side_by_side(
    kernels: Sequence[RKernel],
    after: Mapping[str, Sequence[str]],
    device: VDevice,
    rows: Sequence[Row] | None = None,
    affinity: WeightAffinity | None = None,
) -> float:
    """Return the seconds of operators that share the vEUs with data dependences only; append tasks to ``rows``.

    List scheduling: level by level of the dependences, longest tasks first, onto the least loaded vEUs or those with
    ``affinity``. A task that occupies several vEUs is listed in one row. An operator takes at least the time of one of its tasks
    alone. Each level costs one launch, as in executors that run in waves.
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
            counts = np.bincount(placed, minlength=len(loads)) if placed else spread_tasks(free, kernel.shares, seconds)
            if device.staged and placed is None:
                # All operands of a wave arrive before it, so many short tasks on the few idle vEUs would lengthen the transfer.
                even = _spread_evenly(free, kernel.shares)
                counts = even if float((free + even * seconds).max()) <= float(loads.max()) * (1 + EVEN) else counts
            used = counts > 0
            loads[used] = free[used] + counts[used] * seconds
            finish[name] = max(float(loads[used].max(initial=ready)), ready + _least_latency(kernel))
            if rows is not None:
                append_tasks(rows, name, _spread_out(counts)[:: kernel.spread] if placed is None else placed)
    return max(float(loads.max(initial=0.0)), *finish.values(), 0.0) + len(levels) * device.launch


def predict_latency(kernels: Sequence[RKernel], after: Mapping[str, Sequence[str]], device: VDevice) -> float:
    """Return the seconds of ``side_by_side`` without placing tasks: vEUs with equal free times are counted."""
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
            greedy = _shared_out(loads, ready, kernel.shares, seconds)
            even = _shared_evenly(loads, ready, kernel.shares, seconds) if device.staged else greedy
            loads, end = even if max(even[0]) <= max(loads) * (1 + EVEN) else greedy
            finish[name] = max(end, ready + _least_latency(kernel))
    return max(*loads, *finish.values()) + len(levels) * device.launch


def _least_latency(kernel: RKernel) -> float:
    """Return the lower bound of an operator's time on any number of vEUs: one task's latency, which a busy vEU hides."""
    return kernel.alone if kernel.shares else 0.0


def _shared_out(loads: Mapping[float, int], ready: float, tasks: int, seconds: float) -> tuple[dict[float, int], float]:
    """Return the number of vEUs by free time after placing equal tasks that start at ``ready``, and the last end. Each task is
    placed on the next free vEU, as in ``spread_tasks``."""
    step = max(seconds, TINY, 1e-9 * max(ready, *loads))
    slots = []  # start of these vEUs in whole steps and in millionths of one, their load, their start, their number
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


def _shared_evenly(loads: Mapping[float, int], ready: float, tasks: int, seconds: float) -> tuple[dict[float, int], float]:
    """Return the result of ``_shared_out`` for tasks placed as in ``_spread_evenly``."""
    each, left = divmod(tasks, sum(loads.values()))
    after, end = dict[float, int](), ready
    for load, n in sorted(loads.items(), key=lambda item: max(item[0], ready)):
        more = min(left, n)
        left -= more
        for count, many in ((each + 1, more), (each, n - more)):
            if many:
                then = max(load, ready) + count * seconds if count else load
                after[then] = after.get(then, 0) + many
                end = max(end, then) if count else end
    return after, end


def kernel_choices(graph: OperatorGraph, names: Sequence[str], device: VDevice) -> list[tuple[RKernel, ...]]:
    """Return kernel choices for concurrent operators: the fastest and, once they fill the vEUs, the leanest too."""
    quick = tuple(fastest_kernel(graph.kernels[n], device) for n in names)
    if sum(k.shares for k in quick) < device.veus:
        return [quick]
    lean = tuple(leanest_kernel(graph.kernels[n]) for n in names)
    return [quick] if lean == quick else [quick, lean]


def levels_of(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return breadth-first levels of ``names`` (in topological order), by the dependences among them only."""
    depth: dict[str, int] = {}
    result: list[list[str]] = []
    for name in names:
        depth[name] = max((depth[p] + 1 for p in after.get(name, ()) if p in depth), default=0)
        while len(result) <= depth[name]:
            result.append([])
        result[depth[name]].append(name)
    return result
