"""The part of a distributed model on one GPU: its steps, waits and writes as one CUDA graph per slot. Waits come before a step,
writes after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rammer.device.manifest import Array, Backend
from rammer.distributed.distributed_program import DeviceStep, DistributedProgram
from rammer.distributed.transport import Counters, Runs, StepRunner
from rammer.errors import DeviceFailure
from rammer.ir.types import TensorType

from rammer_cuda.bound import GpuProgram, place_arrays
from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.executor import CapturedGraph, CudaProgram, add_launches, instantiate_graph
from rammer_cuda.hardware import import_cupy
from rammer_cuda.peer.entries import ENTRIES, PeerEntry
from rammer_cuda.peer.exchange import TO_DEVICE, TO_HOST, Copy, End, Exchange
from rammer_cuda.resident import Resident


class OnStream(Protocol):
    """An object that can be queued on a stream: a launch, a copy, a program."""

    def launch(self, stream: int) -> None:
        """Queue the work on the stream with this handle."""
        ...


@dataclass
class PartSlot:
    """The state of one run in flight: arrays by tensor, and pinned copies of the host's inputs and outputs. ``steps`` and
    ``results`` are queued for the steps and for results from other devices. The events signal their ends."""

    arrays: dict[str, Any]
    pinned: dict[str, Array]
    steps: list[OnStream] = field(default_factory=list)
    results: list[OnStream] = field(default_factory=list)
    computed: Any = None
    done: Any = None
    keep: list[Any] = field(default_factory=list)


class CudaPart(StepRunner):
    """A runner of the steps of device ``device`` of ``spread``, up to ``depth`` runs in flight, in order on one stream. Model
    results from other devices arrive on another stream, so that steps do not wait for them."""

    def __init__(self, spread: DistributedProgram, device: int, backend: Backend, end: End, counters: Counters) -> None:
        self.spread, self.device, self.end, self.counters = spread, device, end, counters
        self.depth = end.layout.depth
        self.states = spread.staying(device)
        brought = [n for s in self.states for n in s.transfers]
        self.results = [n for n in spread.results(device) if n not in brought]
        self.brought = [n for n in brought if n in spread.results(device)]
        self.kept = {s.into for s in spread.states}
        self.outputs = [o for o in spread.outputs if device == 0]
        self.steps = spread.parts[device].steps
        self.loaded: list[Any] = []
        self.slots: list[PartSlot] = []
        try:
            self.loaded += [backend.load(step.program, step.constants) for step in self.steps]
            with end.unit:
                self.stream, self.aside = (import_cupy().cuda.Stream(non_blocking=True) for _ in range(2))
                self.slots += [self._make_slot(number) for number in range(self.depth)]
                for number, slot in enumerate(self.slots):
                    slot.steps = self._steps(slot, number)
                import_cupy().cuda.runtime.deviceSynchronize()
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the execution of the part."""
        graphs = all(isinstance(piece, CapturedGraph) for slot in self.slots for piece in slot.steps)
        how = "one CUDA graph a run" if graphs else "steps, waits and writes queued one by one"
        copied = (f"output {s.output!r} is copied into input {s.input!r} after every run" for s in self.states)
        return (f"{how}; {self.end.how}", *copied)

    # --- building -----------------------------------------------------------------------------

    def _make_slot(self, number: int) -> PartSlot:
        cp = import_cupy()
        arrays = {i.tensor: _zero_array(i.type) for i in self.spread.inputs if self.device in i.devices}
        arrays |= {t.tensor: self.arriving(t.name, number) for t in self.spread.transfers if t.target == self.device}
        slot = PartSlot(arrays, {})
        for step in self.steps:
            slot.arrays |= {name: _zero_array(kind) for name, kind in step.outputs.items()}
        moved = [i.tensor for i in self.spread.inputs if self.device in i.devices] + [o.tensor for o in self.outputs]
        slot.pinned = {name: _pin_array(slot.arrays[name]) for name in dict.fromkeys(moved)}
        slot.pinned[""] = _pin_array(self.end.failure)
        if self.results:
            entries = [self.end.wait(n) for n in self.results], [self.end.credit(n) for n in self.results]
            before, after = (Together([self.end.exchange(part) for part in _split_entries(e)]) for e in entries)
            slot.results = [before, Fetched(slot, [o.tensor for o in self.outputs]), after]
        slot.computed, slot.done = (cp.cuda.Event(disable_timing=True) for _ in range(2))
        return slot

    def arriving(self, name: str, number: int) -> Any:
        """Return a slot's memory as an array."""
        kind, cp = self.spread.transfer[name].type, import_cupy()
        memory = cp.cuda.UnownedMemory(self.end.slot(name, number), max(kind.nbytes, 1), self.end)
        return cp.ndarray(kind.shape, kind.dtype, cp.cuda.MemoryPointer(memory, 0))

    def _steps(self, slot: PartSlot, number: int) -> list[OnStream]:
        """Return the work of a run, in order: one graph, or all pieces if a program is not a graph."""
        pieces = [*self._pieces(slot, number)]
        if not all(isinstance(p, (Exchange, Copy, GraphPiece)) for p in pieces):
            return [p.alone() if isinstance(p, GraphPiece) else p for p in pieces]
        graph, ends = check_result(import_driver().cuGraphCreate(0), "creating a graph"), list[Any]()
        for piece in pieces:
            if isinstance(piece, GraphPiece):
                ends = add_launches(graph, piece.resident, piece.program.recipe, ends)
            else:
                ends = [piece.node(graph, ends)]
        slot.keep += pieces
        return [CapturedGraph(instantiate_graph(graph), self.loaded[0].resident)]

    def _pieces(self, slot: PartSlot, number: int) -> Iterator[Any]:
        """Yield every step: its waits, its program on the slot's arrays, its writes and credits. The next step's waits join a
        step's writes if a launch may have both."""
        sent = list[PeerEntry]()
        for step, program in zip(self.steps, self.loaded, strict=True):
            yield from self._exchange_launches(sent, [self.end.wait(n) for n in step.arrivals])
            yield self._place_program(slot, step, program)
            departing = ((name, slot.arrays[self.spread.transfer[name].tensor]) for name in step.departures)
            sent = [self.end.put(name, number, array.data.ptr) for name, array in departing]
            sent += [self.end.credit(n) for n in step.frees]
        yield from self._exchange_launches(sent, [self.end.wait(n) for n in self.brought])
        yield from self._copy_states(slot, self.slots[(number + 1) % self.depth])

    def _exchange_launches(self, sent: Sequence[PeerEntry], awaited: Sequence[PeerEntry]) -> Iterator[Any]:
        """Return the fewest launches that write and then wait. Blocks start in order, so waits never block a write."""
        together = [[*sent, *awaited]] if self.end.meets else [sent, awaited]
        return (self.end.exchange(part) for entries in together for part in _split_entries(entries))

    def _place_program(self, slot: PartSlot, step: DeviceStep, program: Any) -> Any:
        """Return a step's program on the slot's arrays."""
        given = {n: slot.arrays[n] for n in step.inputs}
        places = place_arrays(program.resident, given, {n: slot.arrays[n] for n in step.outputs})
        if places.before or places.after:
            raise DeviceFailure(f"a tensor of step {step.program.name} is not at the address that its program uses")
        there = program.resident.with_buffers(places.buffers)
        return GraphPiece(program, there) if _is_plain_graph(program) else program.turning(program.launchable_on(there), there)

    def _copy_states(self, slot: PartSlot, after: PartSlot) -> Iterator[Any]:
        """Yield copies of a run's states into the next run's slot, which starts later on the stream."""
        for state in self.states:
            made, into = slot.arrays[state.tensor], after.arrays[state.into]
            if made.nbytes:
                yield Copy(self.end.unit, into.data.ptr, made.data.ptr, made.nbytes)
        for part in _split_entries([self.end.credit(n) for n in self.brought]):
            yield self.end.exchange(part)

    # --- running ------------------------------------------------------------------------------

    def go(self, runs: Runs) -> None:
        """Execute all ``runs``. Raises DeviceFailure if a transfer times out."""
        with self.end.unit:
            for run in range(runs.first, runs.first + runs.count):
                if run - runs.first >= self.depth:
                    self._finish_run(run - self.depth, runs)
                self._queue_run(run, runs.feed(run))
            for run in range(max(runs.first, runs.first + runs.count - self.depth), runs.first + runs.count):
                self._finish_run(run, runs)

    def _queue_run(self, run: int, inputs: Mapping[str, Array]) -> None:
        slot, memcpy = self.slots[run % self.depth], import_cupy().cuda.runtime.memcpyAsync
        for port in self.spread.inputs:
            given = port.name in inputs or port.tensor not in self.kept
            if self.device in port.devices and port.type.nbytes and given:
                np.copyto(slot.pinned[port.tensor], inputs[port.name])
                pinned, array = slot.pinned[port.tensor], slot.arrays[port.tensor]
                memcpy(array.data.ptr, pinned.ctypes.data, array.nbytes, TO_DEVICE, self.stream.ptr)
        self.queue(run)

    def queue(self, run: int) -> None:
        """Queue a run's steps on its slot's current inputs, then the copies of its outputs to the host."""
        slot = self.slots[run % self.depth]
        for piece in slot.steps:
            piece.launch(self.stream.ptr)
        slot.computed.record(self.stream)
        self.aside.wait_event(slot.computed)
        for piece in slot.results or [Fetched(slot, [o.tensor for o in self.outputs])]:
            piece.launch(self.aside.ptr)
        words = slot.pinned[""]
        import_cupy().cuda.runtime.memcpyAsync(
            words.ctypes.data, self.end.failure.data.ptr, words.nbytes, TO_HOST, self.aside.ptr
        )
        slot.done.record(self.aside)
        self._count_transfers()

    def _count_transfers(self) -> None:
        """Count the writes of a run, from its transfers."""
        for transfer in self.spread.transfers:
            if transfer.source == self.device:
                self.counters.payload_writes += 1 if transfer.nbytes else 0
                self.counters.nbytes += transfer.nbytes
                self.counters.copies += self.end.copies
            self.counters.flag_writes += self.device in (transfer.source, transfer.target)
        self.counters.copies += len(self.states)

    def _finish_run(self, run: int, runs: Runs) -> None:
        """Wait for a run, and deliver its outputs."""
        self.wait(run)
        if self.device == 0:
            pinned = self.slots[run % self.depth].pinned
            runs.deliver(run, {o.name: pinned[o.tensor].copy() for o in self.outputs})

    def wait(self, run: int) -> None:
        """Wait until a run is over. Raises DeviceFailure if it failed."""
        slot = self.slots[run % self.depth]
        try:
            slot.done.synchronize()
        except import_cupy().cuda.runtime.CUDARuntimeError as problem:
            raise DeviceFailure(f"device {self.device} failed: {problem}") from problem
        self.end.check(slot.pinned[""].tolist())
        for program in self.loaded:
            program.check_finished()

    def close(self) -> None:
        """Wait and free the programs; the fabric owns the shared memory. A failed GPU is not waited for."""
        with self.end.unit:
            if self.slots:
                with suppress(import_cupy().cuda.runtime.CUDARuntimeError):
                    self.stream.synchronize()
                    self.aside.synchronize()
            for slot in self.slots:
                for piece in slot.steps:
                    getattr(piece, "close", lambda: None)()
            self.slots = []
        for program in self.loaded:
            program.close()
        self.loaded = []


