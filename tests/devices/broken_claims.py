"""Plugins with a planted mistake in their figures, kernels, prices, times or spans, in large tables or in shared memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import broken_backends
import numpy as np
from broken_rows import Rows

from rammer.device.manifest import Array, Binding, Bound, OpenOptions, Recorded, RunResult, Span
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.device import MemoryLayer
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram, Task, Wait
from rammer.runtime.host_bound import HostBound
from rammer.runtime.host_memory import restrict_compute
from rammer.tuning.kernel_probe import random_inputs

import rammer_toy

# --- large tables -----------------------------------------------------------------------------------


class ShortThresholds(Rows):
    """A program whose thresholds have eight bits."""

    def enough(self, wait: Wait) -> int:
        return wait.threshold & 0xFF


class SignedThresholds(Rows):
    """A program whose thresholds are at most 127."""

    def enough(self, wait: Wait) -> int:
        return min(wait.threshold, 127)


class ShortCounters(Rows):
    """A program whose counters have eight bits. A wait for more never ends."""

    def signal(self, task: Task) -> None:
        super().signal(task)
        with self.changed:
            self.finished = {n: count & 0xFF for n, count in self.finished.items()}


def cut_rows(length: int) -> type[rammer_toy.ToyProgram]:
    """Return a device whose rows have room for ``length`` tasks."""

    class Cut(rammer_toy.ToyProgram):
        def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
            super().__init__(program, constants, limit)
            kept = {(t.operator, t.index) for row in program.rows for t in row[:length]}
            self.waves = [[[t for t in tasks if (t[0].name, t[1]) in kept] for tasks in rows] for rows in self.waves]

    return Cut


class ShortIndices(rammer_toy.ToyProgram):
    """A program whose task numbers have eight bits."""

    def run_row(self, tasks: list[tuple[ROperator, int]]) -> None:
        super().run_row([(operator, index & 0xFF) for operator, index in tasks])


class ShortOperators(rammer_toy.ToyProgram):
    """A program whose operator numbers have eight bits."""

    def run_row(self, tasks: list[tuple[ROperator, int]]) -> None:
        places = {o.name: i for i, o in enumerate(self.program.operators)}
        super().run_row([(self.program.operators[places[o.name] & 0xFF], i) for o, i in tasks])


class FewWaves(rammer_toy.ToyProgram):
    """A program that runs at most 256 waves."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.waves = self.waves[:256]


# --- memory that programs share ---------------------------------------------------------------------


class SharedScratch(rammer_toy.ToyProgram):
    """A program whose scratch memory is shared by all programs."""

    scratch: ClassVar[dict[Any, Array]] = {}

    def run_row(self, tasks: list[tuple[ROperator, int]]) -> None:
        for operator, index in tasks:
            if len(operator.computes) < 2 or any(o not in {operator.anchor.name} for o in operator.outputs):
                self.memory.run_task(operator, index)
                continue
            tensors, box = self.memory.tensors, operator.task_box(index)
            types = {**self.program.types}
            boxes, known, origins = operator.boxes(box, types), {n: tensors[n] for n in operator.inputs}, {}
            for compute in operator.computes:
                values = evaluate_compute(restrict_compute(compute, boxes[compute.name], origins), known)
                key = (compute.name, index)
                self.scratch[key] = values
                time.sleep(0)
                known[compute.name] = self.scratch[key] if self.scratch[key].shape == values.shape else values
                origins[compute.name] = tuple(low for low, _ in boxes[compute.name])
            tensors[operator.anchor.name][tuple(slice(low, high) for low, high in box)] = known[operator.anchor.name]


class SharedStaging(rammer_toy.ToyProgram):
    """A program whose tasks collect results in memory that all programs share, before storing them."""

    staging: ClassVar[dict[tuple[int, ...], Array]] = {}

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        for values in result.outputs.values():
            room = self.staging.setdefault((*values.shape, values.itemsize), np.empty_like(values))
            if room.dtype == values.dtype:
                room[...] = values
                time.sleep(0)
                values[...] = room
        return result


class SharedArena(rammer_toy.ToyProgram):
    """A program that shares its arena with programs of equal arena size."""

    arenas: ClassVar[dict[int, dict[str, Array]]] = {}

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        inside = {b.name for b in program.buffers if b.kind == "arena"}
        mine = {s.tensor: self.memory.tensors[s.tensor] for s in program.storages if s.buffer in inside}
        shared = self.arenas.setdefault(program.arena_bytes, mine)
        for name, values in mine.items():
            other = shared.get(name)
            if other is not None and (other.shape, other.dtype) == (values.shape, values.dtype):
                self.memory.tensors[name] = other


# --- bound calls ------------------------------------------------------------------------------------


