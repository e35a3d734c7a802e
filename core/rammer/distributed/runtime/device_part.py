"""One device's part of a distributed program: its steps, bound to the memory of arriving and departing tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from rammer.device.arrays import Array, HostRoom
from rammer.device.manifest import Backend, Bound, Loaded, RunResult
from rammer.distributed.distributed_program import DeviceStep, DistributedProgram, OnHost
from rammer.distributed.transport.protocol import Deliver, Endpoint, Runs, StepRunner
from rammer.errors import BadInput
from rammer.runtime.host_bound import HostBound, HostRuns

#: Requirements that arrays of a part meet on any device.
ROOM: Final = HostRoom(256, 256)


@dataclass(frozen=True)
class BoundStep:
    """A step bound to one slot. ``fetched`` and ``sent`` are host arrays that a device with separate memory copies from before a
    run and into after it. ``copied`` is the number of other arrays that the program itself copies."""

    step: DeviceStep
    call: Bound
    fetched: Mapping[str, Array]
    sent: Mapping[str, Array]
    copied: int


class BoundPart(StepRunner):
    """Executor of a device's steps for up to ``depth`` runs at a time: the oldest run that can continue does.

    Every slot has separate arrays for the model's inputs, for tensors shared by the device's steps, and for departing tensors.
    Arriving tensors are read in place."""

    logs_steps = True

    def __init__(self, spread: DistributedProgram, device: int, backend: Backend, endpoint: Endpoint, depth: int) -> None:
        self.spread, self.device, self.endpoint, self.depth = spread, device, endpoint, depth
        self.results, self.room = spread.results(device), ROOM.with_that_of(backend.host_room)
        self.loaded: list[Loaded] = []
        self.slots: list[list[BoundStep]] = []
        self.arrays: list[dict[str, Array]] = []
        steps = spread.parts[device].steps
        self._needed = {spread.transfer[n].tensor for s in steps for n in s.departures}
        self._needed |= {o.tensor for o in spread.outputs if o.device == device} | {n for s in steps for n in s.inputs}
        self.states = spread.staying(device)
        self._needed |= {s.tensor for s in self.states}
        self._stay = {s.into for s in spread.states}
        try:
            for step in steps:
                self.loaded.append(load_step(backend, step))
            for slot in range(depth):
                arrays = self._initial_arrays(slot)
                self.arrays.append(arrays)
                self.slots.append([self._bound(s, p, arrays) for s, p in zip(steps, self.loaded, strict=True)])
        except BaseException:
            self.close()
            raise

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """The work of the device besides running its steps."""
        copied = (f"output {s.output!r} is copied into input {s.input!r} after every run" for s in self.states)
        return tuple(dict.fromkeys((*(note for slot in self.slots for step in slot for note in step.call.notes), *copied)))

    def _initial_arrays(self, slot: int) -> dict[str, Any]:
        """Return the tensors that are available before any step has run."""
        arrays = {i.tensor: self.room.zeros(i.type.shape, i.type.dtype) for i in self.spread.inputs if self.device in i.devices}
        for transfer in self.spread.transfers:
            if transfer.target == self.device:
                arrays[transfer.tensor] = self.endpoint.slot(transfer.name, slot)
        return arrays

    def _bound(self, step: DeviceStep, program: Loaded, arrays: dict[str, Any]) -> BoundStep:
        """Bind a step to the arrays where inputs arrive and outputs depart. A device with separate
        memory allocates its arrays."""
        for name, kind in step.outputs.items():
            arrays[name] = self.room.zeros(kind.shape, kind.dtype)
        given = {n: arrays[n] for n in step.inputs}
        outputs: dict[str, Any] = {n: arrays[n] for n in step.outputs}
        try:
            call = program.bind(given, outputs)
        except BadInput:
            call = program.bind(given, {})  # separate device memory: outputs stay there and are copied to these arrays
        fetched = {n: a for n, a in given.items() if not is_same_memory(call.inputs[n], a)}
        sent = {n: a for n, a in outputs.items() if n in self._needed and not is_same_memory(call.outputs[n], a)}
        taken, made = call.copied
        here = [n for n, a in given.items() if n in taken and a.size and is_same_memory(call.inputs[n], a)]
        here += [n for n, a in outputs.items() if n in made and a.size and is_same_memory(call.outputs[n], a)]
        return BoundStep(step, call, fetched, sent, len(here))

    def go(self, runs: Runs) -> None:
        """Execute all ``runs``. Raises the errors of steps and transfers."""
        ahead, end, active = runs.first, runs.first + runs.count, dict[int, int]()
        while active or ahead < end:
            while ahead < end and len(active) < (1 if self.spread.states else self.depth):
                self._start_run(ahead, runs.feed(ahead))
                active[ahead] = 0
                ahead += 1
            run = next((r for r in active if self._is_ready(r, active[r])), min(active))
            if self._step(run, active[run], runs.deliver):
                active[run] += 1
            else:
                del active[run]

    def _start_run(self, run: int, inputs: Mapping[str, Array]) -> None:
        arrays = self.arrays[run % self.depth]
        for port in self.spread.inputs:
            if self.device in port.devices and (port.tensor not in self._stay or port.name in inputs):
                np.copyto(arrays[port.tensor], inputs[port.name])

    def _is_ready(self, run: int, number: int) -> bool:
        """Return True if the step can run without waiting."""
        steps, end = self.slots[run % self.depth], self.endpoint
        if number == len(steps):
            return all(end.arrived(n, run) for n in self.results)
        step = steps[number].step
        return all(end.arrived(n, run) for n in step.arrivals) and all(end.free(n, run) for n in step.departures)

    def _step(self, run: int, number: int, deliver: Deliver) -> bool:
        """Execute one step of a run. Returns False if the run is complete."""
        steps, end = self.slots[run % self.depth], self.endpoint
        if number == len(steps):
            self._finish_run(run, deliver)
            return False
        bound = steps[number]
        for name in bound.step.arrivals:
            end.wait(name, run)
        log = self.log
        begin = log.now() if log is not None else 0.0
        seconds = self.compute(bound)
        if log is not None:
            log.add("step", str(number), run, begin, seconds=seconds, clock=bound.call.clock)
        arrays = self.arrays[run % self.depth]
        for name in bound.step.departures:
            end.put(name, run, self._departing_array(name, arrays))
        for name in bound.step.frees:
            end.release(name, run)
        return True

    def _departing_array(self, name: str, arrays: Mapping[str, Array]) -> Array:
        """Return the array that crosses; for a dynamic shape, its current extents only."""
        transfer = self.spread.transfer[name]
        whole, late = arrays[transfer.tensor], transfer.late
        if late is None:
            return whole
        return whole[tuple(map(slice, transfer.shape({n: int(arrays[n]) for n in late.lengths})))]

    def compute(self, bound: BoundStep) -> float:
        """Run the step's program to completion and return its seconds on the device, or 0 without a log."""
        if bound.fetched:
            bound.call.write(bound.fetched)
            self.endpoint.counters.host_copies += len(bound.fetched)
        seconds = 0.0
        if self.log is not None:
            seconds = bound.call.seconds()
        else:
            bound.call.run()
            bound.call.synchronize()
        self.endpoint.counters.host_copies += bound.copied
        if bound.sent:
            for name, values in bound.call.to_host(*bound.sent).items():
                np.copyto(bound.sent[name], values)
            self.endpoint.counters.host_copies += len(bound.sent)
        return seconds

    def _finish_run(self, run: int, deliver: Deliver) -> None:
        """Deliver copies of the outputs on device 0, copy states for the next run, and release the result transfers."""
        for name in self.results:
            self.endpoint.wait(name, run)
        if self.device == 0:
            arrays, log = self.arrays[run % self.depth], self.log
            begin = log.now() if log is not None else 0.0
            deliver(run, {o.name: arrays[o.tensor].copy() for o in self.spread.outputs})
            if log is not None:
                log.add("outputs", "", run, begin)
        now, after = self.arrays[run % self.depth], self.arrays[(run + 1) % self.depth]
        for state in self.states:
            np.copyto(after[state.into], now[state.tensor])
            self.endpoint.counters.copies += 1
        for name in self.results:
            self.endpoint.release(name, run)

    def close(self) -> None:
        """Free the programs, and release all memory that other devices write to."""
        for slot in self.slots:
            for step in slot:
                step.call.close()
        for program in self.loaded:
            program.close()
        self.slots, self.loaded, self.arrays = [], [], []


