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
    """A run's time is in milliseconds."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        return replace(result, seconds=result.seconds * 1e3)


class Queued(rammer_toy.ToyProgram):
    """The clock stops when a run is queued, after 0.1 ms: after 1 us, probes would take a minute for rows as long as can be."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        return replace(super().run(inputs), seconds=1e-4 * (1 + time.perf_counter() % 1e-3))


class Profiled(rammer_toy.ToyBackend):
    """Another profiler."""

    profiler_of: ClassVar[Any] = rammer_toy.ToyProfiler

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.profiler = self.profiler_of(self)


class Factor(rammer_toy.ToyProfiler):
    """Times of tasks and of programs are off by a factor."""

    task, whole = 1.0, 1.0

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        alone, crowded = super().task_time(kernel, binding)
        return alone * self.task, crowded * self.task

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        return super().program_time(program, constants, iterations) * self.whole


def off(task: float = 1.0, whole: float = 1.0) -> type[Profiled]:
    """A device whose profiler is off by these factors; programs that are timed for tasks are, too."""
    profiler = type("Off", (Factor,), {"task": task / whole, "whole": whole})
    return type("OffBackend", (Profiled,), {"profiler_of": profiler})


class Formula(rammer_toy.ToyProfiler):
    """Predicts what it should measure."""

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        return kernel.alone, kernel.crowded


class Predicts(Profiled):
    """A device whose profiler is a formula."""

    profiler_of = Formula


class NoThreads(rammer_toy.ToyBackend):
    """Tasks need no threads."""

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        return replace(super().kernel(operator, binding), compiled=Resources(threads=0))


class Traced(rammer_toy.ToyBackend):
    """Says that all tasks ran at once."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        return Recorded(program, [Span(v, t.operator, t.index, 0.0, 1e-3) for v, row in enumerate(program.rows) for t in row])


class TracedFirst(Traced):
    """Records the first task of a row."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        first = replace(program, rows=tuple(row[:1] for row in program.rows))
        return replace(super().trace(first, constants, inputs), program=program)


class TracedShort(TracedFirst):
    """Says that the first task of each row is all that there was."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        first = replace(program, rows=tuple(row[:1] for row in program.rows))
        return replace(super().trace(program, constants, inputs), program=first)


class TracedBackwards(Traced):
    """Spans end before they start."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        run = super().trace(program, constants, inputs)
        return replace(run, spans=[replace(s, start=s.end, end=s.start) for s in run.spans])


# --- closing ----------------------------------------------------------------------------------------


class StopsAll(rammer_toy.ToyBackend):
    """Closing one stops what all of them share."""

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
    """A thread that opening starts, and that stays."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


class KeepsFile(rammer_toy.ToyBackend):
    """A file that opening opens, and that stays open."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        os.open(os.devnull, os.O_RDONLY)


class NoClose(rammer_toy.ToyBackend):
    """Closing is left out."""

    close = None  # type: ignore[assignment]


class CannotClose(rammer_toy.ToyBackend):
    """Closing fails."""

    def close(self) -> None:
        del self.queue  # type: ignore[attr-defined]


class OpensOnce(rammer_toy.ToyBackend):
    """After it was closed it cannot be opened again."""

    closed = False

    def __init__(self, options: OpenOptions) -> None:
        if self.closed:
            raise DeviceFailure("the unit is in use")
        super().__init__(options)

    def close(self) -> None:
        type(self).closed = True


# --- kernels and opening ----------------------------------------------------------------------------


class OwnTile(rammer_toy.ToyBackend):
    """A kernel for another tile than was asked for."""

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        return super().kernel(operator.tiled(tuple(a.extent for a in operator.anchor.axes)), binding)


class NamesMatter(rammer_toy.ToyBackend):
    """What is offered for an operator depends on its name, by which nothing is kept."""

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        found = super().candidates(operator, binding)
        return found if len(operator.anchor.name) % 2 else found[:1]


class WorstFirst(rammer_toy.ToyBackend):
    """Candidates in no order: the worst first."""

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return candidates(operator, binding, self.vdevice, 40)[::-1]


class Nothing(rammer_toy.ToyBackend):
    """No kernel for reductions."""

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return [] if operator.main.kind == "reduction" else super().candidates(operator, binding)


class NoTime(rammer_toy.ToyBackend):
    """Kernels are predicted to take no time."""

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        return replace(super().kernel(operator, binding), alone=0.0, crowded=0.0)


class NoFamilies(rammer_toy.ToyProgram):
    """Kernel families that the device does not have are left out."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = [[[t for t in tasks if not t[0].family] for tasks in rows] for rows in self.waves]


class AnyOption(rammer_toy.ToyBackend):
    """Options that the device does not have are ignored."""

    def __init__(self, options: OpenOptions) -> None:
        known = {k: v for k, v in options.options.items() if k == "memory"}
        super().__init__(replace(options, options=known))


class AnyKind(rammer_toy.ToyBackend):
    """What the user requires is ignored."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(replace(options, require=""))


class AnotherUnit(rammer_toy.ToyBackend):
    """What is opened is not what was found."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.hardware = replace(self.hardware, name="another one")


class NewFingerprint(rammer_toy.ToyBackend):
    """Every opening is another device."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.fingerprint = str(uuid4())