@dataclass(frozen=True)
class GraphPiece:
    """A program whose launches become nodes, on the addresses of ``resident``; or a graph ``alone``."""

    program: Any
    resident: Resident

    def alone(self) -> OnStream:
        """Return a graph to be queued separately."""
        launchable: OnStream = self.program.launchable_on(self.resident)
        return launchable


@dataclass(frozen=True)
class Together:
    """A sequence of launches in order."""

    parts: Sequence[OnStream]

    def launch(self, stream: int) -> None:
        """Queue all launches on the stream."""
        for part in self.parts:
            part.launch(stream)


@dataclass(frozen=True)
class InGraph:
    """An instantiated graph of exchanges."""

    executable: Any

    def launch(self, stream: int) -> None:
        check_result(import_driver().cuGraphLaunch(self.executable, stream), "launching a graph")


@contextmanager
def chain_launches(launches: Sequence[OnStream]) -> Iterator[OnStream]:
    """Yield consecutive launches as one: a CUDA graph, without the host between them, if all can be nodes. The caller must wait
    for it before leaving the context."""
    if not all(isinstance(launch, Exchange) for launch in launches):
        yield Together(launches)
        return
    graph, ends = check_result(import_driver().cuGraphCreate(0), "creating a graph"), list[Any]()
    for launch in launches:
        ends = [launch.node(graph, ends)]  # type: ignore[attr-defined]
    made = instantiate_graph(graph)
    try:
        yield InGraph(made)
    finally:
        check_result(import_driver().cuGraphExecDestroy(made), "freeing a graph")


@dataclass(frozen=True)
class Fetched:
    """Copies of a slot's tensors into its pinned memory."""

    slot: PartSlot
    names: Sequence[str]

    def launch(self, stream: int) -> None:
        for name in self.names:
            pinned, array = self.slot.pinned[name], self.slot.arrays[name]
            if array.nbytes:
                import_cupy().cuda.runtime.memcpyAsync(pinned.ctypes.data, array.data.ptr, array.nbytes, TO_HOST, stream)


def _is_plain_graph(program: GpuProgram) -> bool:
    """Return True if a program is launches of a CUDA graph, once per run."""
    return isinstance(program, CudaProgram) and program.program.repeat is None


def _split_entries(entries: Sequence[PeerEntry]) -> list[list[PeerEntry]]:
    """Split entries into launches of at most ``ENTRIES``."""
    return [list(entries[i : i + ENTRIES]) for i in range(0, len(entries), ENTRIES)]


def _zero_array(kind: TensorType) -> Any:
    return import_cupy().zeros(kind.shape, kind.dtype)


def _pin_array(array: Any) -> Array:
    """Return pinned host memory for one array, which the GPU accesses directly."""
    memory = import_cupy().cuda.alloc_pinned_memory(max(array.nbytes, 1))
    return np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
