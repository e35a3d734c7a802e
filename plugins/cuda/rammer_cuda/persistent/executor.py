"""A program as one cooperative launch: blocks walk their rows, counters in memory order them."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rammer.device.manifest import Array, Binding, RunResult
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram, Task

from rammer_cuda.compile import compile_cubin
from rammer_cuda.driver import check, driver
from rammer_cuda.persistent.bodies import Bodies, operator_bodies
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
        binding = Binding(program.types, program.storage, frozenset(constants))
        flow = plan_words(program, binding)
        self.program = flow.program
        self.resident = Resident(self.program, constants, index)
        with self.resident.device, self.resident.stream:
            parts = operator_bodies(flow, binding)
            self.resident.pack((a for arguments in parts.arguments.values() for a in arguments), constants)
            self.words = self._words({t for tensors in flow.words.values() for t in tensors})
            self.table = make_table(self.program, parts.number, self._pointers(parts), parts.held())
            self.threads, self.shared = parts.threads, parts.shared
            text = kernel_text(parts.bodies, self.table.form, parts.threads)
            self.function = self.resident.function(compile_cubin(text, arch).code, "rm_persistent", parts.shared)
            self._check_resident()
            self.counters = self.resident.cp.zeros(max(len(self.program.counters), 1) * LINE, np.uint32)
            self.control = self.resident.cp.zeros(len(CONTROL), np.uint32)
            self.parameters = self._parameters(self.table)
            self.resident.device.synchronize()  # uploads went by another stream than runs

    def _words(self, tensors: Collection[str]) -> dict[str, Any]:
        """Device memory for the words of each tensor, one an element of its storage's span; tag 0 is no run's."""
        sizes = {t: self.program.storage[t].span() for t in sorted(tensors)}
        return {t: self.resident.cp.zeros(high - low, np.uint64) for t, (low, high) in sizes.items()}

    def _pointers(self, parts: Bodies) -> dict[str, list[int]]:
        """What each operator's function takes: addresses of its arguments, then of its words."""
        return {
            name: [*map(self.resident.address, arguments), *(int(self.words[t].data.ptr) for t in parts.words[name])]
            for name, arguments in parts.arguments.items()
        }

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

    def _parameters(self, table: Table) -> tuple[Any, list[Any]]:
        keep: list[Any] = [ctypes.c_void_p(self.resident.table(a)) for a in (table.entries, table.runs, table.first)]
        keep += [ctypes.c_void_p(self.counters.data.ptr), ctypes.c_void_p(self.control.data.ptr), ctypes.c_uint64(self.limit)]
        return (ctypes.c_void_p * len(keep))(*[ctypes.addressof(v) for v in keep]), keep

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Copy in, launch, copy out; ``seconds`` is the launch alone, by events."""
        self.resident.copy_in(inputs)
        seconds = self.replay()
        return RunResult(self.resident.copy_out(), seconds)

    def replay(self) -> float:
        """One launch on the inputs already there; its seconds on the GPU. DeviceFailure if a wait never ended."""
        seconds = self.resident.timed(self._launch)
        self._check_finished()
        return seconds

    def _launch(self) -> None:
        for _ in range(self.repeat):
            check(driver().cuLaunchCooperativeKernel(
                self.function, self.program.veus, 1, 1, self.threads, 1, 1, self.shared, self.resident.stream.ptr,
                ctypes.addressof(self.parameters[0])), "launching a persistent kernel")  # fmt: skip

    def _check_finished(self) -> None:
        state = dict(zip(CONTROL, self.resident.cp.asnumpy(self.control, stream=self.resident.stream).tolist(), strict=True))
        if not state["aborted"]:
            return
        with self.resident.device, self.resident.stream:
            self.counters.fill(0)  # an aborted run leaves counters between two epochs
            self.control.fill(0)
            for words in self.words.values():
                words.fill(0)
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
        self.resident.close()
