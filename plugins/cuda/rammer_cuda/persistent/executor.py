"""A program as one cooperative launch: blocks walk their rows, counters in memory order them."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakSet

import numpy as np

from rammer.device.manifest import Array, Binding, Bound, RunResult
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram, Task

from rammer_cuda.bound import CudaBound, place, stream_of
from rammer_cuda.compile import compile_cubin
from rammer_cuda.driver import check, driver
from rammer_cuda.persistent.bodies import operator_bodies
from rammer_cuda.persistent.dataflow import plan_words
from rammer_cuda.persistent.table import Table, make_table
from rammer_cuda.persistent.text import CONTROL, LINE, WORDS, kernel_text
from rammer_cuda.resident import Resident

#: Nanoseconds that a block waits for a counter before it reports a hang: far beyond any program's run time.
LIMIT = 2_000_000_000


class PersistentProgram:
    """A program resident on a GPU, run by one cooperative launch of a block a vEU.

    Families that need a launch of their own (clusters) are computed by the generic kernels. DeviceFailure where the
    blocks could not all run at once. ``limit`` is how long a block waits before it reports a hang, in ns.
    """

    def __init__(self, program: RProgram, constants: Mapping[str, Array], arch: str, index: int, repeat: int = 1,
                 limit: int = LIMIT) -> None:  # fmt: skip
        self.repeat, self.limit = repeat, limit
        self.bounds: WeakSet[CudaBound] = WeakSet()
        binding = Binding(program.types, program.storage, frozenset(constants))
        flow = plan_words(program, binding)
        self.program = flow.program
        self.resident = Resident(self.program, constants, index)
        with self.resident.device, self.resident.stream:
            parts = self.parts = operator_bodies(flow, binding)
            self.resident.pack((a for arguments in parts.arguments.values() for a in arguments), constants)
            self.words = self._words({t for tensors in flow.words.values() for t in tensors})
            self.table = self._table(self.resident)
            self.threads, self.shared = parts.threads, parts.shared
            text = kernel_text(parts.bodies, self.table.form, parts.threads)
            self.function = self.resident.function(compile_cubin(text, arch).code, "rm_persistent", parts.shared)
            self._check_resident()
            self.counters = self.resident.cp.zeros(max(len(self.program.counters), 1) * LINE, np.uint32)
            self.control = self.resident.cp.zeros(len(CONTROL), np.uint32)
            self.launch = Launch(self, self.table)
            self.resident.device.synchronize()  # uploads went by another stream than runs

    def _words(self, tensors: Collection[str]) -> dict[str, Any]:
        """Device memory for the words of each tensor, one an element of its storage's span; tag 0 is no run's."""
        sizes = {t: self.program.storage[t].span() for t in sorted(tensors)}
        return {t: self.resident.cp.zeros(high - low, np.uint64) for t, (low, high) in sizes.items()}

    def _table(self, resident: Resident) -> Table:
        """The rows over the addresses of ``resident``; a function takes those of its arguments, then of its words."""
        parts = self.parts
        pointers = {
            name: [*map(resident.address, arguments), *(int(self.words[t].data.ptr) for t in parts.words[name])]
            for name, arguments in parts.arguments.items()
        }
        return make_table(self.program, parts.number, pointers, parts.held())

    @property
    def kernels(self) -> int:
        """Kernel launches of one run."""
        return 1

    @property
    def stream(self) -> Any:
        """The CuPy stream that runs are queued on."""
        return self.resident.stream

    def _check_resident(self) -> None:
        """Blocks that wait for each other must all have an SM, or the waiting ones never end."""
        api = driver()
        query = api.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, self.threads, self.shared)
        room = int(check(query, "asking for occupancy")) * self.resident.device.attributes["MultiProcessorCount"]
        if room < self.program.veus:
            raise DeviceFailure(f"{self.program.veus} rows need as many blocks at once, this GPU runs {room}",
                                where=f"program {self.program.name}", hint="--option executor=graph")  # fmt: skip

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        """A table of its own over the caller's arrays: dense, aligned arrays on this GPU are used where they are."""
        with self.resident.device:
            chosen = stream_of(self.resident, stream)
            places = place(self.resident, inputs, outputs)
            launch = Launch(self, self._table(self.resident.with_buffers(places.buffers)))
        self.resident.ready()
        made = CudaBound(self.resident, places, chosen, launch, stream)
        self.bounds.add(made)
        return made

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Copy in, launch, copy out; ``seconds`` is the launch alone, by events."""
        self.resident.copy_in(inputs)
        seconds = self.replay()
        return RunResult(self.resident.copy_out(), seconds)

    def replay(self) -> float:
        """One launch on the inputs already there; its seconds on the GPU. DeviceFailure if a wait never ended."""
        seconds = self.resident.timed(self._launches)
        self.check_finished()
        return seconds

    def _launches(self) -> None:
        for _ in range(self.repeat):
            self.launch.launch(self.resident.stream.ptr)

    def check_finished(self) -> None:
        """DeviceFailure if a wait of a finished launch never ended; the program can run again."""
        state = dict(zip(CONTROL, self.resident.cp.asnumpy(self.control, stream=self.resident.stream).tolist(), strict=True))
        if not state["aborted"]:
            return
        with self.resident.device, self.resident.stream:
            self.counters.fill(0)  # an aborted run leaves counters between two epochs
            self.control.fill(0)
            for words in self.words.values():
                words.fill(0)
        self.resident.wait(self.resident.stream)  # the next run may be on another stream
        task = self.program.rows[state["veu"]][state["order"]]
        raise DeviceFailure(
            f"vEU {state['veu']} waited {self.limit / 1e9:.3g} s for {self._awaited(task, state['counter'])} to reach "
            f"{state['wanted']}, but it stayed at {state['seen']}",
            where=f"program {self.program.name}, task {task.operator}[{task.index}], entry {state['order']} of its row",
            hint="nobody signals what it waits for: `rammer inspect --stage program` shows the rows",
        )  # fmt: skip

    def _awaited(self, task: Task, number: int) -> str:
        """What a report's counter number stands for."""
        if number < WORDS:
            return f"counter {self.program.counters[number].name}"
        products = [c for c in self.program.operator[task.operator].computes if c.reduce]
        return f"the words of {' or '.join(sorted(set(products[number - WORDS].reads) & self.words.keys()))}"

    def close(self) -> None:
        """Free the module and all buffers."""
        if not self.resident.closed:
            for bound in list(self.bounds):
                bound.close()
        self.resident.close()


class Launch:
    """One cooperative launch of a program over a table (``rammer_cuda.bound.Launchable``)."""

    def __init__(self, program: PersistentProgram, table: Table, function: Any = None) -> None:
        self.program, self.function = program, function or program.function
        on_device = program.resident.cp.asarray
        self.arrays = [on_device(a) for a in (table.entries, table.runs, table.first)]
        self.values: list[Any] = [ctypes.c_void_p(int(a.data.ptr)) for a in (*self.arrays, program.counters, program.control)]
        self.values.append(ctypes.c_uint64(program.limit))
        self.parameters = (ctypes.c_void_p * len(self.values))(*[ctypes.addressof(v) for v in self.values])

    def launch(self, stream: int) -> None:
        """Queue it on the stream with this handle."""
        p = self.program
        check(driver().cuLaunchCooperativeKernel(self.function, p.program.veus, 1, 1, p.threads, 1, 1, p.shared, stream,
              ctypes.addressof(self.parameters)), "launching a persistent kernel")  # fmt: skip

    def check(self) -> None:
        """DeviceFailure if a wait of a finished launch never ended."""
        self.program.check_finished()

    def close(self) -> None:
        """Free the table."""
        self.arrays.clear()
