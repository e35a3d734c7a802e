"""Execution of rPrograms on an OpenCL device: one memory buffer, one table, launches on an in-order queue."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from rammer.device.manifest import Array, Bound, Loaded, RunResult
from rammer.device.shared_constants import WantedForm
from rammer.errors import DeviceFailure
from rammer.ir.constants import parts_of
from rammer.ir.program import RProgram, Task, waves
from rammer.ir.types import itemsize
from rammer.runtime.host_memory import is_whole_buffer, storage_view

from rammer_rocm.bound import OpenClBound
from rammer_rocm.constants import PART, DeviceConstants, PlacedConstants, packed_form, plain_form, round_up
from rammer_rocm.memory import lay_out, shared_memory, system_wide
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.placement import Placement, byte_distance, find_usable_arrays, make_address_table
from rammer_rocm.program_kernels import Function, Pointer, ProgramKernels
from rammer_rocm.source import LINE_WORDS, RUN_WORDS, WalkShape

#: Note for run results: the rows that are printed do not determine the compute units.
PLACEMENT = "the OpenCL runtime places rows on compute units"


class OpenClProgram(Loaded):
    """A program resident on an OpenCL device."""

    #: True if kernels record the start and end of each task (``trace.py``).
    traced = False

    def __init__(
        self,
        kernels: ProgramKernels,
        shared: DeviceConstants,
        program: RProgram,
        constants: Mapping[str, Array],
        single: bool,
    ) -> None:
        context, device = shared.queue.context, kernels.vdevice
        # A single launch is complete when a run returns, so programs need no common order, and may run side by side.
        queue = import_opencl().CommandQueue(context) if single else shared.queue
        self.program, self.queue, self.single, self.closed = program, queue, single, False
        self.views = dict[str, Array]()
        self.functions = functions = kernels.functions(program, constants)
        self.memory = lay_out(program)
        distinct = {f.entry: f for f in functions.values()}
        numbers = {name: i for i, name in enumerate(distinct)}
        scratch = round_up(max((f.scratch for f in distinct.values()), default=0), PART)
        self.threads, self.epoch, self.moved, self.launch = device.threads, 0, 0, 0
        # A single launch uses at most one group per compute unit, regardless of the number of program rows.
        self.groups = min(program.veus, device.veus) if single else program.veus
        self._check_memory(context.devices[0], self.groups * scratch if device.threads == 1 else 0)
        with shared.filling():  # while the runtime compiles or loads its cached binary
            self.constants = self.placed(functions, constants, shared)
            self.pointers = [a for f in functions.values() for a in f.arguments]
            arguments, row_of = self._argument_table(functions)
            self.table = make_table(program, {o: numbers[f.entry] for o, f in functions.items()}, row_of)
            #: True if one launch runs all iterations.
            self.turning = single and program.repeat is not None
            shape = WalkShape(program.veus, device.threads, scratch, len(self.constants.buffers), self.traced, self.turning)
            self.binary = kernels.build(list(distinct.values()), self.table.sets, shape, single)
        self.upload(context, arguments, constants, self.groups * scratch if device.threads == 1 else 0)
        shared.queue.finish()  # the constants
        self.own = Placement(self.memory.buffers, self.tables[0])
        self._prepare_kernels(context)

    @property
    def kernels(self) -> int:
        """Number of launches of one run (with ``single``: if no launch ends early)."""
        return 1 if self.single else self.program.turns * len(self.table.kernel_of_wave)

    def placed(
        self, functions: Mapping[str, Function], constants: Mapping[str, Array], shared: DeviceConstants
    ) -> PlacedConstants:
        """Store the constants that kernels read on the device, in the required forms."""
        filling = {self.program.storage[n].buffer: n for n in constants if n in self.program.storage}
        wanted, parts = dict[tuple[str, str], WantedForm](), parts_of(constants)
        for a in (a for f in functions.values() for a in f.arguments):
            name = self.program.storage[a.tensor].buffer if a.packing is None else a.tensor
            if a.packing is not None:
                wanted[name, a.packing.key] = packed_form(parts[name], a.packing)
            elif name in filling and name not in self.memory.buffers:
                wanted[name, ""] = plain_form(
                    parts[filling[name]], self.program.storage[filling[name]], self.program.buffer[name]
                )
        try:
            return shared.placed(wanted)
        except import_opencl().MemoryError as problem:
            raise DeviceFailure(f"out of device memory for the constants of {self.program.name} ({problem})") from problem

    def _argument_table(self, functions: Mapping[str, Function]) -> tuple[Array, dict[str, int]]:
        """Return the argument table (buffer number and byte offset per pointer), and each operator's start in it."""
        addresses, row_of = list[tuple[int, int]](), dict[str, int]()
        for name, function in functions.items():
            row_of[name] = 2 * len(addresses)
            addresses += [self._argument_address(a, self.memory.buffers) for a in function.arguments]
        return np.array(addresses or [(0, 0)], np.int64), row_of

    def _argument_address(self, argument: Pointer, buffers: Mapping[str, int]) -> tuple[int, int]:
        if argument.packing is not None:
            return self.constants.places[argument.tensor, argument.packing.key]
        storage = self.program.storage[argument.tensor]
        inside = storage.offset * itemsize(self.program.buffer[storage.buffer].dtype)
        if storage.buffer in buffers:
            return 0, buffers[storage.buffer] + inside
        number, start = self.constants.places[storage.buffer, ""]
        return number, start + inside

    def _check_memory(self, device: Any, scratch: int) -> None:
        limits = (
            ("one allocation", self.memory.nbytes, int(device.max_mem_alloc_size)),
            ("memory", self.memory.nbytes + scratch, int(device.global_mem_size)),
        )
        for what, need, limit in limits:
            if need > limit:
                raise DeviceFailure(
                    f"program {self.program.name} needs {need} bytes of {what}, {device.name.strip()} has {limit}",
                    hint="use a smaller batch, or a device with more memory",
                )

    def upload(self, context: Any, arguments: Array, constants: Mapping[str, Array], scratch: int) -> None:
        """Upload memory, constants that are outputs, and the tables to the device."""
        cl = import_opencl()
        flags = cl.mem_flags
        try:
            # The host views memory only if runs have finished when they return: then no kernel accesses it.
            self.buffer, self.host = shared_memory(context, self.memory.nbytes, self.threads == 1, self.single)
            self.spill = cl.Buffer(context, flags.READ_WRITE, max(scratch, 64))
            tables = (arguments, self.table.starts, self.table.runs, self.table.filled)
            self.tables = [cl.Buffer(context, flags.READ_ONLY | flags.COPY_HOST_PTR, hostbuf=t) for t in tables]
            self.upload_constants(constants)
        except cl.MemoryError as problem:
            raise DeviceFailure(f"out of device memory: {self.memory.nbytes} bytes wanted ({problem})") from problem

    def upload_constants(self, constants: Mapping[str, Array]) -> None:
        """Write the constants that are outputs."""
        for name in sorted(constants):
            if name in self.program.storage and self.program.storage[name].buffer in self.memory.buffers:
                self.write(name, constants[name])

    def recorders(self, context: Any) -> Sequence[Any]:
        """Return the additional kernel argument buffers of a traced program."""
        return ()

    def _prepare_kernels(self, context: Any) -> None:
        """Create kernels with all arguments set, so that a run only enqueues them."""
        cl = import_opencl()
        arguments, starts, runs, filled = self.tables
        common = (self.buffer, arguments, starts, runs, self.spill, *self.constants.buffers, *self.recorders(context))
        veus, count = self.program.veus, len(self.table.kernel_of_wave)
        self.launches: list[Any] = []
        self.counters: Array | None = None
        if self.single:
            words = (count + self.turning) * (LINE_WORDS + veus) + 1
            self.sync, self.counters = shared_memory(context, words * 4, True, True)
            self._reset_counters()
            self.most_launches = (int(self.table.filled.sum()) + 1) * (self.program.turns + 1)
            kernel = cl.Kernel(self.binary, "program")
            # With declared types, setting all ten arguments is ten times faster than setting one argument without.
            turning = [None, *[np.int32] * 3] if self.turning else []
            kernel.set_arg_types([*[None] * (len(common) + 2), *[np.int32] * 3, *turning])
            self.fixed: tuple[Any, ...] = (*common[2:], filled, self.sync)  # the table belongs to the call
            self.launches.append(kernel)
            return
        for wave, number in enumerate(self.table.kernel_of_wave):
            kernel = cl.Kernel(self.binary, f"wave_{number}")
            kernel.set_args(*common, np.int32(wave * veus))
            self.launches.append(kernel)

    def _reset_counters(self) -> None:
        """Reset the counters to zero: at the start, after an aborted run, and before the epochs overflow."""
        cl = import_opencl()
        cl.enqueue_fill_buffer(self.queue, self.sync, np.int32(0), 0, self.sync.size)
        self.queue.finish()
        self.epoch = self.moved = self.launch = 0

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Execute one run. ``seconds`` is wall time from the first enqueue to the end of the last kernel."""
        for port in self.program.inputs:
            self.write(port.tensor, inputs[port.external])
        seconds = self.execute()
        return RunResult({p.external: self.read(p.tensor) for p in self.program.outputs}, seconds, (PLACEMENT,))

    def placement(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Placement:
        """Return the placement for a call with these arrays by port. Kernels use host arrays in place where possible, if the host
        shares the program's memory."""
        found = (
            find_usable_arrays(self.program, inputs, outputs) if self.host is not None and system_wide(self.queue.device) else {}
        )
        if self.host is None or not found:
            return self.own
        buffers = {**self.memory.buffers, **{name: byte_distance(array, self.host) for name, array in found.items()}}
        return Placement(
            buffers, make_address_table(self.queue.context, [self._argument_address(a, buffers) for a in self.pointers]), found
        )

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """Bind fixed arrays: host arrays on a CPU, ``pyopencl.array.Array`` on a GPU."""
        return OpenClBound(self, inputs, outputs, stream)

    def execute(self) -> float:
        """Run on the current inputs and return the seconds. Raises DeviceFailure if the device reports an error."""
        start = time.perf_counter()
        with self.failures():
            self.queue_run()
            self.queue.finish()
        return time.perf_counter() - start

    def queue_run(self, at: Placement | None = None) -> None:
        """Queue one run on the current inputs; with ``single`` the run is complete on return."""
        at = at or self.own
        if self.program.repeat is None:
            self._queue_turn(at)
        elif self.turning:
            self._run_turns(at)
        else:
            at.seam(self.program).run(lambda: self._queue_turn(at), self._copy, lambda name: self._read_length(name, at))

    def _read_length(self, tensor: str, at: Placement) -> int:
        given = at.arrays.get(self.program.storage[tensor].buffer)
        seen = self.seen(tensor) if given is None else given
        return int((self.read(tensor) if seen is None else seen).item())

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between addresses, as offsets from the program's memory."""
        queue, buffer = self.queue, self.buffer
        import_opencl().enqueue_copy(queue, buffer, buffer, src_offset=source, dst_offset=target, byte_count=nbytes)

    def _queue_turn(self, at: Placement) -> None:
        """Queue one iteration of the table."""
        if not self.single:
            for kernel in self.launches:
                self._enqueue_kernel(kernel)
            return
        count = len(self.table.kernel_of_wave)
        if not count:
            return
        self.epoch += 1
        self._run_single(at.arguments, self.epoch, (), count - 1, int(self.table.filled[-1]) * self.epoch)

    def _run_turns(self, at: Placement) -> None:
        """Run all iterations of the table, including the moves between them, in one launch."""
        turns = self.program.turns_at(lambda name: self._read_length(name, at))
        first, moved, moves = self.epoch + 1, self.moved + 1, at.moves(self.program, self.queue.context)
        self.epoch, self.moved = self.epoch + turns, self.moved + turns + 1
        self._run_single(at.arguments, first, (moves, moved, turns, self.program.turns - turns), 0, self.moved)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Convert OpenCL errors to DeviceFailure."""
        try:
            yield
        except import_opencl().Error as problem:
            if self.single:
                self._reset_counters()
            raise DeviceFailure(f"program {self.program.name} failed on the device: {problem}") from problem

    def _enqueue_kernel(self, kernel: Any) -> None:
        import_opencl().enqueue_nd_range_kernel(self.queue, kernel, (self.groups * self.threads,), (self.threads,))

    def _run_single(self, arguments: Any, epoch: int, turning: tuple[Any, ...], last: int, target: int) -> None:
        """Launch until the counter of the ``last`` wave reaches ``target``: once, or again after each early exit. Every launch
        finishes at least one row."""
        kernel, count = self.launches[0], len(self.table.kernel_of_wave)
        for _ in range(self.most_launches):
            self.launch += 1
            kernel.set_args(self.buffer, arguments, *self.fixed, epoch, self.launch, count, *turning)
            self._enqueue_kernel(kernel)
            if self._finished_rows(last) == target:
                if max(self.epoch * self.program.veus, self.moved, self.launch) > 2**30:
                    self._reset_counters()
                return
        self._reset_counters()
        raise DeviceFailure(f"program {self.program.name} makes no progress", hint="try --option executor=waves")

    def _finished_rows(self, wave: int) -> int:
        """Return the counter of a wave after all queued work has finished."""
        place = wave * LINE_WORDS
        if self.counters is not None:
            self.queue.finish()
            return int(self.counters.view(np.int32)[place])
        done = np.zeros(1, np.int32)
        import_opencl().enqueue_copy(self.queue, done, self.sync, src_offset=place * 4, is_blocking=True)
        return int(done[0])

    def poison(self) -> bool:
        """Fill arena, inputs, outputs and scratch with NaN (all bits set) to expose values that a run does not write."""
        cl = import_opencl()
        cl.enqueue_fill_buffer(self.queue, self.spill, np.uint8(255), 0, self.spill.size)
        for buffer in self.program.buffers:
            if buffer.kind != "constant" and buffer.nbytes:
                cl.enqueue_copy(
                    self.queue, self.buffer, np.full(buffer.nbytes, 255, np.uint8), dst_offset=self.memory.buffers[buffer.name]
                )
        return True

    def start(self, tensor: str) -> int:
        """Return the byte address of a dense tensor that fills its buffer."""
        return self.memory.buffers[self.program.storage[tensor].buffer]

    def write(self, tensor: str, values: Array, blocking: bool = True) -> None:
        """Write host values into a tensor's storage. Without ``blocking`` a dense copy may finish later, in queue order."""
        storage = self.program.storage[tensor]
        buffer = self.program.buffer[storage.buffer]
        if not buffer.nbytes:
            return
        seen = self.seen(tensor)
        if seen is not None:
            np.copyto(seen, values)
            return
        if is_whole_buffer(storage, buffer):
            dense = np.ascontiguousarray(values, buffer.dtype)
            self.write_bytes(dense, self.memory.buffers[storage.buffer], blocking or dense is not values)
            return
        flat = self.flat(storage.buffer)
        storage_view(flat, storage)[...] = values
        self.write_bytes(flat, self.memory.buffers[storage.buffer])

    def write_bytes(self, values: Array, address: int, blocking: bool = True) -> None:
        """Copy dense ``values`` to ``address`` (bytes) of the program's memory."""
        if values.nbytes:
            import_opencl().enqueue_copy(self.queue, self.buffer, values, dst_offset=address, is_blocking=blocking)

    def read(self, tensor: str) -> Array:
        """Return a copy of a tensor after all queued runs."""
        seen, storage = self.seen(tensor), self.program.storage[tensor]
        if seen is not None:
            return seen.copy()
        return np.ascontiguousarray(storage_view(self.flat(storage.buffer), storage)).reshape(storage.shape)

    def seen(self, tensor: str) -> Array | None:
        """Return a view of a tensor's elements, valid between runs, or None if the host cannot access device memory."""
        if self.host is None:
            return None
        if tensor not in self.views:
            storage = self.program.storage[tensor]
            buffer, start = self.program.buffer[storage.buffer], self.memory.buffers[storage.buffer]
            flat = self.host[start : start + buffer.nbytes].view(buffer.dtype)
            self.views[tensor] = storage_view(flat, storage)
        return self.views[tensor]

    def flat(self, name: str) -> Array:
        """Return the contents of a buffer after all queued runs."""
        buffer = self.program.buffer[name]
        flat = np.empty(buffer.size, buffer.dtype)
        if buffer.nbytes:
            import_opencl().enqueue_copy(self.queue, flat, self.buffer, src_offset=self.memory.buffers[name])
        return flat

    def close(self) -> None:
        """Free the device memory when all queued work has finished."""
        self.closed = True
        self.queue.finish()
        for buffer in (self.buffer, self.spill, *self.tables, *([self.sync] if self.single else [])):
            buffer.release()
        self.launches.clear()
        self.views.clear()
        self.fixed, self.host, self.counters = (), None, None
        self.constants = PlacedConstants((), {}, ())  # other programs may still share them


