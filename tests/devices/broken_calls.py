"""Plugins with a planted mistake in calls, memory, clocks, kernels or the opening of the device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rammer.device.manifest import Array, Binding, Bound, Loaded, OpenOptions, RunResult
from rammer.errors import DeviceFailure
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.runtime.host_bound import HostBound

import rammer_toy


def packed(values: Array) -> Array:
    """The memory from the first element on, as if the array had no gaps."""
    return as_strided(values, strides=np.empty(values.shape, values.dtype).strides)


# --- arrays of the caller ---------------------------------------------------------------------------


class DenseInputs(rammer_toy.ToyProgram):
    """A bound input is taken for a dense array."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        return super().bind({n: packed(a) for n, a in inputs.items()}, outputs, stream)


class DenseOutputs(rammer_toy.ToyProgram):
    """A bound output with gaps is replaced by one without."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        return super().bind(inputs, {n: np.ascontiguousarray(a) for n, a in outputs.items()}, stream)


class DenseRuns(rammer_toy.ToyProgram):
    """``run`` takes its inputs for dense arrays."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        return super().run({n: packed(a) for n, a in inputs.items()})


class DenseConstants(rammer_toy.ToyProgram):
    """Constants are uploaded as if they were dense arrays."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, {n: packed(a) for n, a in constants.items()}, limit)


class BorrowsConstants(rammer_toy.ToyProgram):
    """Constants stay in the caller's arrays, and are read there in every run."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.constants = constants

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        for name, value in self.constants.items():
            self.memory.tensors[name][...] = value
        return super().run(inputs)


class Stale(rammer_toy.ToyProgram):
    """Bound calls keep the values that their inputs had."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        kept = {n: np.array(a) for n, a in inputs.items()}
        return HostBound(self.program, lambda given: self.run(kept), inputs, outputs, stream)


class Shadow(rammer_toy.ToyProgram):
    """A bound run writes arrays of its own, and only ``to_host`` knows them."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        bound = HostBound(self.program, self.run, inputs, outputs, stream)
        shown = dict(bound.outputs)
        bound.outputs = {n: np.array(a) for n, a in shown.items()}
        made = bound.to_host
        return Proxy(bound, outputs=shown, to_host=made)  # type: ignore[return-value]


class Proxy:
    """``plain`` with other members."""

    def __init__(self, plain: Any, **members: Any) -> None:
        self.plain = plain
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class Overtaken(rammer_toy.ToyProgram):
    """Bound runs are queued, and ``write`` does not wait for them."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        bound = HostBound(self.program, self.run, inputs, outputs, stream)
        queue, queued = ThreadPoolExecutor(1), list[Future[None]]()

        def later() -> None:
            time.sleep(0.005)
            bound.run()

        def wait() -> None:
            for done in queued:
                done.result()
            queued.clear()

        def after(call: Any) -> Any:
            return lambda *given: (wait(), call(*given))[1]

        return Proxy(bound, run=lambda: queued.append(queue.submit(later)), synchronize=wait,
                     seconds=after(bound.seconds), to_host=after(bound.to_host), close=after(bound.close))  # type: ignore[return-value]  # fmt: skip


class Impatient(rammer_toy.ToyProgram):
    """Bound runs are queued, and ``synchronize`` does not wait for them."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        bound = HostBound(self.program, self.run, inputs, outputs, stream)
        queue, queued = ThreadPoolExecutor(1), list[Future[None]]()

        def later() -> None:
            time.sleep(0.005)
            bound.run()

        def after(call: Any) -> Any:
            def waiting(*given: Any) -> Any:
                while queued:
                    queued.pop().result()
                return call(*given)

            return waiting

        return Proxy(bound, run=lambda: queued.append(queue.submit(later)), synchronize=lambda: None,
                     seconds=after(bound.seconds), to_host=after(bound.to_host), close=after(bound.close),
                     write=after(bound.write))  # type: ignore[return-value]  # fmt: skip


class Views(rammer_toy.ToyProgram):
    """Outputs are views of the program's memory."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        return replace(result, outputs={p.external: self.memory.tensors[p.tensor] for p in self.program.outputs})


# --- memory -----------------------------------------------------------------------------------------


class Kept(rammer_toy.ToyProgram):
    """``close`` frees nothing."""

    all: ClassVar[list[Any]] = []

    def close(self) -> None:
        super().close()
        self.all.append(self.memory)


class NoLimit(rammer_toy.ToyBackend):
    """More is loaded than there is memory for."""

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
        return SimpleNamespace(close=lambda: None) if program.name == "copy" else super().load(program, constants)


class Exhausted(rammer_toy.ToyBackend):
    """What did not fit is counted as if it had been loaded."""

    taken = 0

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        need = sum(b.nbytes for b in program.buffers)
        self.taken += need
        if self.taken > self.limit:
            raise DeviceFailure(f"out of memory: {self.taken} bytes, the limit is {self.limit}")
        loaded = super().load(program, constants)
        self.taken -= need
        return loaded


class OneArena(rammer_toy.ToyProgram):
    """Programs of one size share their arena, which bears no two runs at a time."""

    arenas: ClassVar[dict[int, dict[str, Any]]] = {}

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.memory = self.arenas.setdefault(hash(str(program)), {}).setdefault("memory", self.memory)


class NeedsTurns(rammer_toy.ToyProgram):
    """Two calls at a time spoil each other: the core lets no two in."""

    inside = 0

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        self.inside += 1
        time.sleep(0.001)
        result, alone = super().run(inputs), self.inside == 1
        self.inside -= 1
        return result if alone else replace(result, outputs={n: a * 0 for n, a in result.outputs.items()})


class RunsWhenClosed(rammer_toy.ToyProgram):
    """A closed program runs: the core does not call it."""

    def close(self) -> None:
        pass


class NothingEmpty(rammer_toy.ToyProgram):
    """A tensor without elements is refused."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        if any(0 in s.shape for s in program.storages):
            raise ValueError("invalid buffer size")
        super().__init__(program, constants, limit)


# --- clocks -----------------------------------------------------------------------------------------


class Milliseconds(rammer_toy.ToyProgram):
    """A run's time is in milliseconds."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        return replace(result, seconds=result.seconds * 1e3)


class Queued(rammer_toy.ToyProgram):
    """The clock stops when a run has been queued."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        return replace(super().run(inputs), seconds=1e-6 * (1 + time.perf_counter() % 1e-3))


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


class NewFingerprint(rammer_toy.ToyBackend):
    """Every opening is another device."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.fingerprint = str(uuid4())
