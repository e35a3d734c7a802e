"""Kernels with warpgroup products on host threads: each PTX instruction that they use is written out from the PTX ISA.

Descriptors, their steps and the bits of the operand order are read from the kernel's text.

Copies and products happen at the start or at the end of the interval that the hardware permits: at the request, or at the wait. A
read that is too early, or an overwrite that is too soon, gives a wrong result in one of them. Clusters are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from rammer.device.manifest import Array, Binding
from rammer.ir.operator import ROperator

from .emulator.launch import HostKernel, find_race, run_on_host
from rammer_cuda.kernels.task import TaskKernel

#: ``LATE_COPIES`` and ``LATE_PRODUCTS`` are switches. Shared addresses are offsets into ``rm_arena``.
_HOST = """
#define LATE_COPIES rm_switches[0]
#define LATE_PRODUCTS rm_switches[1]
#define RM_COPIES
#define RM_CLUSTER
#define RM_COPIES_I8
#define RM_COPIES_F16
struct int4 { int x, y, z, w; };
static int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
#define RM_WGMMA
#define RM_CHAIN
#define RM_PIN_I32
#define __forceinline__ inline
static char rm_arena[232448] __attribute__((aligned(1024)));
static std::atomic<bool> rm_stuck{false};
template <class F> static void rm_until(F ready) {
  if (!rm_wait([&] { return rm_stuck || ready(); })) rm_stuck = true;
}
static unsigned __cvta_generic_to_shared(const void *at) { return (unsigned)((const char *)at - rm_arena); }

// cp.async: groups of copies.
struct RmCopies : std::vector<std::vector<std::function<void()>>> { RmCopies() : vector(1) {} };
RM_OWN(RmCopies, rm_copies)
static void rm_copy(void *to, const void *from, bool valid, int bytes) {
  if ((size_t)__cvta_generic_to_shared(to) % bytes || (size_t)from % bytes && valid) rm_stuck = true;
  auto copy = [=] { if (valid) memcpy(to, from, bytes); else memset(to, 0, bytes); };
  if (LATE_COPIES) rm_copies().back().push_back(copy); else copy();
}
template <class T> static void rm_copy4(T *to, const T *from, bool valid) { rm_copy(to, from, valid, 4); }
template <class T> static void rm_copy16(T *to, const T *from, bool valid) { rm_copy(to, from, valid, 16); }
template <class T> static void rm_copy16(T *to, const T *from, bool valid, unsigned fill) {
  if (valid) rm_copy(to, from, true, 16); else memset(to, (int)(fill & 255), 16);
}
static void rm_commit() { rm_copies().emplace_back(); }
// Copies that signal a barrier: at once, or when their thread waits or has no more of them.
RM_OWN(std::vector<std::function<void()>>, rm_signals)
static void rm_flush() {
  for (auto &copy : rm_signals()) copy();
  rm_signals().clear();
}
template <int N> static void rm_arrived() {
  while ((int)rm_copies().size() - 1 > N) {
    for (auto &copy : rm_copies().front()) copy();
    rm_copies().erase(rm_copies().begin());
  }
  if (!N) rm_flush();
}

// mbarrier: a wait for a parity passes once the phase of that parity is complete. Named barriers count threads. Both order what
// threads did before they arrived and what others do after they waited, and nothing else: ThreadSanitizer takes it so.
struct Phases { int expected; std::atomic<int> arrived; };
static Phases rm_phases[sizeof rm_arena / 8];
static std::atomic<int> rm_turns[16];
static void rm_barrier_init(unsigned at, int count) { rm_phases[at / 8].expected = count; rm_phases[at / 8].arrived = 0; }
static void rm_barriers_made() {}
static void rm_copies_to_async() {}
static void rm_barrier_arrive(unsigned at) { rm_phases[at / 8].arrived.fetch_add(1, std::memory_order_acq_rel); }
static void rm_signal(std::function<void()> copy) { if (LATE_COPIES) rm_signals().push_back(copy); else copy(); }
static void rm_copies_arrive(unsigned at) {
  for (auto &copy : rm_copies().back()) rm_signals().push_back(copy);
  rm_copies().back().clear();
  rm_signal([=] { rm_barrier_arrive(at); });
}
static void rm_bulk(unsigned to, const float *from, int bytes, unsigned at) {
  if (to % 16 || (size_t)from % 16 || bytes % 16) rm_stuck = true;
  rm_signal([=] { memcpy(rm_arena + to, from, bytes); rm_barrier_arrive(at); });
}
static void rm_barrier_wait(unsigned at, int parity) {
  rm_flush();
  const Phases &p = rm_phases[at / 8];
  rm_until([&] { return (p.arrived.load(std::memory_order_acquire) / p.expected & 1) != parity; });
}
static int rm_pass(int which, int threads) { return rm_turns[which].fetch_add(1, std::memory_order_acq_rel) / threads; }
static void rm_meet(int which, int threads) {
  const int turn = rm_pass(which, threads);
  rm_until([=] { return rm_turns[which].load(std::memory_order_acquire) / threads > turn; });
}
static void rm_turn_pass(int which) { rm_pass(which, 256); }
static void rm_turn_wait(int which) { rm_meet(which, 256); }
template <int N> static void rm_producers_meet() { rm_meet(15, N); }

