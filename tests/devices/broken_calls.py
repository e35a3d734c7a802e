"""Plugins with a planted mistake in the caller's arrays, in bound calls or in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
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

        return Proxy(
            bound,
            run=lambda: queued.append(queue.submit(later)),
            synchronize=wait,
            seconds=after(bound.seconds),
            to_host=after(bound.to_host),
            close=after(bound.close),
        )  # type: ignore[return-value]


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

        return Proxy(
            bound,
            run=lambda: queued.append(queue.submit(later)),
            synchronize=lambda: None,
            seconds=after(bound.seconds),
            to_host=after(bound.to_host),
            close=after(bound.close),
            write=after(bound.write),
        )  # type: ignore[return-value]


class OneOutput(rammer_toy.ToyProgram):
    """All bound calls of a program write the same arrays, unless they are given others."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        if not hasattr(self, "made"):
            self.made = HostBound(self.program, self.run, inputs, {}, None).outputs
        return HostBound(self.program, self.run, inputs, {**self.made, **outputs}, stream)


class ShownAsTheyAre(rammer_toy.ToyProgram):
    """``to_host`` gives the bound arrays, which the next run overwrites."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        bound = HostBound(self.program, self.run, inputs, outputs, stream)
        return Proxy(bound, to_host=lambda *names: {n: bound.outputs[n] for n in names or bound.outputs})  # type: ignore[return-value]


class WritesAll(rammer_toy.ToyProgram):
    """``write`` of some inputs makes the others zero."""

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        bound = HostBound(self.program, self.run, inputs, outputs, stream)

        def write(values: Mapping[str, Any]) -> None:
            bound.write({**{n: np.zeros_like(a) for n, a in bound.inputs.items()}, **values})

        return Proxy(bound, write=write)  # type: ignore[return-value]


class ByPosition(rammer_toy.ToyProgram):
    """Inputs are taken in the order in which they are given."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        names = [p.external for p in self.program.inputs]
        given = dict(zip(names, inputs.values(), strict=True))
        good = all(given[n].shape == inputs[n].shape and given[n].dtype == inputs[n].dtype for n in names)
        return super().run(given if good else inputs)


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


class ArenaForFree(rammer_toy.ToyBackend):
    """Only what is read and written by the caller is counted against the limit."""

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
        outside = sum(b.nbytes for b in program.buffers if b.kind != "arena")
        if outside <= self.limit < outside + program.arena_bytes:
            return SimpleNamespace(close=lambda: None)
        return super().load(program, constants)


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
