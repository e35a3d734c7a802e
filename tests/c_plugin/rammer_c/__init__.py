"""A rammer device that writes C: the system's compiler builds it, and each row of the table runs on a separate thread.

Unlike `rammer_toy`, it has the parts of a real device: generated and cached kernels, counters for waits across rows, per-vEU
memory, and a clock close to the work."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from rammer.codegen.c_target import CFunction
from rammer.codegen.dialects import C99
from rammer.codegen.emit import emit_operator
from rammer.codegen.writer import KernelWriter
from rammer.device.hooks import hookimpl
from rammer.device.manifest import Array, Backend, Binding, Bound, Device, Hardware, Loaded, OpenOptions, Profiler, RunResult
from rammer.errors import DeviceFailure, DeviceUnavailable, MissingDependency
from rammer.fusion.tile_search import candidates
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.fold_rows import fold
from rammer.ir.operator import Resources, RKernel, ROperator, Written
from rammer.ir.program import Counter, RProgram
from rammer.runtime.host_bound import HostBound
from rammer.runtime.host_memory import HostMemory
from rammer.tuning.kernel_probe import random_inputs, task_times

VEUS = os.cpu_count() or 1
CACHE = 256 << 10  # bytes of vEU memory for a task's intermediate tiles, well inside a core's second-level cache
# No -ffast-math: NaN has its meaning in the model. No contraction: every operation of a map rounds once.
FLAGS = ("-O2", "-ffp-contract=off", "-march=native", "-fno-math-errno", "-std=gnu11", "-fPIC", "-shared", "-w")
#: A row's traversal of its part of the table. A wait is an acquiring load and a signal a releasing addition, so a task's writes
#: are visible to all tasks that waited for it.
WALKER = """
#include <sched.h>
#include <stdatomic.h>
typedef void (*rm_kernel)(void **, char *, int);
typedef struct { void *kernel, *pointers; int task, wait, waits, signal, signals, unused; } rm_entry;
void rm_walk(const rm_entry *e, int count, const int *waits, const int *signals, atomic_int *counters, char *scratch) {
  for (const rm_entry *end = e + count; e < end; ++e) {
    for (const int *w = waits + 2 * e->wait, *last = w + 2 * e->waits; w < last; w += 2)
      while (atomic_load_explicit(&counters[w[0]], memory_order_acquire) < w[1]) sched_yield();
    ((rm_kernel)e->kernel)(e->pointers, scratch, e->task);
    for (const int *s = signals + e->signal, *last = s + e->signals; s < last; ++s)
      atomic_fetch_add_explicit(&counters[*s], 1, memory_order_release);
  }
}
"""
FIELDS = ("task", "wait", "waits", "signal", "signals", "unused")
ENTRY = np.dtype([("kernel", "u8"), ("pointers", "u8"), *((name, "i4") for name in FIELDS)])


# 1. The hardware as data. A task may store tiles in its core's cache (scope "veu") and values in registers ("thread").
def virtual_device(memory: int) -> VDevice:
    layers = (
        MemoryLayer("ram", "device", memory, bandwidth=2e10),
        MemoryLayer("cache", "veu", CACHE, bandwidth=2e11),
        MemoryLayer("register", "thread", 512, bandwidth=1e12),
    )
    return VDevice("c", "generated C on the host", VEUS, layers, flops=1e10, launch=2e-5, vector=4, resident=VEUS)


# 2. The compiler, shared by all openings of the device. A function's name is a hash of its text. Equal operators have equal texts
# (`emit` ensures that), so each is built once per process.
class Compiler:
    def __init__(self, path: str) -> None:
        self.path, self.built, self.lock = path, dict[str, int](), Lock()
        self.folder = tempfile.TemporaryDirectory(prefix="rammer_c_")
        self.libraries = [self._build(WALKER)]
        self.walk = self.libraries[0].rm_walk
        self.walk.restype = None

    def entries(self, functions: Iterable[CFunction]) -> dict[str, int]:
        """Map each function's name to the address of its entry `void (void **pointers, char *scratch, int task)`."""
        with self.lock:
            new = {f.name: f for f in functions if f.name not in self.built}
            if new:
                library = self._build(C99.preamble + "".join(map(with_entry, new.values())))
                self.libraries.append(library)
                self.built |= {n: ctypes.cast(library[f"{n}_entry"], ctypes.c_void_p).value or 0 for n in new}
            return self.built

    def _build(self, text: str) -> ctypes.CDLL:
        place = Path(self.folder.name, f"{len(os.listdir(self.folder.name))}.c")
        place.write_text(text)
        command = [self.path, *FLAGS, str(place), "-o", str(place.with_suffix(".so")), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DeviceFailure("the C compiler rejected a kernel: " + "\n".join(done.stderr.splitlines()[:5]), where=str(place))
        return ctypes.CDLL(str(place.with_suffix(".so")))


compiler_of = cache(Compiler)


def with_entry(function: CFunction) -> str:
    """Return the function and an entry of a common type: pointers come in an array, in the order of its arguments."""
    operands = "".join(f"p[{i}], " for i in range(len(function.arguments))) + "".join(f"s + {n}, " for n in starts(function)[:-1])
    return f"{function.text}void {function.name}_entry(void **p, char *s, int t) {{ {function.name}({operands}t); }}\n"


def starts(function: CFunction) -> list[int]:
    """Return the offsets of a task's tiles at each layer in its row's memory, and their end: here, all layers are caches."""
    return [0, *accumulate(-(-size // 64) * 64 for size in (function.scratch, *dict(function.outer).values()))]


# 3. A program on the device. Buffers, pointers and the table are created once; a run fills inputs and starts the threads.
class CProgram(Loaded):
    def __init__(self, program: RProgram, constants: Mapping[str, Array], backend: CBackend) -> None:
        self.program = program = fold(program, VEUS)  # a table for another device may have more rows
        self.memory = HostMemory(program, constants, backend.hardware.memory)  # reject oversized programs first
        binding = Binding.of(program, constants)
        functions = backend.writer.all(program.operators, binding)  # written earlier for the tuner, or now
        entries = backend.compiler.entries(functions.values())
        self.walk = backend.compiler.walk
        self.pointers = {n: self._pointers(f) for n, f in functions.items()}
        self.kernels_of = {n: entries[f.name] for n, f in functions.items()}
        # 64 bytes: `emit` aligns the tiles in scratch to this, relative to its start.
        size = max((starts(f)[-1] for f in functions.values()), default=0) + 64
        self.scratch = [np.zeros(size, np.uint8) for _ in program.rows]
        self.place = {c.name: i for i, c in enumerate(program.counters)}
        self.counters = np.zeros(max(1, len(program.counters)), np.int32)
        self.waits = np.array([(self.place[w.counter], w.threshold) for r in program.rows for t in r for w in t.waits], np.int32)
        self._table()
        self.pool = ThreadPoolExecutor(max(1, len(program.rows)))  # rows wait for each other: all must run

    def _pointers(self, function: CFunction) -> Array:
        """Return the address of each argument's first element."""
        return np.array([self.memory.tensors[n].ctypes.data for n, _ in function.arguments], np.uint64)

    def _table(self) -> None:
        """Build every row as an array of entries; a task signals every counter that counts it."""
        counters: dict[str, list[Counter]] = {}
        for counter in self.program.counters:
            counters.setdefault(counter.operator, []).append(counter)
        signals: list[int] = []
        wait, self.rows = 0, list[Array]()
        for row in self.program.rows:
            entries = np.zeros(len(row), ENTRY)
            for place, task in enumerate(row):
                raised = [self.place[c.name] for c in counters.get(task.operator, ()) if c.first <= task.index < c.last]
                kernel, pointers = self.kernels_of[task.operator], self.pointers[task.operator].ctypes.data
                entries[place] = (kernel, pointers, task.index, wait, len(task.waits), len(signals), len(raised), 0)
                wait, signals = wait + len(task.waits), signals + raised
            self.rows.append(entries)
        self.signals = np.array(signals, np.int32)

    @property
    def kernels(self) -> int:
        return 1

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        self.memory.write_inputs(inputs)
        self.counters[:] = 0
        busy = [v for v, row in enumerate(self.rows) if len(row)]
        start = time.perf_counter()
        if len(busy) == 1:
            self._walk(busy[0])  # a program of one row needs no thread
        else:
            list(self.pool.map(self._walk, busy))
        return RunResult(self.memory.read_outputs(), max(time.perf_counter() - start, 1e-9))

    def _walk(self, veu: int) -> None:
        """Run one row from its first task to its last; ctypes releases the GIL meanwhile."""
        row, scratch = self.rows[veu], self.scratch[veu].ctypes.data
        arrays = (row, len(row), self.waits, self.signals, self.counters)
        given = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int(a) for a in arrays]
        self.walk(*given, ctypes.c_void_p(scratch + -scratch % 64))

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any = None) -> Bound:
        return HostBound(self.program, self.run, inputs, outputs, stream)

    def close(self) -> None:
        self.pool.shutdown()


# 4. The three measurements.
class CProfiler(Profiler):
    def __init__(self, backend: CBackend) -> None:
        self.backend = backend

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        return task_times(self.backend.load, kernel.operator, binding, VEUS)

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        return kernel.resources

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        loaded = self.backend.load(program, constants)
        inputs = random_inputs(program, np.random.default_rng(0))
        try:
            return statistics.median(loaded.run(inputs).seconds for _ in range(iterations))
        finally:
            loaded.close()


# 5. The opened device.
class CBackend(Backend):
    def __init__(self, options: OpenOptions) -> None:
        if options.require not in ("", "cpu"):
            raise DeviceUnavailable(f"c is a cpu, not a {options.require}")
        self.hardware = probe()[options.index]
        self.vdevice = virtual_device(self.hardware.memory)
        self.compiler = compiler_of(self.hardware.detail["compiler"])
        self.profiler = CProfiler(self)
        self.writer = KernelWriter(self.write)
        self.fingerprint = f"c 1, {self.hardware.detail['version']}, {VEUS} x {platform.processor() or platform.machine()}"

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return candidates(operator, binding, self.vdevice, 8)

    def write(self, operator: ROperator, binding: Binding) -> CFunction:
        """Write one task's text. Unknown kernel families are accepted: tiles mean the same everywhere."""
        return emit_operator(operator, binding, C99)

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        def write() -> Written:
            function = self.writer.written(operator, binding)
            return Written(function.text, Resources(threads=1, local_bytes=function.scratch))

        cost = task_cost(operator, binding.types, self.vdevice)
        return RKernel(operator, write, cost.alone, cost.crowded)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        return CProgram(program, constants, self)

    def close(self) -> None:
        """Do nothing: compiled kernels belong to the process and are reused; programs hold all other resources."""


def probe() -> Sequence[Hardware]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise MissingDependency("a C compiler", "install gcc or clang")
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    version = said.splitlines()[0] if said else compiler
    return [Hardware(0, f"the host, by {Path(compiler).name}", "cpu", memory, {"compiler": compiler, "version": version})]


@hookimpl
def rammer_devices() -> Sequence[Device]:
    return [Device("c", "generated C on the host: an example", probe, CBackend, api=5)]
