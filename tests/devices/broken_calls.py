"""Plugins with a planted mistake in the caller's arrays, in bound calls or in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rammer.device.manifest import Array, Bound, Loaded, RunResult
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram
from rammer.runtime.host_bound import HostBound

import rammer_toy


def packed(values: Array) -> Array:
    """Return the memory from the first element on, as if the array had no gaps."""
    return as_strided(values, strides=np.empty(values.shape, values.dtype).strides)


# --- arrays of the caller ---------------------------------------------------------------------------


class DenseInputs(rammer_toy.ToyProgram):
    """A program that reads bound inputs as dense arrays."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        return super().bind({n: packed(a) for n, a in inputs.items()}, outputs, stream)


class DenseOutputs(rammer_toy.ToyProgram):
    """A program that replaces bound outputs with gaps by dense arrays."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        return super().bind(inputs, {n: np.ascontiguousarray(a) for n, a in outputs.items()}, stream)


class DenseRuns(rammer_toy.ToyProgram):
    """A program whose ``run`` reads its inputs as dense arrays."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        return super().run({n: packed(a) for n, a in inputs.items()})


class DenseConstants(rammer_toy.ToyProgram):
    """A program that uploads constants as if they were dense arrays."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, {n: packed(a) for n, a in constants.items()}, limit)


class BorrowsConstants(rammer_toy.ToyProgram):
    """A program that reads constants from the caller's arrays in every run."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.constants = constants

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        for name, value in self.constants.items():
            self.memory.tensors[name][...] = value
        return super().run(inputs)


class Stale(rammer_toy.ToyProgram):
    """A program whose bound calls read the values that their inputs had at binding."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        kept = {n: np.array(a) for n, a in inputs.items()}
        return HostBound(self.program, lambda given: self.run(kept), inputs, outputs, stream)


class Shadow(rammer_toy.ToyProgram):
    """A program whose bound runs write private arrays, which only ``to_host`` returns."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        return ShadowCall(self.program, self.run, inputs, outputs, stream)


class ShadowCall(HostBound):
    """A bound call that writes private arrays."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.private = {n: np.array(a) for n, a in self.outputs.items()}

    def launch(self) -> None:
        self.measure()

    def measure(self) -> float:
        shown, self.outputs = self.outputs, self.private
        try:
            return super().measure()
        finally:
            self.outputs = shown

    def fetch(self, names: Sequence[str]) -> dict[str, Array]:
        return {n: self.private[n].copy() for n in names}


class QueuedCall(HostBound):
    """A bound call that queues its runs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.queue, self.queued = ThreadPoolExecutor(1), list[Future[float]]()

    def launch(self) -> None:
        self.queued.append(self.queue.submit(self.run_later))

    def run_later(self) -> float:
        time.sleep(0.005)
        return super().measure()

    def drain(self) -> None:
        while self.queued:
            self.queued.pop(0).result()

    def measure(self) -> float:
        self.drain()
        return super().measure()

    def fetch(self, names: Sequence[str]) -> dict[str, Array]:
        self.drain()
        return super().fetch(names)

    def release(self) -> None:
        self.drain()
        super().release()


class Overtaken(rammer_toy.ToyProgram):
    """A program that queues bound runs, and whose ``write`` does not wait for them."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        class Call(QueuedCall):
            def wait(self) -> None:
                self.drain()

        return Call(self.program, self.run, inputs, outputs, stream)


class Impatient(rammer_toy.ToyProgram):
    """A program that queues bound runs, and whose ``synchronize`` does not wait for them."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        class Call(QueuedCall):
            def store(self, values: Mapping[str, Any]) -> None:
                self.drain()
                super().store(values)

        return Call(self.program, self.run, inputs, outputs, stream)


class OneOutput(rammer_toy.ToyProgram):
    """A program whose bound calls write the same arrays, unless the caller provides outputs."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        if not hasattr(self, "made"):
            self.made = HostBound(self.program, self.run, inputs, {}, None).outputs
        return HostBound(self.program, self.run, inputs, {**self.made, **outputs}, stream)


class ShownAsTheyAre(rammer_toy.ToyProgram):
    """A program whose ``to_host`` returns the bound arrays, which the next run overwrites."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        class Call(HostBound):
            def fetch(self, names: Sequence[str]) -> dict[str, Array]:
                return {n: self.outputs[n] for n in names}

        return Call(self.program, self.run, inputs, outputs, stream)


class WritesAll(rammer_toy.ToyProgram):
    """A program whose ``write`` of some inputs makes the others zero."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        class Call(HostBound):
            def store(self, values: Mapping[str, Any]) -> None:
                super().store({**{n: np.zeros_like(a) for n, a in self.inputs.items()}, **values})

        return Call(self.program, self.run, inputs, outputs, stream)


class ByPosition(rammer_toy.ToyProgram):
    """A program that reads inputs in the order of the caller."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        names = [p.external for p in self.program.inputs]
        given = dict(zip(names, inputs.values(), strict=True))
        good = all(given[n].shape == inputs[n].shape and given[n].dtype == inputs[n].dtype for n in names)
        return super().run(given if good else inputs)


class Views(rammer_toy.ToyProgram):
    """A program whose outputs are views of its memory."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        return replace(result, outputs={p.external: self.memory.tensors[p.tensor] for p in self.program.outputs})


# --- memory -----------------------------------------------------------------------------------------


class Kept(rammer_toy.ToyProgram):
    """A program whose ``close`` frees nothing."""

    all: ClassVar[list[Any]] = []

    def close(self) -> None:
        super().close()
        self.all.append(self.memory)


class NoLimit(rammer_toy.ToyBackend):
    """A backend that loads more than fits into memory."""

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
        return SimpleNamespace(close=lambda: None) if program.name == "copy" else super().load(program, constants)


class ArenaForFree(rammer_toy.ToyBackend):
    """A backend that counts only the caller's inputs and outputs against the limit."""

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
        outside = sum(b.nbytes for b in program.buffers if b.kind != "arena")
        if outside <= self.limit < outside + program.arena_bytes:
            return SimpleNamespace(close=lambda: None)
        return super().load(program, constants)


class Exhausted(rammer_toy.ToyBackend):
    """A backend that counts programs that failed to load."""

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
    """A program whose arena is shared by programs of one size and supports one run at a time."""

    arenas: ClassVar[dict[int, dict[str, Any]]] = {}

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        self.memory = self.arenas.setdefault(hash(str(program)), {}).setdefault("memory", self.memory)


class NeedsTurns(rammer_toy.ToyProgram):
    """A program that two concurrent calls corrupt. The core admits one call at a time."""

    inside = 0

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        self.inside += 1
        time.sleep(0.001)
        result, alone = super().run(inputs), self.inside == 1
        self.inside -= 1
        return result if alone else replace(result, outputs={n: a * 0 for n, a in result.outputs.items()})


class RunsWhenClosed(rammer_toy.ToyProgram):
    """A program that runs after ``close``. The core does not call a closed program."""

    def close(self) -> None:
        pass


class NothingEmpty(rammer_toy.ToyProgram):
    """A program that refuses a tensor without elements."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        if any(0 in s.shape for s in program.storages):
            raise ValueError("invalid buffer size")
        super().__init__(program, constants, limit)