def copies(when: Callable[[Array], bool]) -> type[rammer_toy.ToyProgram]:
    """Return a device that copies some bound inputs once."""

    class Copies(rammer_toy.ToyProgram):
        def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
            return super().bind({n: np.array(a) if when(np.asarray(a)) else a for n, a in inputs.items()}, outputs, stream)

    return Copies


COPIES_STRIDED = copies(lambda a: not a.flags.c_contiguous)
COPIES_BACKWARDS = copies(lambda a: any(s < 0 for s in a.strides))
COPIES_TRANSPOSED = copies(lambda a: a.flags.f_contiguous and not a.flags.c_contiguous)
COPIES_UNALIGNED = copies(lambda a: not a.flags.aligned)


class OneBinding(rammer_toy.ToyProgram):
    """A program that returns its first bound call for arrays of the same shapes."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        known = self.__dict__.setdefault("known", {})
        key = tuple(sorted((n, np.shape(a)) for n, a in {**inputs, **outputs}.items()))
        return known.setdefault(key, None) or known.update({key: super().bind(inputs, outputs, stream)}) or known[key]


class LastBinding(rammer_toy.ToyProgram):
    """A program whose bound calls with equal shapes all read the arrays of the last one."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        bound = HostBound(self.program, lambda given: self.run(self.latest), inputs, outputs, stream)
        self.latest = bound.inputs
        return bound


class OneResult(rammer_toy.ToyProgram):
    """A program whose bound calls with equal shapes return the outputs of the last run."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        program = self

        class Call(HostBound):
            def launch(self) -> None:
                super().launch()
                program.made = {n: a.copy() for n, a in self.outputs.items()}

            def fetch(self, names: Sequence[str]) -> dict[str, Array]:
                made = program.made if hasattr(program, "made") else self.outputs
                return {n: made[n].copy() for n in names}

        return Call(self.program, self.run, inputs, outputs, stream)


class KernelByShape(rammer_toy.ToyProgram):
    """A program that caches kernels by the shapes of their tensors. Every use has the strides of the first one."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        known: dict[Any, Any] = {}
        storages = list(program.storages)
        for i, s in enumerate(storages):
            key = (s.shape, program.buffer[s.buffer].dtype)
            strides = known.setdefault(key, s.strides)
            other = replace(s, strides=strides)
            low, high = other.span()
            if low >= 0 and high <= program.buffer[s.buffer].size:
                storages[i] = other
        super().__init__(replace(program, storages=tuple(storages)), constants, limit)


# --- figures and kernels ----------------------------------------------------------------------------


def layered(*layers: MemoryLayer) -> type[rammer_toy.ToyBackend]:
    """Return a device with these layers after its memory."""

    class Layered(rammer_toy.ToyBackend):
        def __init__(self, options: OpenOptions) -> None:
            super().__init__(options)
            self.vdevice = replace(self.vdevice, layers=(*self.vdevice.layers, *layers))

    return Layered


UNKNOWN_SCOPE = layered(MemoryLayer("shared", "cluster", 0, 1e11))
WARP_SCOPE = layered(MemoryLayer("lane", "warp", 256, 1e12))
SCOPES_REVERSED = layered(MemoryLayer("host", "host", 0, 1e9))
NO_BANDWIDTH = layered(MemoryLayer("register", "thread", 64, 0.0))


class Figures(rammer_toy.ToyBackend):
    """A backend with other figures."""

    figures: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.vdevice = replace(self.vdevice, **self.figures)


def figures(**values: Any) -> type[Figures]:
    """Return a device with these figures."""
    return type("OtherFigures", (Figures,), {"figures": values})


class Small(rammer_toy.ToyBackend):
    """A backend whose units have 16 KiB."""

    room = 1 << 14

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        ram, cache = self.vdevice.layers
        self.vdevice = replace(self.vdevice, layers=(ram, replace(cache, capacity=self.room)))


class LargeTiles(Small):
    """A backend that offers tiles that do not fit."""

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return [operator.tiled(tuple(a.extent or 1 for a in operator.anchor.axes))]


class LargeNeeds(Small):
    """A backend whose kernels need more of a unit than it has."""

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        return replace(super().kernel(operator, binding), compiled=Resources(threads=1, local_bytes=self.room + 64))


