"""One device's part of a model over several: its steps, bound to the memory that tensors arrive in and depart from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.device.arrays import Array
from rammer.device.in_place import HostRoom, copied_by, room_of
from rammer.device.manifest import Backend, Bound, Loaded, RunResult
from rammer.distributed.distributed_program import DeviceStep, DistributedProgram, OnHost
from rammer.distributed.transport.event_log import Log
from rammer.distributed.transport.protocol import Endpoint
from rammer.errors import BadInput
from rammer.runtime.host_bound import HostBound

#: What arrays of a part have on any device.
ROOM: Final = HostRoom(256, 256)
#: What is asked of a run when its turn comes: the model's inputs by name, and who takes the outputs.
Feed: TypeAlias = Callable[[int], Mapping[str, Array]]
Deliver: TypeAlias = Callable[[int, dict[str, Array]], None]


@dataclass(frozen=True)
class Runs:
    """Runs by number, from ``first`` on; ``feed`` gives one's inputs, ``deliver`` takes its outputs on device 0."""

    first: int
    count: int
    feed: Feed
    deliver: Deliver


@dataclass(frozen=True)
class BoundStep:
    """A step for one slot. ``fetched`` and ``sent`` are arrays of the host that the device, which has memory of its own, copies
    from before a run and into after it, ``copied`` how many others the program copies itself."""

    step: DeviceStep
    call: Bound
    fetched: Mapping[str, Array]
    sent: Mapping[str, Array]
    copied: int


class BoundPart:
    """Runs a device's steps, of up to ``depth`` runs at a time: the oldest run that can go on does.

    Every slot has arrays of its own: the model's inputs, what the device's steps leave for each other and what departs. What
    arrives is read where it arrived.
    """

    def __init__(self, spread: DistributedProgram, device: int, backend: Backend, endpoint: Endpoint, depth: int) -> None:
        self.spread, self.device, self.endpoint, self.depth = spread, device, endpoint, depth
        self.results, self.room = spread.results(device), ROOM.with_that_of(room_of(backend))
        self.log: Log | None = None
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

    @property
    def notes(self) -> tuple[str, ...]:
        """What the device does besides running its steps."""
        copied = (f"output {s.output!r} is copied into input {s.input!r} after every run" for s in self.states)
        return tuple(dict.fromkeys((*(note for slot in self.slots for step in slot for note in step.call.notes), *copied)))

    def _initial_arrays(self, slot: int) -> dict[str, Any]:
        """Tensors that are there before any step has run."""
        arrays = {i.tensor: self.room.zeros(i.type.shape, i.type.dtype) for i in self.spread.inputs if self.device in i.devices}
        for transfer in self.spread.transfers:
            if transfer.target == self.device:
                arrays[transfer.tensor] = self.endpoint.slot(transfer.name, slot)
        return arrays

    def _bound(self, step: DeviceStep, program: Loaded, arrays: dict[str, Any]) -> BoundStep:
        """Inputs are where others write them, outputs where they depart from; a device with memory of its own has its own."""
        for name, kind in step.outputs.items():
            arrays[name] = self.room.zeros(kind.shape, kind.dtype)
        given = {n: arrays[n] for n in step.inputs}
        outputs: dict[str, Any] = {n: arrays[n] for n in step.outputs}
        try:
            call = program.bind(given, outputs)
        except BadInput:
            call = program.bind(given, {})  # its memory is no host's: outputs are where it has them, and copied here
        fetched = {n: a for n, a in given.items() if not is_same_memory(call.inputs[n], a)}
        sent = {n: a for n, a in outputs.items() if n in self._needed and not is_same_memory(call.outputs[n], a)}
        taken, made = copied_by(call)
        here = [n for n, a in given.items() if n in taken and a.size and is_same_memory(call.inputs[n], a)]
        here += [n for n, a in outputs.items() if n in made and a.size and is_same_memory(call.outputs[n], a)]
        return BoundStep(step, call, fetched, sent, len(here))

    def go(self, runs: Runs) -> None:
        """All ``runs``. Raises what a step or a transfer raises."""
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
        """Whether nothing has to be waited for."""
        steps, end = self.slots[run % self.depth], self.endpoint
        if number == len(steps):
            return all(end.arrived(n, run) for n in self.results)
        step = steps[number].step
        return all(end.arrived(n, run) for n in step.arrivals) and all(end.free(n, run) for n in step.departures)

    def _step(self, run: int, number: int, deliver: Deliver) -> bool:
        """One step of a run; False where that was all."""
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
        """What crosses: of a tensor whose shape a run decides, as much as there is."""
        transfer = self.spread.transfer[name]
        whole, late = arrays[transfer.tensor], transfer.late
        if late is None:
            return whole
        return whole[tuple(map(slice, transfer.shape({n: int(arrays[n]) for n in late.lengths})))]

    def compute(self, bound: BoundStep) -> float:
        """The step's program, to its end; seconds on the device, where a log asks for them."""
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
        """The outputs are copied for the user, on device 0, and states for the next run; what brought them is given back."""
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
        """Free the programs, and let go of all memory that others write to."""
        for slot in self.slots:
            for step in slot:
                step.call.close()
        for program in self.loaded:
            program.close()
        self.slots, self.loaded, self.arrays = [], [], []


def is_same_memory(ours: Any, given: Array) -> bool:
    """Whether a bound array is the very memory that was given."""
    if not isinstance(ours, np.ndarray):
        return False
    return ours.__array_interface__["data"] == given.__array_interface__["data"] or not given.size


__all__ = ["load_step"]


def load_step(backend: Backend, step: DeviceStep) -> Loaded:
    """``step`` on its device, or on the host beside it."""
    return backend.load(step.program, step.constants) if step.host is None else HostedProgram(step, step.host)


@dataclass
class HostedProgram:
    """One operator on the host."""

    step: DeviceStep
    host: OnHost
    kernels: int = 0

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Once; its seconds by the wall clock."""
        begin = time.perf_counter()
        made = self.host.run({**self.step.constants, **inputs})
        outputs = {n: np.asarray(made[n], order="C") for n in self.step.outputs}
        return RunResult(outputs, time.perf_counter() - begin, (f"{self.host.title} runs on the host",))

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Reads arrays where they are; what it makes is copied."""
        return HostedCall(self, inputs, outputs, stream)

    def close(self) -> None:
        """Nothing is held."""


class HostedCall(HostBound):
    """``HostBound`` of one operator."""

    def __init__(self, program: HostedProgram, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        super().__init__(program.step.program, program.run, inputs, outputs, stream)
        self.copied = (), tuple(self.outputs)
        self.notes = (f"{program.host.title} runs on the host",)
