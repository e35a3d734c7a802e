"""Plugins with a planted mistake in their clocks, in the kernels that they offer, or in the opening of the device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from uuid import uuid4

from rammer.device.manifest import Array, Binding, OpenOptions, Recorded, RunResult, Span
from rammer.errors import DeviceFailure
from rammer.fusion.tile_search import candidates
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram

import rammer_toy

# --- clocks -----------------------------------------------------------------------------------------


class Milliseconds(rammer_toy.ToyProgram):
    """A program whose run time is in milliseconds."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        return replace(result, clock=result.seconds * 1e3)


class Queued(rammer_toy.ToyProgram):
    """A program whose clock stops when a run is queued, after 0.1 ms. After 1 us, probes would take a minute for rows of maximal
    length."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        return replace(super().run(inputs), seconds=1e-4 * (1 + time.perf_counter() % 1e-3))


class NoSuchPolicy(rammer_toy.ToyBackend):
    """A backend whose default policy is unknown."""

    default_policy = "fastest"


class Profiled(rammer_toy.ToyBackend):
    """A backend with another profiler."""

    profiler_of: ClassVar[Any] = rammer_toy.ToyProfiler

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.profiler = self.profiler_of(self)


class Factor(rammer_toy.ToyProfiler):
    """A profiler whose times of tasks and of programs are off by a factor."""

    task, whole = 1.0, 1.0

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        alone, crowded = super().task_time(kernel, binding)
        return alone * self.task, crowded * self.task

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        return super().program_time(program, constants, iterations) * self.whole


def off(task: float = 1.0, whole: float = 1.0) -> type[Profiled]:
    """Return a device whose profiler is off by these factors. Programs that are timed for tasks are off as well."""
    profiler = type("Off", (Factor,), {"task": task / whole, "whole": whole})
    return type("OffBackend", (Profiled,), {"profiler_of": profiler})


class Formula(rammer_toy.ToyProfiler):
    """A profiler that predicts instead of measuring."""

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        return kernel.alone, kernel.crowded


class Predicts(Profiled):
    """A device whose profiler is a formula."""

    profiler_of = Formula


class NoThreads(rammer_toy.ToyBackend):
    """A backend whose tasks need no threads."""

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        return replace(super().kernel(operator, binding), compiled=Resources(threads=0))


class Traced(rammer_toy.ToyBackend):
    """A backend whose trace shows all tasks at once."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        return Recorded(program, [Span(v, t.operator, t.index, 0.0, 1e-3) for v, row in enumerate(program.rows) for t in row])


class TracedFirst(Traced):
    """A backend that records the first task of a row."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        first = replace(program, rows=tuple(row[:1] for row in program.rows))
        return replace(super().trace(first, constants, inputs), program=program)


class TracedShort(TracedFirst):
    """A backend whose trace has only the first task of each row."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        first = replace(program, rows=tuple(row[:1] for row in program.rows))
        return replace(super().trace(program, constants, inputs), program=first)


class TracedBackwards(Traced):
    """A backend whose spans end before they start."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        run = super().trace(program, constants, inputs)
        return replace(run, spans=[replace(s, start=s.end, end=s.start) for s in run.spans])


# --- closing ----------------------------------------------------------------------------------------


class StopsAll(rammer_toy.ToyBackend):
    """A backend whose ``close`` stops a queue that all of them share."""

    stopped = False

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        type(self).stopped = False

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
        if self.stopped:
            raise DeviceFailure("the queue has gone")
        return super().load(program, constants)

    def close(self) -> None:
        type(self).stopped = True


class KeepsThread(rammer_toy.ToyBackend):
    """A backend that leaks a thread from its opening."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


class KeepsFile(rammer_toy.ToyBackend):
    """A backend that leaks a file from its opening."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        os.open(os.devnull, os.O_RDONLY)


class NoClose(rammer_toy.ToyBackend):
    """A backend without a ``close`` method."""

    close = None  # type: ignore[assignment]


class CannotClose(rammer_toy.ToyBackend):
    """A backend whose ``close`` fails."""

    def close(self) -> None:
        del self.queue  # type: ignore[attr-defined]


class OpensOnce(rammer_toy.ToyBackend):
    """A backend that cannot be opened again after ``close``."""

    closed = False

    def __init__(self, options: OpenOptions) -> None:
        if self.closed:
            raise DeviceFailure("the unit is in use")
        super().__init__(options)

    def close(self) -> None:
        type(self).closed = True


# --- kernels and opening ----------------------------------------------------------------------------


class OwnTile(rammer_toy.ToyBackend):
    """A backend that returns a kernel for another tile than the requested one."""

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        return super().kernel(operator.tiled(tuple(a.extent for a in operator.anchor.axes)), binding)


class NamesMatter(rammer_toy.ToyBackend):
    """A backend whose candidates depend on the operator's name, which no cache key contains."""

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        found = super().candidates(operator, binding)
        return found if len(operator.anchor.name) % 2 else found[:1]


class WorstFirst(rammer_toy.ToyBackend):
    """A backend whose candidates come in reverse order: the worst first."""

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return candidates(operator, binding, self.vdevice, 40)[::-1]


class Nothing(rammer_toy.ToyBackend):
    """A backend without kernels for reductions."""

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return [] if operator.main.kind == "reduction" else super().candidates(operator, binding)


class NoTime(rammer_toy.ToyBackend):
    """A backend whose kernels have a predicted time of zero."""

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        return replace(super().kernel(operator, binding), alone=0.0, crowded=0.0)


class NoFamilies(rammer_toy.ToyProgram):
    """A program that skips tasks of unsupported kernel families."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = [[[t for t in tasks if not t[0].family] for tasks in rows] for rows in self.waves]


class AnyKind(rammer_toy.ToyBackend):
    """A backend that ignores the user's requirement."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(replace(options, require=""))


class AnotherUnit(rammer_toy.ToyBackend):
    """A backend that opens another unit than the probe found."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.hardware = replace(self.hardware, name="another one")


class NewFingerprint(rammer_toy.ToyBackend):
    """A backend that gets a new fingerprint at every opening."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.fingerprint = str(uuid4())
