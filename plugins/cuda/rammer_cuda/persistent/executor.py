"""A program as one cooperative launch: blocks walk their rows, counters in memory order them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from rammer.codegen.dialects import CUDA
from rammer.codegen.emit import emit
from rammer.codegen.task import Argument
from rammer.device.manifest import Array, Binding, RunResult
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.tile.signature import signature

from rammer_cuda.compile import compile_cubin
from rammer_cuda.driver import check, driver
from rammer_cuda.kernels.cell import THREADS as CELL_THREADS
from rammer_cuda.kernels.cell import CellKernel
from rammer_cuda.persistent.table import Table, make_table
from rammer_cuda.persistent.text import CONTROL, LINE, Body, kernel_text
from rammer_cuda.resident import Resident
from rammer_cuda.source import task_kernel
from rammer_cuda.targets import THREADS

#: Nanoseconds that a block waits for a counter before it reports a hang: far beyond any program's run time.
LIMIT = 2_000_000_000


class PersistentProgram:
    """A program resident on a GPU, run by one cooperative launch of a block a vEU.

    Families that need a launch of their own (clusters) are computed by the generic kernels. DeviceFailure where the
    blocks could not all run at once. ``limit`` is how long a block waits before it reports a hang, in ns.
    """

    def __init__(self, program: RProgram, constants: Mapping[str, Array], arch: str, index: int, repeat: int = 1,
                 limit: int = LIMIT) -> None:  # fmt: skip
        self.program, self.repeat, self.limit = program, repeat, limit
        self.resident = Resident(program, constants, index)
        with self.resident.device:
            parts = operator_bodies(program, Binding(program.types, program.storage, frozenset(constants)))
            self.resident.pack((a for arguments in parts.arguments.values() for a in arguments), constants)
            self.table = make_table(program, parts.number, parts.arguments, self.resident.address)
            self.threads, self.shared = parts.threads, parts.shared
            text = kernel_text(parts.bodies, self.table.form, parts.threads)
            self.function = self.resident.function(compile_cubin(text, arch).code, "rm_persistent", parts.shared)
            self._check_resident()
            self.counters = self.resident.cp.zeros(max(len(program.counters), 1) * LINE, np.uint32)
            self.control = self.resident.cp.zeros(len(CONTROL), np.uint32)
            self.parameters = self._parameters(self.table)
            self.resident.device.synchronize()  # uploads went by another stream than runs

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
        counter = self.program.counters[state["counter"]]
        task = self.program.rows[state["veu"]][state["order"]]
        raise DeviceFailure(
            f"vEU {state['veu']} waited {self.limit / 1e9:.3g} s for {counter.name} to reach {state['wanted']}, it stayed "
            f"at {state['seen']}", where=f"program {self.program.name}, task {task.operator}[{task.index}]",
            hint="the program never signals this counter: `rammer inspect --stage program` shows its rows",
        )  # fmt: skip

    def close(self) -> None:
        """Free the module and all buffers."""
        self.resident.close()


class Bodies:
    """The distinct device functions of a program; ``number`` and ``arguments`` by operator."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self.number: dict[str, int] = {}
        self.arguments: dict[str, tuple[Argument, ...]] = {}
        self.threads, self.shared = THREADS, 16
        self._known: dict[tuple[str, ...], tuple[ROperator, int]] = {}

    def add(self, operator: ROperator, binding: Binding) -> None:
        """Add one operator; equal ones share a function."""
        constant = "".join("c" if n in binding.constants else "-" for n in (*operator.inputs, *operator.outputs))
        aligned = " ".join(str(binding.storages[n].offset % 16) for n in (*operator.inputs, *operator.outputs))
        key = signature(operator, binding.types, binding.storages), constant, aligned
        if key not in self._known:
            self._known[key] = operator, self._emit(operator, binding)
        first, self.number[operator.name] = self._known[key]
        if first is not operator:
            names = dict(zip((*first.inputs, *first.outputs), (*operator.inputs, *operator.outputs), strict=True))
            self.arguments[operator.name] = tuple(
                Argument(names[a.tensor], a.written, a.packing) for a in self.arguments[first.name]
            )

    def _emit(self, operator: ROperator, binding: Binding) -> int:
        """Note the operator's function and arguments; returns the function's number."""
        if operator.family == "cell":
            kernel = task_kernel(operator, binding)
            assert isinstance(kernel, CellKernel)
            types = tuple("float" if a.written else "const float" for a in kernel.arguments)
            self.arguments[operator.name] = kernel.arguments
            self.threads, self.shared = max(self.threads, CELL_THREADS), max(self.shared, kernel.shared)
            return self._number(Body(kernel.name, kernel.text, types, kernel))
        function = emit(operator, binding, CUDA)
        types = tuple(CUDA.types[binding.types[t].dtype] for t, _ in function.arguments)
        self.arguments[operator.name] = tuple(Argument(t, w) for t, w in function.arguments)
        self.shared = max(self.shared, function.scratch)
        return self._number(Body(function.name, function.text, types))

    def _number(self, body: Body) -> int:
        """The number of ``body``, whose name is a hash of its text."""
        names = [b.name for b in self.bodies]
        if body.name not in names:
            self.bodies.append(body)
        return len(names) if body.name not in names else names.index(body.name)


def operator_bodies(program: RProgram, binding: Binding) -> Bodies:
    """The device functions that ``program`` needs."""
    result = Bodies()
    for operator in program.operators:
        result.add(operator, binding)
    return result
