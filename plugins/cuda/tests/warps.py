"""Warp-wide matrix instructions and asynchronous copies for ``emulator.launch``: tensor core kernels on the host.

An instruction multiplies according to its fragments, which map threads to elements (``contraction.instruction``, after the PTX
ISA). ldmatrix follows the PTX ISA. A copy that would be misaligned on a GPU aborts. Products are exact in float, so differences
from float64 are rounding alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from rammer.device.manifest import Binding
from rammer_testing.host_c import Array

from .emulator.launch import HostKernel, find_race, run_on_host
from rammer_cuda.contraction.instruction import MMA_BF16, MMA_F16, MMA_I8, MMA_TF32, Mma
from rammer_cuda.kernels.task import TaskKernel

WARPS = """
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define RM_COPIES
#define RM_CLUSTER
#define RM_MMA
#define RM_BF16
#define RM_PAIR
#define RM_I8
#define RM_COPIES_I8
#define RM_COPIES_F16
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static int2 make_int2(int x, int y) { return {x, y}; }
struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
alignas(128) static char memory[@BYTES@];
static struct Poison { Poison() { memset(memory, 0xff, sizeof memory); } } poison;
static unsigned rm_sent[1024][8];
static const void *rm_named[1024];
static void rm_meet() { rm_warp_meet(); }
template <class T> static void rm_move(T *to, const T *from, bool valid, int bytes) {
  if ((uintptr_t)to % bytes || (valid && (uintptr_t)from % bytes)) { fprintf(stderr, "misaligned copy\\n"); abort(); }
  if (valid) memcpy(to, from, bytes); else memset(to, 0, bytes);
}
static void rm_copy2(unsigned short *to, const unsigned short *from, bool valid) { rm_move(to, from, valid, 2); }
static void rm_copy8(unsigned short *to, const unsigned short *from, bool valid) { rm_move(to, from, valid, 8); }
static void rm_copy4(float *to, const float *from, bool valid) { rm_move(to, from, valid, 4); }
template <class T> static void rm_copy16(T *to, const T *from, bool valid) { rm_move(to, from, valid, 16); }
template <class T> static void rm_filled(T *to, const T *from, bool valid, int bytes, unsigned fill) {
  rm_move(to, from, valid, bytes);
  if (!valid) memset(to, (int)(fill & 255), bytes);
}
static void rm_copy1(unsigned char *to, const unsigned char *from, bool valid, unsigned fill = 0) {
  rm_filled(to, from, valid, 1, fill);
}
static void rm_copy4(unsigned char *to, const unsigned char *from, bool valid, unsigned fill = 0) {
  rm_filled(to, from, valid, 4, fill);
}
static void rm_copy8(unsigned char *to, const unsigned char *from, bool valid, unsigned fill = 0) {
  rm_filled(to, from, valid, 8, fill);
}
static void rm_copy16(unsigned char *to, const unsigned char *from, bool valid, unsigned fill) {
  rm_filled(to, from, valid, 16, fill);
}
static void rm_commit() {}
template <int N> static void rm_arrived() {}
static float rm_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static void rm_split(float x, unsigned &big, unsigned &small) { memcpy(&big, &x, 4); small = 0; }
static float rm_part(unsigned word, int high) { const unsigned short h = word >> 16 * high; return rm_load_f16(&h); }
template <bool S> static int rm_byte(unsigned word, int e) {
  const unsigned char b = word >> 8 * e;
  return S ? (signed char)b : b;
}
static float rm_part_bf16(unsigned word, int high) { return rm_float(high ? word & 0xffff0000u : word << 16); }
static unsigned rm_bf16(float x) {
  unsigned r; memcpy(&r, &x, 4);
  return x == x ? (r + 0x7fffu + (r >> 16 & 1)) >> 16 : 0x7fffu;
}
static unsigned rm_pair_bf16(float low, float high) { return rm_bf16(low) | rm_bf16(high) << 16; }
@INSTRUCTIONS@
static void rm_mma_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  rm_mma_f16(c, a, b);
}
static unsigned rm_pair(float low, float high) {
  unsigned short h[2]; unsigned r;
  rm_store_f16(h, low); rm_store_f16(h + 1, high); memcpy(&r, h, 4);
  return r;
}
template <bool SA, bool SB> static void rm_mma_i8(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  rm_mma_i8<SA, SB>(c, a, b);
}
template <bool TURN> static void rm_blocks4(unsigned (&r)[4], const unsigned short *at) {
  const int me = threadIdx.x, warp = me / 32 * 32, l = me % 32;
  if ((uintptr_t)at % 16) { fprintf(stderr, "misaligned row\\n"); abort(); }
  rm_named[me] = at;
  rm_meet();
  for (int b = 0; b < 4; ++b) {
    unsigned short h[2];
    for (int e = 0; e < 2; ++e) {
      const int row = TURN ? l % 4 * 2 + e : l / 4, column = TURN ? l / 4 : l % 4 * 2 + e;
      h[e] = ((const unsigned short *)rm_named[warp + b * 8 + row])[column];
    }
    memcpy(&r[b], h, 4);
  }
  rm_meet();
}
"""

#: A warp's product: the owners of the elements of A and B, and the elements of C in each thread.
_MMA = """
@template@static void @name@(@number@ (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  static const unsigned short A[@m@][@k@] = {@a@}, B[@k@][@n@] = {@b@}, C[32][4] = {@c@};
  const int me = threadIdx.x, warp = me / 32 * 32, each = @each@;
  memcpy(rm_sent[me], a, 16); memcpy(rm_sent[me] + 4, b, 8);
  rm_meet();
  for (int e = 0; e < 4; ++e)
    for (int k = 0; k < @k@; ++k) {
      const int at = C[me % 32][e], x = A[at / @n@][k], y = B[k][at % @n@];
      const unsigned *const left = rm_sent[warp + x / 16], *const right = rm_sent[warp + y / 16] + 4;
      c[e] += @left@(left[x % 16 / each]@x@) * @right@(right[y % 16 / each]@y@);
    }
  rm_meet();
}
"""


def instruction(name: str, i: Mma, value: str) -> str:
    """Return a warp's product as a function of its registers, by its fragments."""
    assert i.form.a is not None and i.form.b is not None
    holder: dict[str, dict[tuple[int, int], int]] = {"a": {}, "b": {}, "c": {}}
    for side, fragment in (("a", i.form.a), ("b", i.form.b)):
        holder[side] = {(r, c): thread * 16 + e for thread, e, r, c in fragment.places(i.form.threads)}
    holder["c"] = {(thread, e): r * i.form.n + c for thread, e, r, c in i.form.c.places(i.form.threads)}
    tables = {
        n: "}, {".join(
            ", ".join(str(v) for (r, _), v in sorted(held.items()) if r == row) for row in sorted({r for r, _ in held})
        )
        for n, held in holder.items()
    }
    each = i.form.a.elements // 4
    values = {
        "name": name,
        "m": i.form.m,
        "n": i.form.n,
        "k": i.form.k,
        "each": each,
        **{n: f"{{{t}}}" for n, t in tables.items()},
        "template": "template <bool SA, bool SB> " if i.number == "int" else "",
        "number": i.number,
        "left": f"{value}<SA>" if i.number == "int" else value,
        "right": f"{value}<SB>" if i.number == "int" else value,
        **{p: f", {p} % {each}" if each > 1 else "" for p in "xy"},
    }
    return re.sub(r"@(\w+)@", lambda m: str(values[m[1]]), _MMA)


#: Instructions by name, and the expression that reads an element from a register.
READ = (
    ("rm_mma", MMA_TF32, "rm_float"),
    ("rm_mma_f16", MMA_F16, "rm_part"),
    ("rm_mma_bf16", MMA_BF16, "rm_part_bf16"),
    ("rm_mma_i8", MMA_I8, "rm_byte"),
)
WARPS = WARPS.replace("@INSTRUCTIONS@", "".join(instruction(*read) for read in READ))


def run_warps(kernel: TaskKernel, tasks: int, binding: Binding, values: Mapping[str, Array], first: int = 0) -> dict[str, Array]:
    """Run kernels of ``mma.sync`` without packed operands, as ``run_on_host`` does. Shared memory is initially NaN."""
    return run_on_host(HostKernel.of(kernel, binding, values, on_host(kernel), tasks), values, first)


def race_of_warps(kernel: TaskKernel, binding: Binding) -> str:
    """Return the race that ThreadSanitizer reports in the first task, or ""."""
    return find_race(HostKernel.of(kernel, binding, {}, on_host(kernel)))


def on_host(kernel: TaskKernel) -> str:
    """Return the text of ``kernel`` with its instructions emulated."""
    text = WARPS.replace("@BYTES@", str(kernel.dynamic)) + kernel.text
    return text.replace("extern __shared__ __align__(16) char memory[];", "")


def random_values(rng: np.random.Generator, binding: Binding, names: tuple[str, ...]) -> dict[str, Array]:
    """Return standard normal values of every tensor, in its type."""
    return {n: rng.standard_normal(binding.types[n].shape).astype(binding.types[n].dtype) for n in names}
