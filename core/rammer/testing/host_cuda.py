"""Runs the text of CUDA kernels on the host: a block is a group of POSIX threads, shuffles and barriers are theirs.

For kernels without inline PTX: it checks index arithmetic, reductions and stores where there is no GPU, never speed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rammer.codegen.dialects import CUDA, helpers
from rammer.device.manifest import Binding
from rammer.errors import DeviceUnavailable
from rammer.testing.host_c import Array, Guarded

COMPILER = shutil.which("g++")

HEAD = """
#include <cmath>
#include <cstring>
#include <pthread.h>
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
static pthread_barrier_t rm_block, rm_warps[32];
static unsigned long long rm_mail[1024];
static void __syncthreads() { pthread_barrier_wait(&rm_block); }
static void rm_after() {}
static int min(int a, int b) { return a < b ? a : b; }
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) {
  const int me = threadIdx.x;
  memcpy(&rm_mail[me], &value, sizeof value);
  pthread_barrier_wait(&rm_warps[me / 32]);
  memcpy(&value, &rm_mail[me ^ mask], sizeof value);
  pthread_barrier_wait(&rm_warps[me / 32]);
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
  }
  return nullptr;
}
extern "C" void rm_launch(void **pointers, int blocks, int threads, int first) {
  rm_pointers = pointers; rm_blocks = blocks; rm_first = first;
  pthread_barrier_init(&rm_block, nullptr, threads);
  for (int w = 0; w < threads / 32; ++w) pthread_barrier_init(&rm_warps[w], nullptr, 32);
  pthread_t ids[1024];
  for (long t = 0; t < threads; ++t) pthread_create(&ids[t], nullptr, rm_thread, (void *)t);
  for (int t = 0; t < threads; ++t) pthread_join(ids[t], nullptr);
}
"""


@dataclass(frozen=True)
class HostArgument:
    """A pointer parameter: the tensor at its storage, or ``packed``, other values in its place."""

    tensor: str
    written: bool
    packed: Array | None = None


def run_on_host(text: str, entry: str, arguments: Sequence[HostArgument], blocks: int, threads: int, binding: Binding,
                values: Mapping[str, Array], first: int = 0) -> dict[str, Array]:  # fmt: skip
    """Run tasks ``first`` and following of ``entry`` in ``text``, one a block; its outputs by name. ``values`` may say what
    outputs hold before. Asserts that nothing else was written.

    Raises DeviceUnavailable without a C++ compiler.
    """
    if COMPILER is None:
        raise DeviceUnavailable("no C++ compiler on this machine", hint="install g++")
    types = [CUDA.types[binding.types[a.tensor].dtype] for a in arguments]
    pointers = ", ".join(f"({t} *)rm_pointers[{k}]" for k, t in enumerate(types))
    source = HEAD + helpers("static inline", CUDA.types, overloaded=False) + text
    library = _compile(source + TAIL.replace("@NAME@", entry).replace("@POINTERS@", pointers))
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


def _compile(text: str) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="rammer_cuda_"))
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(text)
    command = [str(COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{text}"
    return ctypes.CDLL(str(library))