class CutsTiles(Small):
    """A backend that drops the part of a tile that exceeds a unit."""

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
        class Cuts(rammer_toy.ToyProgram):
            def run_row(self, tasks: list[tuple[ROperator, int]]) -> None:
                super().run_row(tasks)
                for operator, index in tasks:
                    if operator.connections and task_cost(operator, self.program.types, vdevice).footprint > Small.room:
                        target = self.memory.tensors[operator.anchor.name]
                        target[tuple(slice(low + (high - low) // 2, high) for low, high in operator.task_box(index))] = 0

        vdevice = self.vdevice
        return Cuts(program, constants, self.limit)


class Familiar(rammer_toy.ToyBackend):
    """A backend with a second family, of one configuration."""

    families: ClassVar[Mapping[str, Mapping[str, range]]] = {"": {}, "fast": {"u": range(1, 5)}}
    family, config = "fast", (("u", 4),)

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        found = super().candidates(operator, binding)
        return [*found, *(replace(o, family=self.family, config=self.config) for o in found[:1])]


def familiar(family: str, **config: int) -> type[Familiar]:
    """Return a device that offers this family in this configuration."""
    return type("OtherFamily", (Familiar,), {"family": family, "config": tuple(config.items())})


class Raises(rammer_toy.ToyBackend):
    """A backend whose kernel search raises for some operators."""

    when: ClassVar[Callable[..., bool]]
    problem: ClassVar[Exception] = ValueError("no such tile")
    in_kernel = False

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        if not self.in_kernel and type(self).when(operator, binding):
            raise self.problem
        return super().candidates(operator, binding)

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        if self.in_kernel and type(self).when(operator, binding):
            raise self.problem
        return super().kernel(operator, binding)


def raises(when: Callable[..., bool], problem: Exception, in_kernel: bool = False) -> type[Raises]:
    """Return a device whose search raises ``problem``."""
    return type("RaisesSometimes", (Raises,), {"when": staticmethod(when), "problem": problem, "in_kernel": in_kernel})


# --- prices and clocks ------------------------------------------------------------------------------


def priced(factor: float, kinds: Sequence[str] = ()) -> type[rammer_toy.ToyBackend]:
    """Return a device whose kernels (of these kinds) have prices that are wrong by a factor."""

    class Priced(rammer_toy.ToyBackend):
        def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
            made = super().kernel(operator, binding)
            if kinds and operator.main.kind not in kinds:
                return made
            return replace(made, alone=made.alone * factor, crowded=made.crowded * factor)

    return Priced


class FirstClock(rammer_toy.ToyProgram):
    """A program that reports the time of its first run for all runs."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        self.first = getattr(self, "first", result.seconds)
        return replace(result, clock=self.first)


class FirstBoundClock(rammer_toy.ToyProgram):
    """A program whose bound calls report the time of their first run for all runs."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        class Call(HostBound):
            first = 0.0

            def measure(self) -> float:
                seconds = super().measure()
                self.first = self.first or seconds
                return self.first

        return Call(self.program, self.run, inputs, outputs, stream)


def clocked(clock: Callable[[], float], factor: float = 1.0) -> type[rammer_toy.ToyProgram]:
    """Return a device that measures its runs with this clock."""

    class Clocked(rammer_toy.ToyProgram):
        def run(self, inputs: Mapping[str, Array]) -> RunResult:
            start = clock()
            result = super().run(inputs)
            return replace(result, clock=(clock() - start) * factor + 1e-9)

    return Clocked


class ProcessorProfiler(rammer_toy.ToyProfiler):
    """A profiler that times programs by the caller's processor time."""

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        loaded = self.backend.load(program, constants)
        inputs, found = random_inputs(program, np.random.default_rng(0)), list[float]()
        for _ in range(iterations):
            start = time.thread_time()
            loaded.run(inputs)
            found.append(time.thread_time() - start)
        loaded.close()
        return statistics.median(found)


class ProfilesProcessor(broken_backends.Profiled):
    """A backend with that profiler."""

    profiler_of = ProcessorProfiler


# --- spans ------------------------------------------------------------------------------------------


class Traced(rammer_toy.ToyBackend):
    """A backend that records correct spans. Tasks run one after another, wave by wave, each on the unit of its row."""

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        loaded = self.load(program, constants)
        spans, start = list[Span](), time.perf_counter()
        loaded.memory.write_inputs(inputs)
        for rows in loaded.waves:
            for row, tasks in enumerate(rows):
                for operator, index in tasks:
                    begin = time.perf_counter() - start
                    loaded.memory.run_task(operator, index)
                    spans.append(Span(row % rammer_toy.VEUS, operator.name, index, begin, time.perf_counter() - start))
        return Recorded(program, [self.span(s) for s in spans])

    def span(self, span: Span) -> Span:
        """Return the recorded span."""
        return span


def traced(span: Callable[[Span], Span]) -> type[Traced]:
    """Return a device that records other spans."""
    return type("OtherSpans", (Traced,), {"span": staticmethod(span)})


ON_ONE_UNIT = traced(lambda s: replace(s, veu=0))
OVERLAP = traced(lambda s: replace(s, end=s.end + 0.01))
AT_ONCE = traced(lambda s: replace(s, start=0.0, end=1e-3))
EMPTY = traced(lambda s: replace(s, end=s.start))
IN_MICROSECONDS = traced(lambda s: replace(s, start=s.start * 1e6 % 50, end=s.start * 1e6 % 50 + (s.end - s.start) * 1e3))
BACK_IN_TIME = traced(lambda s: replace(s, start=max(0.0, 0.05 - s.end), end=max(0.0, 0.05 - s.start)))