def is_same_memory(ours: Any, given: Array) -> bool:
    """Return True if a bound array is stored in the memory of ``given``."""
    if not isinstance(ours, np.ndarray):
        return False
    return ours.__array_interface__["data"] == given.__array_interface__["data"] or not given.size


__all__ = ["load_step"]


def load_step(backend: Backend, step: DeviceStep) -> Loaded:
    """Load ``step`` on its device, or on the host for a host operator."""
    return backend.load(step.program, step.constants) if step.host is None else HostedProgram(step, step.host)


@dataclass
class HostedProgram(Loaded):
    """A program of one host operator."""

    step: DeviceStep
    host: OnHost
    kernels: int = 0

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Run the operator once; its seconds are wall-clock time."""
        begin = time.perf_counter()
        made = self.host.run({**self.step.constants, **inputs})
        outputs = {n: np.asarray(made[n], order="C") for n in self.step.outputs}
        return RunResult(outputs, time.perf_counter() - begin, (f"{self.host.title} runs on the host",))

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Return a call that reads input arrays in place and copies its outputs."""
        runs = HostRuns(notes=(f"{self.host.title} runs on the host",), reads_in_place=True)
        return HostBound(self.step.program, self.run, inputs, outputs, stream, runs)

    def close(self) -> None:
        """Do nothing: the program holds no resources."""
