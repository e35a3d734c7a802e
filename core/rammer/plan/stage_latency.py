"""Measured latency of a stage of operators on the device (IOS, MLSys'21, section 4: "directly measure the latency")."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rammer.cache.cache_keys import key_of, unit_key
from rammer.compile_options import MEASURED
from rammer.device.manifest import Array, Backend, Binding
from rammer.errors import DeviceFailure
from rammer.fusion.stitch_latency import Evaluator
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.plan.waits import find_dependences, plan_waits
from rammer.schedule.policy import Schedule, rows_of
from rammer.schedule.stage_clock import in_waves
from rammer.schedule.task_placement import Row, side_by_side
from rammer.tuning.kernel_probe import OwnTensors
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.tuner import Tuner

__all__ = ["StageTimer", "make_evaluator", "stage_program"]

#: Minimum runs of a stage (the median counts), their minimum total seconds, and the maximum number of short runs.
RUNS, SPAN, MOST_RUNS = 10, 5e-3, 100


@dataclass
class StageTimer:
    """Timer of stages on one backend, each run as a separate program; the store caches times by the kernels' inputs. ``measured``
    counts the stages that were not in the store."""

    backend: Backend
    store: KernelStore
    binding: Binding
    measured: int = 0
    _start: float | None = None

    def __call__(self, kernels: Sequence[RKernel]) -> float | None:
        """Return the seconds of operators (in topological order) that share the vEUs, with one launch and without start-up.
        Returns None for a stage that cannot run separately."""
        whole = self._whole(kernels)
        if whole is None:
            return None
        if self._start is None:
            self._start = self._launch_overhead(kernels[0])
        return max(whole - self._start, 0.0) + self.backend.vdevice.launch

    def _launch_overhead(self, kernel: RKernel) -> float:
        """Return the seconds of a run besides its tasks: the time of one operator minus its task time."""
        whole = self._whole([kernel])
        return max((whole or 0.0) - kernel.operator_time(self.backend.vdevice.veus), 0.0)

    def _whole(self, kernels: Sequence[RKernel]) -> float | None:
        operators = [k.operator for k in kernels]
        place = {o.name: i for i, o in enumerate(operators)}
        inside = find_dependences(operators, self.binding.storages)
        edges = [(place[p], i) for i, o in enumerate(operators) for p in inside[o.name]]
        shared = [sorted(place[p.name] for p in operators if set(p.inputs) & set(o.inputs)) for o in operators]
        key = key_of(unit_key(self.backend), "stage", str(edges), str(shared), *map(self.binding.key, operators))
        known = self.store.seconds(key)
        if known is None:
            made = stage_program(kernels, self.binding, self.backend.vdevice)
            if made is None:
                return None
            expected = sum(k.operator_time(self.backend.vdevice.veus) for k in kernels)
            runs = min(max(RUNS, math.ceil(SPAN / max(expected, 1e-9))), MOST_RUNS)
            known = self.backend.profiler.program_time(*made, runs)
            self.measured += 1
            self.store.put_seconds(key, known)
        return known


def make_evaluator(tuner: Tuner, binding: Binding) -> Evaluator:
    """Return the evaluator that stitching uses: predicted kernels, scheduled concurrently. If kernels are measured, it also runs
    groups of operators, each with its best kernel, by ``StageTimer``."""
    device, timed = tuner.backend.vdevice, StageTimer(tuner.backend, tuner.store, binding)
    guesses = tuner.guessing if MEASURED[tuner.level] else tuner

    def kernels(operator: ROperator) -> tuple[RKernel, ...]:
        try:
            return guesses.kernels(operator, binding)
        except DeviceFailure:  # if the remaining operators do not fit either, the step "kernels" reports it
            return ()

    def seconds(operators: Mapping[str, tuple[RKernel, ...]], after: Mapping[str, tuple[str, ...]]) -> float:
        return in_waves(operators, after, device)

    def together(operators: Sequence[ROperator]) -> float | None:
        tuner.prepare(operators, binding)
        return timed([tuner.kernels(o, binding)[0] for o in operators])

    return Evaluator(kernels, seconds, together if MEASURED[tuner.level] else None)


def stage_program(kernels: Sequence[RKernel], binding: Binding, device: VDevice) -> tuple[RProgram, dict[str, Array]] | None:
    """Return a program of operators that share the vEUs like a stage of a schedule, and its constants.

    It runs on ``OwnTensors``: tensors from outside the stage are inputs. Returns None if an operator reads another operator's
    result under a different name, which requires the model's buffers."""
    operators = [k.operator for k in kernels]
    inside = find_dependences(operators, binding.storages)
    by_name = {o.name: {p.name for p in operators if set(p.outputs) & set(o.inputs)} for o in operators}
    if any(set(inside[o.name]) != by_name[o.name] for o in operators):
        return None
    own = OwnTensors.of(operators, binding)
    rows: list[Row] = [[] for _ in range(device.veus)]
    side_by_side(kernels, inside, device, rows)
    names = tuple(o.name for o in operators)
    stage = Schedule(tuple(kernels), (names,), rows_of(rows), False, 0.0)
    waits = plan_waits(stage, {s.tensor: s for s in own.storages})
    return own.program("stage", operators, waits.rows, binding.precision, waits.counters), own.constants