@dataclass(frozen=True)
class WaveTable:
    """The rows as data: ``starts[wave * veus + veu]`` indexes ``runs``, and ``filled`` counts a wave's non-empty rows."""

    starts: Array
    runs: Array
    filled: Array
    sets: tuple[tuple[int, ...], ...]
    kernel_of_wave: tuple[int, ...]


def make_table(program: RProgram, function_of: Mapping[str, int], row_of: Mapping[str, int]) -> WaveTable:
    """Fold every wave's rows into runs of equally spaced tasks of one operator."""
    starts, runs, filled = [0], list[tuple[int, ...]](), list[int]()
    members: dict[tuple[int, ...], int] = {}
    kernel_of_wave = []
    for wave in waves(program):
        rows: list[list[Task]] = [[] for _ in range(program.veus)]
        for placed in wave:
            rows[placed.veu].append(placed.task)
        for row in rows:
            runs += _runs(row, function_of, row_of)
            starts.append(len(runs))
        filled.append(sum(1 for row in rows if row))
        used = tuple(sorted({function_of[t.task.operator] for t in wave}))
        kernel_of_wave.append(members.setdefault(used, len(members)))
    flat = np.array(runs or [(0,) * RUN_WORDS], dtype=np.int32)
    return WaveTable(np.array(starts, np.int32), flat, np.array(filled or [0], np.int32), tuple(members), tuple(kernel_of_wave))


def _runs(row: Sequence[Task], function_of: Mapping[str, int], row_of: Mapping[str, int]) -> list[tuple[int, ...]]:
    result = list[tuple[int, ...]]()
    for operator, group in groupby(row, key=lambda t: t.operator):
        indices = [t.index for t in group]
        while indices:
            step = indices[1] - indices[0] if len(indices) > 1 else 1
            count = 1
            while count < len(indices) and indices[count] == indices[0] + count * step:
                count += 1
            result.append((function_of[operator], row_of[operator], indices[0], count, step))
            del indices[:count]
    return result
