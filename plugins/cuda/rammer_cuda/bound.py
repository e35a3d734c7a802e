"""Programs on a GPU in any execution form, and their bound calls, in which the caller's arrays replace
input and output buffers."""

from __future__ import annotations

import ctypes
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from rammer.device.arrays import host_view, on_host
from rammer.device.manifest import Array, Bound, Loaded, RunResult
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.program import ALIGNMENT
from rammer.ir.types import itemsize
from rammer.runtime.host_bound import check_apart
from rammer.verify import state_ports

from rammer_cuda.compile import compile_cubin
from rammer_cuda.device import device_source
from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.resident import Resident


@dataclass
class Places:
    """The arrays of a bound call's inputs and outputs.

    ``buffers`` are CuPy arrays that replace program buffers, by the buffers' names. If the caller's array is unsuitable (strided,
    or not aligned), ``before`` and ``after`` list the (to, from) copies on the device."""

    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    before: list[tuple[Any, Any]] = field(default_factory=list)
    after: list[tuple[Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def place_arrays(resident: Resident, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Places:
    """Return the arrays as CuPy arrays, which share the memory of arrays on the GPU. Raise BadInput for an array that is
    elsewhere, is read-only, or overlaps an output."""
    cp, program, places = resident.cp, resident.program, Places()
    kept = state_ports(program)
    for port in program.inputs:
        what, given = f"input {port.external!r}", inputs[port.external]
        if on_host(given):
            places.notes.append(f"{what} was copied from the host when it was bound")
            given = cp.asarray(host_view(what, given))
        array = places.inputs[port.external] = import_array(resident, what, given)
        if port.external in kept.values():
            places.inputs[port.external] = _place_state(resident, places, port.tensor, array)
            continue
        dense = _replace_buffer(resident, places, what, port.tensor, array)
        if dense is not array:
            places.before.append((dense, array))
    for port in program.outputs:
        what, kind = f"output {port.external!r}", program.types[port.tensor]
        if port.external in kept:
            places.outputs[port.external] = places.inputs[kept[port.external]]
            continue
        if port.external in outputs:
            array = import_array(resident, what, outputs[port.external], written=True)
        else:
            array = cp.empty(kind.shape, kind.dtype)
        places.outputs[port.external] = array
        dense = _replace_buffer(resident, places, what, port.tensor, array)
        if dense is not array:
            places.after.append((array, dense))
    check_apart({n: a for n, a in places.inputs.items() if n not in kept.values()}, places.outputs, cp.may_share_memory)
    return places


def _place_state(resident: Resident, places: Places, tensor: str, array: Any) -> Any:
    """Use ``array``, or a suitable copy, as the memory of an input and of the output that continues it."""
    if array.size:
        fits = array.flags.c_contiguous and not array.data.ptr % ALIGNMENT
        if not fits:
            places.notes.append("a state was copied once: its array is not dense, or not aligned")
            array = resident.cp.array(array, order="C")
        places.buffers[resident.program.storage[tensor].buffer] = array
    return array


def import_array(resident: Resident, what: str, array: Any, written: bool = False) -> Any:
    """Return a device array as a CuPy array that shares its memory."""
    cp = resident.cp
    if on_host(array):
        raise BadInput(f"{what} is in host memory", hint="bind an array on the GPU, or none and read bound.to_host()")
    try:
        offered = getattr(array, "__cuda_array_interface__", None)
        if written and offered is not None and offered["data"][1]:
            raise BadInput(f"{what} is an array that cannot be written")
        found = cp.asarray(array) if offered is not None else cp.from_dlpack(array)
    except (RuntimeError, TypeError, BufferError, AttributeError) as problem:
        raise BadInput(f"{what} cannot be read: {problem}") from problem  # for example a tensor that requires a gradient
    if found.size and found.device.id != resident.device.id:
        raise BadInput(f"{what} is on GPU {found.device.id}, the program on GPU {resident.device.id}")
    return found


def _replace_buffer(resident: Resident, places: Places, what: str, tensor: str, array: Any) -> Any:
    """Use ``array`` as the tensor's buffer, or a dense copy with a note; return the buffer."""
    if not array.size:
        return array
    dense = array
    fault = "" if array.flags.c_contiguous else "dense"
    fault = fault or (f"aligned to {ALIGNMENT} bytes" if array.data.ptr % ALIGNMENT else "")
    if fault:
        places.notes.append(f"{what} is not {fault}: {array.nbytes} bytes are copied on the GPU in every run")
        dense = resident.cp.empty(array.shape, array.dtype)
    places.buffers[resident.program.storage[tensor].buffer] = dense
    return dense


def stream_of(resident: Resident, stream: Any) -> Any:
    """Return a CuPy stream for the caller's stream. The stream is CuPy's, torch's, one with ``__cuda_stream__``, or a handle. A
    handle must stay valid until the bound call is closed. Raise BadInput for other types."""
    if stream is None:
        return resident.stream
    handle = stream
    for name in ("ptr", "cuda_stream"):
        handle = getattr(stream, name, handle)
    if hasattr(stream, "__cuda_stream__"):
        handle = stream.__cuda_stream__()[1]
    if isinstance(handle, bool) or not isinstance(handle, int):
        raise BadInput(f"{type(stream).__name__} is not a CUDA stream", hint="give torch's, CuPy's, or a handle as a number")
    streams = resident.cp.cuda
    if hasattr(streams.Stream, "from_external"):
        return streams.Stream.from_external(_Handle(handle))
    return streams.ExternalStream(handle, resident.device.id)  # CuPy 13


@dataclass(frozen=True)
class _Handle:
    """A stream's handle in the form that CUDA libraries exchange."""

    value: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.value


class Launchable(Protocol):
    """A run of a program on fixed addresses."""

    def launch(self, stream: int) -> None:
        """Queue the run on the stream with this handle."""
        ...

    def close(self) -> None:
        """Free the resources of the run."""
        ...


class GpuProgram(Loaded):
    """A program resident on a GPU (``rammer.device.manifest.Loaded``), run by ``launchable``."""

    launchable: Launchable

    def __init__(self, resident: Resident) -> None:
        self.resident, self.program, self.notes = resident, resident.program, tuple[str, ...]()
        self.bounds: weakref.WeakSet[CudaBound] = weakref.WeakSet()

    @abstractmethod
    def launchable_on(self, resident: Resident) -> Launchable:
        """Return a launchable of the program, or of one iteration, on the addresses of ``resident``."""

    def turning(self, inner: Launchable, resident: Resident) -> Launchable:
        """Return a launchable of all iterations, from that of one."""
        return inner if self.program.repeat is None else RepeatedLaunch(inner, resident)

    @abstractmethod
    def check_finished(self) -> None:
        """Raise DeviceFailure if the last run, which has ended, was aborted."""

    def run(self, inputs: Mapping[str, Any]) -> RunResult:
        """Copy in, launch, copy out; ``seconds`` is the launch alone, by events."""
        self.resident.copy_in(inputs)
        seconds = self.replay()
        return RunResult(self.resident.copy_out(), seconds, self.notes)

    def replay(self) -> float:
        """Launch once on the current inputs; return its seconds on the GPU. Raise DeviceFailure if it failed."""
        seconds = self.resident.timed(lambda: self.launchable.launch(self.resident.stream.ptr))
        self.check_finished()
        return seconds

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Return a separate launchable over the caller's arrays. Dense, aligned arrays on this GPU are used without copies."""
        with self.resident.device:
            chosen = stream_of(self.resident, stream)
            places = place_arrays(self.resident, inputs, outputs)
            there = self.resident.with_buffers(places.buffers)
            launchable = self.turning(self.launchable_on(there), there)
        self.resident.ready()
        made = CudaBound(self, places, chosen, launchable, stream)
        self.bounds.add(made)
        return made

    def close(self) -> None:
        """Free the launchable, the modules and all buffers. Closing again has no effect."""
        if not self.resident.closed:
            for bound in list(self.bounds):
                bound.close()
            self.launchable.close()
            self.resident.close()


class CudaBound(Bound):
    """A launchable on fixed arrays; ``owner`` keeps a caller's stream alive."""

    def __init__(self, program: GpuProgram, places: Places, stream: Any, launchable: Launchable, owner: Any) -> None:
        super().__init__(places.inputs, places.outputs, clock="GPU events", stream=stream, notes=places.notes)
        self._program, self._resident, self._places, self._launchable = program, program.resident, places, launchable
        self._owner = owner
        self._dropped = weakref.finalize(self, _let_go, self._resident, stream, owner, places, launchable)
        self._dropped.atexit = False  # the driver may already be unloaded at exit

    def launch(self) -> None:
        """Queue one run."""
        with self._resident.device:
            self._resident.follow(self.stream, self._owner)
            self._queue_run()

    def _queue_run(self) -> None:
        places = self._places
        if not places.before and not places.after:
            self._launchable.launch(self.stream.ptr)
            return
        with self.stream:
            for to, source in places.before:
                to[...] = source
            self._launchable.launch(self.stream.ptr)
            for to, source in places.after:
                to[...] = source

    def wait(self) -> None:
        """Wait for the stream. Raise DeviceFailure if work on it failed or a wait timed out."""
        self._resident.wait(self.stream)
        self._program.check_finished()

    def measure(self) -> float:
        """Run once between two events; return the seconds on the GPU."""
        self._resident.follow(self.stream, self._owner)
        seconds = self._resident.timed(self._queue_run, self.stream)
        self._program.check_finished()
        return seconds

    def store(self, values: Mapping[str, Any]) -> None:
        """Queue copies into bound inputs, from the GPU or the host."""
        with self._resident.device, self.stream:
            for name, value in values.items():
                what = f"input {name!r}"
                if on_host(value):
                    value = np.ascontiguousarray(host_view(what, value))
                    self.inputs[name][...] = self._resident.cp.asarray(value)
                else:
                    self.inputs[name][...] = import_array(self._resident, what, value)

    def fetch(self, names: Sequence[str]) -> dict[str, Array]:
        """Return copies of outputs after all queued work."""
        self.wait()
        with self._resident.device:
            fetch = partial(self._resident.cp.asnumpy, stream=self.stream)
            found = {n: np.asarray(fetch(self.outputs[n])) for n in names}
        self.wait()
        return found

    def release(self) -> None:
        """Wait, free the graph and release the arrays."""
        self._dropped.detach()
        self.wait()
        self._launchable.close()
        self._resident.leave(self.stream)
        self._places = Places()
        self.inputs, self.outputs = {}, {}


def _let_go(resident: Resident, stream: Any, owner: Any, *used: Any) -> None:
    """Release an unclosed bound call that was collected, after its queued runs."""
    with suppress(DeviceFailure):
        resident.wait(stream)
    del owner, used


#: The bits of moves in a launch (``device/moves.cuh``).
BITS: Final = {"once": 1, "first": 1, "before": 2, "after": 4, "last": 8}
THREADS: Final = 256
#: Bytes that a thread moves at once, and the maximum number of blocks for one move.
WIDE, MOST_BLOCKS = 16, 64


class RepeatedLaunch:
    """A launch of all iterations of a program on the addresses of ``resident``; ``inner`` launches one.

    Moves after one iteration and before the next have different targets. So have moves first and before an iteration, and moves
    after the last. So one launch does both kinds."""

    def __init__(self, inner: Launchable, resident: Resident) -> None:
        self.inner, self.resident = inner, resident
        rows, longest = make_move_table(resident)
        self.table = resident.cp.asarray(rows)
        self.blocks = min(max(-(-longest // (THREADS * WIDE)), 1), MOST_BLOCKS), len(rows)
        self.function = resident.function(compile_cubin(device_source("moves"), resident.gpu.architecture).code, "rm_moves", 0)

    def launch(self, stream: int) -> None:
        """Queue all iterations on the stream with this handle. If a length determines their number, earlier queued work is waited
        for, because the length may be its result."""
        program = self.resident.program
        turns = program.turns_at(lambda name: self.length(name, stream))
        self.skipped = program.turns - turns
        for turn in range(turns):
            self.move(turn, BITS["before"] | (BITS["after"] if turn else BITS["first"]), stream)
            self.inner.launch(stream)
        self.move(turns, BITS["after"] | BITS["last"], stream)

    def length(self, tensor: str, stream: int) -> int:
        """Return the value of a one-element input."""
        value, api, storage = np.zeros(1, np.int64), import_driver(), self.resident.program.storage[tensor]
        place = int(self.resident.buffers[storage.buffer].data.ptr) + storage.offset * value.itemsize
        check_result(api.cuMemcpyDtoHAsync(value.ctypes.data, place, value.nbytes, stream), "reading a length")
        check_result(api.cuStreamSynchronize(stream), "reading a length")
        return int(value[0])

    def move(self, turn: int, whens: int, stream: int) -> None:
        if not self.blocks[1]:
            return
        numbers = [ctypes.c_int(n) for n in (turn, whens, self.skipped)]
        values: list[Any] = [ctypes.c_void_p(self.table.data.ptr), *numbers]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        grid = (*self.blocks, 1)
        launched = import_driver().cuLaunchKernel(self.function, *grid, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
        check_result(launched, "launching the moves between iterations")

    def close(self) -> None:
        """Free the launchable of one iteration."""
        self.inner.close()


def make_move_table(resident: Resident) -> tuple[Any, int]:
    """Return the table of moves, and the bytes of the longest."""
    program, rows, longest = resident.program, [], 0
    for move in program.repeat.moves if program.repeat is not None else ():
        width = itemsize(program.buffer[move.target].dtype)
        names, firsts = (move.target, move.source), move.places(0)
        begins = [int(resident.buffers[n].data.ptr) + first * width for n, first in zip(names, firsts, strict=True)]
        left = [(program.buffer[n].size - first) * width for n, first in zip(names, firsts, strict=True)]
        nbytes = move.size * width
        longest = max(longest, nbytes)
        rows.append((*begins, move.target_by * width, move.source_by * width, nbytes, *left, BITS[move.when]))
    return np.array(rows, np.int64).reshape(-1, 8), longest
