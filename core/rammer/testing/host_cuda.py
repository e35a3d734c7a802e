"""Runs the text of CUDA kernels on the host: a block is a group of POSIX threads, shuffles and barriers are theirs.

For kernels without inline PTX: it checks index arithmetic, reductions and stores where there is no GPU, never speed. With
ThreadSanitizer it also finds accesses of a block's threads that no barrier orders.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rammer.codegen.dialects import CUDA, helpers
from rammer.codegen.task import Argument
from rammer.device.manifest import Binding
from rammer.errors import DeviceUnavailable
from rammer.ir.types import itemsize
from rammer.testing.host_c import Array, Guarded

COMPILER = shutil.which("g++")

#: What kernels here and the stand-ins for instructions include: compiled once in a process, since reading them takes longer than
#: most kernels do.
INCLUDES = "".join(f"#include <{name}>\n" for name in (
    "atomic", "chrono", "cmath", "cstdint", "cstdio", "cstdlib", "cstring", "deque", "functional", "pthread.h", "sched.h",
    "vector"))  # fmt: skip
HEAD = """
#define RM_INF INFINITY
#define RM_NAN NAN
#define __global__
#define __device__
#define __launch_bounds__(n)
#define __shared__ static
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Place { int x; };
static thread_local Place threadIdx, blockIdx;
static Place blockDim;
// Barriers by turns, as threads come to them: ThreadSanitizer takes what one does before it reaches the next barrier for ordered
// before a late sleeper of this one where both are the same object.
static pthread_barrier_t rm_block[2], rm_warps[32][2];
static thread_local int rm_block_turn, rm_warp_turn;
static unsigned long long rm_mail[1024];
static void __syncthreads() { pthread_barrier_wait(&rm_block[rm_block_turn++ % 2]); }
static void rm_warp_meet() { pthread_barrier_wait(&rm_warps[threadIdx.x / 32][rm_warp_turn++ % 2]); }
// What a kernel may read only after it has waited for others is NaN until every thread of the block has. ``rm_kept`` is how many
// buffers that are, and 0 where nothing is checked: then this orders nothing.
static void **rm_given, **rm_values; static long *rm_sizes; static int rm_kept, rm_expected;
static std::atomic<int> rm_here; static std::atomic<bool> rm_lost;
static void rm_forget() {
  for (int k = 0; k < rm_kept; ++k) memset(rm_given[k], 255, rm_sizes[k]);
  rm_here = 0;
}
static void rm_after() {
  if (!rm_kept) return;
  if (rm_here.fetch_add(1) == rm_expected - 1) {
    for (int k = 0; k < rm_kept; ++k) memcpy(rm_given[k], rm_values[k], rm_sizes[k]);
    ++rm_here;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (rm_here <= rm_expected && !rm_lost) {
    sched_yield();
    if (std::chrono::steady_clock::now() > end) rm_lost = true;
  }
}
static int min(int a, int b) { return a < b ? a : b; }
static float rm_load_f16(const unsigned short *p) {
  const int e = *p >> 10 & 31, m = *p & 1023;
  const float v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
  return *p >> 15 ? -v : v;
}
static void rm_store_f16(unsigned short *p, float value) {
  const float v = fabsf(value);
  int e = 0, h = 0x7e00;
  if (v >= 65520.0f) h = 0x7c00;
  else if (v < 6.103515625e-05f) h = (int)lrintf(ldexpf(v, 24));
  else if (v == v) { const float f = frexpf(v, &e); h = ((e + 14) << 10) + (int)lrintf(ldexpf(f, 11)) - 1024; }
  *p = (unsigned short)(h | std::signbit(value) << 15);
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) {
  const int me = threadIdx.x;
  memcpy(&rm_mail[me], &value, sizeof value);
  rm_warp_meet();
  memcpy(&value, &rm_mail[me ^ mask], sizeof value);
  rm_warp_meet();
  return value;
}
"""
TAIL = """
static void **rm_pointers; static int rm_blocks, rm_first;
static void *rm_thread(void *number) {
  threadIdx.x = (int)(long)number;
  for (blockIdx.x = 0; blockIdx.x < rm_blocks; ++blockIdx.x) {
    @NAME@(@POINTERS@, nullptr, rm_first);
    __syncthreads();
    if (rm_kept && blockIdx.x + 1 < rm_blocks) {
      if (threadIdx.x == 0) rm_forget();
      __syncthreads();
    }
  }
  return nullptr;
}
extern "C" void rm_launch(void **pointers, int blocks, int threads, int first) {
  rm_pointers = pointers; rm_blocks = blocks; rm_first = first; blockDim.x = threads;
  for (int k = 0; k < 2; ++k) {
    pthread_barrier_init(&rm_block[k], nullptr, threads);
    for (int w = 0; w < threads / 32; ++w) pthread_barrier_init(&rm_warps[w][k], nullptr, 32);
  }
  pthread_t ids[1024];
  for (long t = 0; t < threads; ++t) pthread_create(&ids[t], nullptr, rm_thread, (void *)t);
  for (int t = 0; t < threads; ++t) pthread_join(ids[t], nullptr);
}
extern "C" int rm_launch_after(void **pointers, int blocks, int threads, int first, int kept, void **given, void **values,
                               long *sizes) {
  rm_kept = kept; rm_expected = threads; rm_given = given; rm_values = values; rm_sizes = sizes; rm_lost = false;
  rm_forget();
  rm_launch(pointers, blocks, threads, first);
  return rm_lost;
}
"""
#: A process of its own, since ThreadSanitizer must be there first. Every buffer is full of one float16 or float32 value.
MAIN = """
int main() {
  const size_t bytes[] = {@BYTES@};
  void *pointers[sizeof bytes / sizeof *bytes];
  for (size_t k = 0; k < sizeof bytes / sizeof *bytes; ++k)
    memset(pointers[k] = aligned_alloc(64, (bytes[k] + 63) / 64 * 64), 0x3c, (bytes[k] + 63) / 64 * 64);
  rm_launch(pointers, @BLOCKS@, @THREADS@, 0);
}
"""
#: Seconds after which a kernel under ThreadSanitizer counts as hung, and the exit code with which it tells of a race.
PATIENCE, RACE = 300, 66


@dataclass(frozen=True)
class HostArgument:
    """A pointer parameter: the tensor at its storage, or ``packed``, other values in its place."""

    tensor: str
    written: bool
    packed: Array | None = None


def host_arguments(arguments: Iterable[Argument], values: Mapping[str, Array]) -> list[HostArgument]:
    """A kernel's arguments; where it wants a constant arranged, that of ``values``."""
    return [HostArgument(a.tensor, a.written, None if a.packing is None else a.packing.make(values[a.tensor])) for a in arguments]


def run_on_host(text: str, entry: str, arguments: Sequence[HostArgument], blocks: int, threads: int, binding: Binding,
                values: Mapping[str, Array], first: int = 0) -> dict[str, Array]:  # fmt: skip
    """Run tasks ``first`` and following of ``entry`` in ``text``, one a block; its outputs by name. ``values`` may say what
    outputs hold before. Asserts that nothing else was written.

    Raises DeviceUnavailable without a C++ compiler.
    """
    if COMPILER is None:
        raise DeviceUnavailable("no C++ compiler on this machine", hint="install g++")
    library = ctypes.CDLL(str(_compile(_source(text, entry, arguments, binding), "-O1", "-shared", "-fPIC")))
    rng = np.random.default_rng()
    tensors = {
        a.tensor: Guarded(binding.storages[a.tensor], values.get(a.tensor), binding.types[a.tensor].dtype, rng)
        for a in arguments
    }
    addresses = [ctypes.c_void_p(a.packed.ctypes.data) if a.packed is not None else tensors[a.tensor].pointer
                 for a in arguments]  # fmt: skip
    library.rm_launch((ctypes.c_void_p * len(addresses))(*addresses), blocks, threads, first)
    for a in arguments:
        same = np.array_equal(tensors[a.tensor].buffer, tensors[a.tensor].before, equal_nan=True)
        assert tensors[a.tensor].untouched_outside() if a.written else same, a.tensor
    return {a.tensor: tensors[a.tensor].view.copy() for a in arguments if a.written}


def launch_on_host(text: str, entry: str, arguments: Sequence[HostArgument], blocks: int, threads: int, binding: Binding,
                   addresses: Mapping[str, int], late: Sequence[Array]) -> None:  # fmt: skip
    """Run ``blocks`` tasks of ``entry`` on tensors that lie at ``addresses``. The buffers ``late`` hold NaN until all threads of
    a block have waited for the kernels before (``rm_after``), and their values from then on.

    AssertionError where a thread never does; DeviceUnavailable without a C++ compiler.
    """
    if COMPILER is None:
        raise DeviceUnavailable("no C++ compiler on this machine", hint="install g++")
    library = ctypes.CDLL(str(_compile(_source(text, entry, arguments, binding), "-O1", "-shared", "-fPIC")))
    places = [a.packed.ctypes.data if a.packed is not None else addresses[a.tensor] for a in arguments]
    values = [buffer.copy() for buffer in late]

    def pointers(items: Sequence[int]) -> Any:
        return (ctypes.c_void_p * max(len(items), 1))(*items)

    sizes = (ctypes.c_long * max(len(late), 1))(*[buffer.nbytes for buffer in late])
    lost = library.rm_launch_after(pointers(places), blocks, threads, 0, len(late), pointers([b.ctypes.data for b in late]),
                                   pointers([v.ctypes.data for v in values]), sizes)  # fmt: skip
    assert not lost, "a thread ends or waits without rm_after(), or a copy is misaligned"


def find_race(text: str, entry: str, arguments: Sequence[HostArgument], blocks: int, threads: int,
              binding: Binding) -> str:  # fmt: skip
    """What ThreadSanitizer says of the first ``blocks`` tasks of ``entry``, one after another: accesses of two threads that
    nothing orders; "" where there are none. Values are all the same.

    Raises DeviceUnavailable without a C++ compiler, or where ThreadSanitizer does not start.
    """
    if COMPILER is None:
        raise DeviceUnavailable("no C++ compiler on this machine", hint="install g++")
    ends = [binding.storages[a.tensor].span()[1] * itemsize(binding.types[a.tensor].dtype) for a in arguments]
    sizes = [end if a.packed is None else a.packed.nbytes for end, a in zip(ends, arguments, strict=True)]
    main = MAIN.replace("@BYTES@", ", ".join(map(str, sizes))).replace("@BLOCKS@", str(blocks)).replace("@THREADS@", str(threads))
    program = _compile(_source(text, entry, arguments, binding) + main, "-O1", "-g", "-fsanitize=thread")
    options = {"TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, env=options, timeout=PATIENCE)
    if done.returncode not in (0, RACE) or "FATAL: ThreadSanitizer" in done.stderr:
        raise DeviceUnavailable(f"ThreadSanitizer does not run here: {done.stderr.strip()[:300]}")
    return done.stderr if done.returncode else ""


def _source(text: str, entry: str, arguments: Sequence[HostArgument], binding: Binding) -> str:
    """A program whose ``rm_launch`` runs the kernel."""
    types = [CUDA.types[binding.types[a.tensor].dtype] for a in arguments]
    pointers = ", ".join(f"({t} *)rm_pointers[{k}]" for k, t in enumerate(types))
    tail = TAIL.replace("@NAME@", entry).replace("@POINTERS@", pointers)
    return HEAD + helpers("static inline", CUDA.types, overloaded=False) + text + tail


@cache
def _folder() -> Path:
    """Where this process compiles; gone when it ends."""
    folder = tempfile.TemporaryDirectory(prefix="rammer_cuda_")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def _flags(*flags: str) -> tuple[str, ...]:
    """All flags of a compilation, the headers that it finds precompiled for just these among them."""
    header = Path(tempfile.mkdtemp(dir=_folder())) / "all.h"
    header.write_text(INCLUDES)
    made = ("-std=c++17", "-w", "-pthread", *flags)
    _run(*made, "-x", "c++-header", "-o", f"{header}.gch", str(header))
    return (*made, "-include", str(header))


def _compile(text: str, *flags: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    source, made = folder / "kernel.cpp", folder / "kernel"
    source.write_text(text)
    _run(*_flags(*flags), "-o", str(made), str(source))
    return made


def _run(*words: str) -> None:
    done = subprocess.run([str(COMPILER), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{Path(words[-1]).read_text()}"
