"""Execution of generated C on the host: built with the system's C compiler, called per task."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rammer.child_processes import find_program, run_program
from rammer.codegen.c_target import CFunction, CTarget
from rammer.codegen.dialects import C99
from rammer.codegen.emit import emit_operator, scratch_bytes
from rammer.device.manifest import Binding
from rammer.errors import DeviceUnavailable
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import Storage, dense
from rammer.ir.types import TensorType

Array = np.ndarray[Any, np.dtype[Any]]
COMPILER = find_program("gcc") or find_program("cc")
#: gold links in half the time of the default linker.
LINKER = ("-fuse-ld=gold",) if COMPILER and COMPILER.endswith("gcc") and find_program("ld.gold") else ()
#: Libraries compiled by this process; deleted when it ends.
CACHE = tempfile.TemporaryDirectory(prefix="rammer_codegen_")
atexit.register(CACHE.cleanup)


@dataclass(frozen=True)
class HostCase:
    """An operator with the types of the tensors that it reads, and storages of non-dense tensors."""

    operator: ROperator
    types: Mapping[str, TensorType]
    storages: Mapping[str, Storage]
    values: Mapping[str, Array]

    @property
    def binding(self) -> Binding:
        """The types of all tensors and the storages of stored ones."""
        types = {**self.types, **{c.name: c.type for c in self.operator.computes}}
        stored = {n: dense(n, n, types[n].shape) for n in (*self.operator.inputs, *self.operator.outputs)}
        return Binding(types, {**stored, **self.storages})


#: A target with many threads on the host: every function also gets an entry that runs it on a group of POSIX threads.
THREADED = replace(
    C99,
    name="c99_threads",
    thread="rm_thread",
    threads="rm_threads",
    barrier="pthread_barrier_wait(&rm_barrier);",
    vectors=(),
    preamble="#include <pthread.h>\nstatic __thread int rm_thread;\nstatic int rm_threads;\n"
    "static pthread_barrier_t rm_barrier;\n"
    + C99.preamble
    + """