// wgmma: a thread's products, in the order of their groups.
static unsigned rm_registers[4][128][4];
typedef std::vector<std::function<void()>> RmPending;
RM_OWN(RmPending, rm_pending)
static void rm_together() { rm_warp_meet(); }  // a warp's rows need its own registers
static void rm_multiply_later(std::function<void()> products) {
  if (LATE_PRODUCTS) rm_pending().push_back(products); else products();
}
template <int N> static void rm_warpgroup_wait() {
  while ((int)rm_pending().size() > N) { rm_pending().front()(); rm_pending().erase(rm_pending().begin()); }
  rm_warp_meet();  // ".sync.aligned": kernels rely on all lanes being here
}
template <class T> static void rm_pin(T &) {}
static float rm_as_float(unsigned x) { float v; memcpy(&v, &x, 4); return v; }
static unsigned rm_as_bits(float x) { unsigned v; memcpy(&v, &x, 4); return v; }
static float rm_tf32(unsigned x) { return rm_as_float(x & 0xffffe000u); }
static unsigned rm_rounded(float x) { return x == x ? (rm_as_bits(x) + 0x1000u) & 0xffffe000u : rm_as_bits(x); }
static void rm_halves(float x, unsigned &big, unsigned &small) {
  big = rm_rounded(x); small = rm_as_bits(x - rm_as_float(big));
}
static void rm_halve(float *at, float *rest) {
  for (int e = 0; e < 4; ++e) {
    unsigned big, small;
    rm_halves(at[e], big, small);
    at[e] = rm_as_float(big); rest[e] = rm_as_float(small);
  }
}
// "Canonical Layouts" without swizzle, lengths in elements of which T make 16 bytes. Products contiguous:
// ((8, m), (T, 2 k)) : ((T, SBO), (1, LBO)). Rows contiguous: ((T, 1, m), (8, k)) : ((1, T, SBO), (T, LBO)).
static const char *rm_element(unsigned long long matrix, int row, int k, int bytes, bool turned) {
  const int start = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
  const int T = 16 / bytes;
  const int inside = turned ? row % T * bytes + k % 8 * 16 : row % 8 * 16 + k % T * bytes;
  return rm_arena + start + inside + (turned ? row / T : row / 8) * stride + (turned ? k / 8 : k / T) * leading;
}
// "Register Fragments": a thread has rows 16 warp + lane / 4 (+ 8) and columns 8 j + 2 (lane % 4) (+ 1) of the result; of
// operand A of 8 products the same rows and products lane % 4 (+ 4).
template <class V, int N, class A, class B> static void rm_accumulate(V (&d)[N], int deep, A a, B b) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < N; ++i) {
    const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < deep; ++k) sum += (double)a(row, k) * b(column, k);
    d[i] = (V)sum;
  }
}
template <int N> static void rm_one_tf32(float (&d)[N], unsigned (&a)[4], unsigned long long b) {
  const int group = threadIdx.x / 128;
  rm_together();
  memcpy(rm_registers[group][threadIdx.x % 128], a, sizeof a);
  rm_together();
  rm_accumulate(d, 8, [=](int row, int k) {
    return rm_tf32(rm_registers[group][row / 16 * 32 + row % 8 * 4 + k % 4][k / 4 * 2 + row / 8 % 2]);
  }, [=](int column, int k) { float v; memcpy(&v, rm_element(b, column, k, 4, false), 4); return rm_tf32(rm_as_bits(v)); });
}
"""
_TF32 = """
#define RM_WGMMA_{n}
template <int S> static void rm_products{n}(float (&d)[{count}], unsigned (&a)[S][4], unsigned long long b) {{
  rm_multiply_later([&d, &a, b] {{ for (int s = 0; s < S; ++s) rm_one_tf32(d, a[s], b + s * {step}); }});
}}
template <int S> static void rm_products{n}(float (&d)[{count}], unsigned (&big)[S][4], unsigned (&small)[S][4],
                                            unsigned long long bulk, unsigned long long rest) {{
  rm_multiply_later([&d, &big, &small, bulk, rest] {{
    for (float &v : d) v = 0.0f;
    for (int s = 0; s < S; ++s) rm_one_tf32(d, small[s], bulk + s * {step});
    for (int s = 0; s < S; ++s) rm_one_tf32(d, big[s], rest + s * {step});
    for (int s = 0; s < S; ++s) rm_one_tf32(d, big[s], bulk + s * {step});
  }});
}}
"""
_HALF = """
#define RM_WGMMA_{name}
template <int S, int ASTEP, int BSTEP> static void rm_products_{name}(float (&d)[{count}], unsigned long long a,
                                                                      unsigned long long b) {{
  rm_multiply_later([&d, a, b] {{
    auto read = [](unsigned long long matrix, int row, int k, bool turned) {{
      return rm_load_f16((const unsigned short *)rm_element(matrix, row, k, 2, turned));
    }};
    for (int s = 0; s < S; ++s)
      rm_accumulate(d, 16, [=](int row, int k) {{ return read(a + s * ASTEP, row, k, {ta}); }},
                    [=](int column, int k) {{ return read(b + s * BSTEP, column, k, {tb}); }});
  }});
}}
"""
_BYTES = """
#define RM_WGMMA_{name}
template <int S, int ASTEP, int BSTEP> static void rm_products_{name}(int (&d)[{count}], unsigned long long a,
                                                                      unsigned long long b) {{
  rm_multiply_later([&d, a, b] {{
    for (int s = 0; s < S; ++s)
      rm_accumulate(d, 32, [=](int row, int k) {{ return *(const {ta} char *)rm_element(a + s * ASTEP, row, k, 1, false); }},
                    [=](int column, int k) {{ return *(const {tb} char *)rm_element(b + s * BSTEP, column, k, 1, false); }});
  }});
}}
"""


def run_warpgroups(
    kernel: TaskKernel, operator: ROperator, binding: Binding, values: Mapping[str, Array], late_copies: bool, late_products: bool
) -> dict[str, Array]:
    """Run all tasks of ``kernel``, whose sums are not split, and return its outputs by name. Raises AssertionError if threads
    wait forever."""
    host = HostKernel.of(kernel, binding, values, on_host(kernel), operator.task_count)
    return run_on_host(replace(host, switches=(late_copies, late_products)), values)


def race_of_warpgroups(kernel: TaskKernel, binding: Binding, values: Mapping[str, Array], late_copies: bool) -> str:
    """Return the race that ThreadSanitizer reports in the first task, or ""."""
    host = HostKernel.of(kernel, binding, values, on_host(kernel))
    return find_race(replace(host, switches=(late_copies, not late_copies)))


def on_host(kernel: TaskKernel) -> str:
    """Return the text of ``kernel`` with its instructions emulated."""
    assert kernel.blocks == 1 and kernel.dynamic <= 232448
    descriptor = re.search(r"__device__ __forceinline__ unsigned long long rm_matrix.*?\n}\n", kernel.text, re.DOTALL)
    assert descriptor
    head = _HOST + descriptor[0]
    for n in {int(n) for n in re.findall(r"#define RM_WGMMA_(\d+)\n", kernel.text)}:
        (step,) = set(re.findall(rf"rm_wgmma{n}\(d, \w+\[s\], \w+ \+ s \* (\d+),", kernel.text))
        head += _TF32.format(n=n, count=n // 2, step=step)
    for name in set(re.findall(r"#define RM_WGMMA_(f16_\d+_[nt]{2})\n", kernel.text)):
        n = int(name.split("_")[1])
        ((ta, tb),) = re.findall(rf"m64n{n}k16\.f32\.f16\.f16 .*, p, 1, 1, ([01]), ([01]);", kernel.text)
        head += _HALF.format(name=name, count=n // 2, ta=ta, tb=tb)
    for name in set(re.findall(r"#define RM_WGMMA_(i8_\d+_[us]{2})\n", kernel.text)):
        n = int(name.split("_")[1])
        ((ta, tb),) = re.findall(rf"m64n{n}k32\.s32\.([us])8\.([us])8 .*, p;", kernel.text)
        signs = {"u": "unsigned", "s": "signed"}
        head += _BYTES.format(name=name, count=n // 2, ta=signs[ta], tb=signs[tb])
    text = kernel.text.replace("extern __shared__ __align__(16) float shared[];", "float *const shared = (float *)rm_arena;")
    assert "extern __shared__" not in text
    start = text.index("{", text.index('extern "C" __global__')) + 1
    set_up = """
    if (threadIdx.x == 0) {
      memset(rm_arena, 255, sizeof rm_arena);
      for (auto &turn : rm_turns) turn = 0;
    }
    __syncthreads();"""
    return head + text[:start] + set_up + text[start:]