typedef struct { void (*entry)(void **, char *, int); void **p; char *scratch; int task, thread; } rm_job;
static void *rm_start(void *job) {
  rm_job *j = job;
  rm_thread = j->thread;
  j->entry(j->p, j->scratch, j->task);
  return 0;
}
static void rm_group(void (*entry)(void **, char *, int), void **p, char *scratch, int task, int threads) {
  pthread_t ids[64]; rm_job jobs[64];
  rm_threads = threads; pthread_barrier_init(&rm_barrier, 0, threads);
  for (int k = 0; k < threads; ++k) {
    jobs[k] = (rm_job){entry, p, scratch, task, k}; pthread_create(&ids[k], 0, rm_start, &jobs[k]);
  }
  for (int k = 0; k < threads; ++k) pthread_join(ids[k], 0);
  pthread_barrier_destroy(&rm_barrier);
}
""",
)


def case(
    computes: Sequence[str | Compute],
    values: Mapping[str, Array],
    tile: Sequence[int] = (),
    layers: Mapping[tuple[str, str], str] | str = "thread",
    outputs: Sequence[str] = (),
    storages: Mapping[str, Storage] | None = None,
) -> HostCase:
    """Return an operator from Compute texts. ``layers`` is one layer for all pairs, or a layer by pair (others thread)."""
    parsed = tuple(Compute.parse(c) if isinstance(c, str) else c for c in computes)
    names = {c.name for c in parsed}
    connections = []
    for c in parsed:
        for read in c.reads:
            if read in names:
                layer = layers if isinstance(layers, str) else layers.get((read, c.name), "thread")
                connections.append(Connection(read, c.name, layer))
    tile = tuple(tile) if tile or not parsed[-1].axes else parsed[-1].shape
    operator = ROperator("op", parsed, tuple(connections), tuple(outputs) or (parsed[-1].name,), tile)
    types = {n: TensorType(str(v.dtype), v.shape) for n, v in values.items()}
    return HostCase(operator, types, storages or {}, values)


def reference(item: HostCase) -> dict[str, Array]:
    """Return the outputs in float64."""
    known: dict[str, Array] = dict(item.values)
    for c in item.operator.computes:
        known[c.name] = evaluate_compute(c, known, precise=True)
    return {n: known[n] for n in item.operator.outputs}


def compile_c(functions: Sequence[CFunction], target: CTarget = C99, flags: Sequence[str] = ("-Og",)) -> ctypes.CDLL:
    """Compile all functions into one shared library."""
    if COMPILER is None:
        raise DeviceUnavailable("no C compiler on this machine", hint="install gcc or clang")
    unique = {f.name: f for f in functions}
    source = target.preamble + "".join(f.text + _entry(f, target) for f in unique.values())
    stem = Path(CACHE.name) / hashlib.sha256((source + " ".join(flags)).encode()).hexdigest()[:20]
    path, library = stem.with_suffix(".c"), stem.with_suffix(".so")
    if not library.exists():
        path.write_text(source)
        warnings = ("-Wall", "-Werror", "-Wno-unused", "-Wno-psabi")
        command = [COMPILER, "-std=gnu11", *flags, *warnings, "-march=native", "-shared", "-fPIC"]
        command += ["-o", str(library), str(path), "-lm", "-pthread", *LINKER]
        done = run_program(command)
        assert done.returncode == 0, f"{done.stderr}\n{source}"
    return ctypes.CDLL(str(library))


def _entry(f: CFunction, target: CTarget) -> str:
    """Return the C entry ``call_NAME(pointers, scratch, task, threads)``, uniform for all functions."""
    pointers = "".join(f"p[{k}], " for k in range(len(f.arguments)))
    one = f"void one_{f.name}(void **p, char *scratch, int task) {{ {f.name}({pointers}scratch, task); }}\n"
    group = f"one_{f.name}(p, scratch, task)" if target.single else f"rm_group(one_{f.name}, p, scratch, task, threads)"
    return f"{one}void call_{f.name}(void **p, char *scratch, int task, int threads) {{ {group}; }}\n"


class GuardedBuffer:
    """A tensor placed by its storage in a buffer of sentinel values."""

    def __init__(self, storage: Storage, value: Array | None, dtype: str, rng: np.random.Generator) -> None:
        size = max(storage.span()[1], 1)
        self.buffer = rng.integers(1, 100, size + 16).astype(dtype)
        kind = np.dtype(dtype).itemsize
        strides = tuple(s * kind for s in storage.strides)
        self.view = np.lib.stride_tricks.as_strided(self.buffer[storage.offset :], storage.shape, strides)
        if value is not None:
            self.view[...] = value
        self.before = self.buffer.copy()
        self.pointer = ctypes.c_void_p(self.buffer.ctypes.data + storage.offset * kind)

    def untouched_outside(self) -> bool:
        """Return True if only the elements of the tensor changed."""
        after = self.buffer.copy()
        saved = self.view.copy()
        self.view[...] = 0
        blank = self.buffer.copy()
        self.buffer[...] = self.before
        self.view[...] = 0
        same = bool(np.array_equal(blank, self.buffer, equal_nan=blank.dtype.kind == "f"))
        self.buffer[...] = after
        assert np.array_equal(self.view, saved, equal_nan=saved.dtype.kind == "f")
        return same


def run(item: HostCase, function: CFunction, library: ctypes.CDLL, seed: int = 0, threads: int = 3) -> dict[str, Array]:
    """Run every task in random order and return the outputs. Check that nothing else was written."""
    rng = np.random.default_rng(seed)
    binding = item.binding
    tensors = {
        name: GuardedBuffer(binding.storages[name], item.values.get(name), binding.types[name].dtype, rng)
        for name, _ in function.arguments
    }
    room = np.frombuffer(rng.bytes(function.scratch + 192), dtype=np.uint8).copy()
    start = -room.ctypes.data % 64
    entry = getattr(library, f"call_{function.name}")
    entry.restype = None
    pointers = (ctypes.c_void_p * len(function.arguments))(*[tensors[n].pointer for n, _ in function.arguments])
    guard = room[start + function.scratch :].copy()
    scratch = ctypes.c_void_p(room.ctypes.data + start)
    for task in rng.permutation(item.operator.task_count):
        entry(pointers, scratch, ctypes.c_int(int(task)), ctypes.c_int(threads))
    assert np.array_equal(room[start + function.scratch :], guard), "wrote past the scratch memory"
    for name, written in function.arguments:
        if written:
            assert tensors[name].untouched_outside(), f"wrote outside {name}"
        else:
            assert np.array_equal(tensors[name].buffer, tensors[name].before, equal_nan=tensors[name].buffer.dtype.kind == "f")
    return {name: tensors[name].view.copy() for name in item.operator.outputs}


def check(item: HostCase, target: CTarget = C99, tolerance: float = 1e-5, threads: int = 3) -> CFunction:
    """Emit, compile, run all tasks in random order and compare with the float64 reference."""
    return check_all([item], target, tolerance, threads)[0]


def check_all(items: Sequence[HostCase], target: CTarget = C99, tolerance: float = 1e-5, threads: int = 3) -> list[CFunction]:
    """Run ``check`` for many operators, compiled together."""
    functions = [emit_operator(item.operator, item.binding, target) for item in items]
    library = compile_c(functions, target)
    for item, function in zip(items, functions, strict=True):
        needed = scratch_bytes(item.operator, item.binding, 1 if target.single else max(threads, 2), target.rereads)
        assert function.scratch == needed
        got = run(item, function, library, threads=threads)
        for name, expected in reference(item).items():
            close(got[name], expected, tolerance, function.text)
    return functions


def close(got: Array, expected: Array, tolerance: float, text: str = "") -> None:
    """Check exact equality of integers and the relative L2 error of floats, with equal NaN and infinite elements."""
    assert got.shape == expected.shape
    if got.dtype.kind != "f":
        assert np.array_equal(got, expected), text
        return
    odd = ~np.isfinite(expected)
    assert np.array_equal(got[odd], expected[odd].astype(got.dtype), equal_nan=True), text
    a, b = got[~odd].astype(np.float64), expected[~odd].astype(np.float64)
    error = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
    assert error <= tolerance, f"relative L2 error {error}\n{text}"
