"""Warpgroup matrix products (PTX ``wgmma``, sm_90a): tf32 with operand A in registers, float16 with both in shared memory.

Three tf32 products for one of fp32: ``x = big + small`` with ``big`` rounded to tf32's 11 bits; then ``small`` has at most
12, of which the tensor core drops the last, and ``small * small`` is below fp32's last bit. Tensor cores truncate when they
add: sums stay in them for a few products only, the small ones first.

What lies in shared memory has the layout without swizzle: core matrices of 8 x 16 bytes (PTX ISA, "Strides", "Canonical
Layouts", "Matrix Descriptor Format"). Those of neighbouring columns follow each other, those of the next products come after
all columns, so one descriptor fits either order inside a core matrix: rows of one column's products, or of one product's
columns (float16 alone, with the transposing bit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rammer.codegen.task import Array

#: Products of one tf32 instruction and of one float16 instruction, and columns of a core matrix.
DEEP, HALF_DEEP, CORE = 8, 16, 8
#: The order of products within ``DEEP`` in which a result's registers serve as the next product's operand: lane t holds
#: columns 2t and 2t + 1 of a result, and products t and t + 4 of an operand.
RESULT_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_COMMON = """
#ifndef RM_WGMMA
#define RM_WGMMA
__device__ __forceinline__ void rm_halves(float x, unsigned &big, unsigned &small) {
  big = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  small = __float_as_uint(x - __uint_as_float(big));
}
// Four elements become their rounded values, and the rest goes elsewhere.
__device__ __forceinline__ void rm_halve(float *at, float *rest) {
  const float4 v = *(const float4 *)at;
  uint4 b, s;
  rm_halves(v.x, b.x, s.x); rm_halves(v.y, b.y, s.y); rm_halves(v.z, b.z, s.z); rm_halves(v.w, b.w, s.w);
  *(uint4 *)at = b;
  *(uint4 *)rest = s;
}
__device__ __forceinline__ unsigned rm_rounded(float x) {
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ unsigned long long rm_matrix(const void *shared, int columns) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(shared);
  return (unsigned long long)((at & 0x3ffff) >> 4) | (unsigned long long)(columns) << 16 | 8ull << 32;
}
template <int N> __device__ __forceinline__ void rm_pin(unsigned (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(x[i][e]) :: "memory");
}
template <int N> __device__ __forceinline__ void rm_pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i]) :: "memory");
}
__device__ __forceinline__ void rm_warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void rm_warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void rm_warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// Two warpgroups meet at a named barrier: one waits for its turn, the one before passes it on.
__device__ __forceinline__ void rm_turn_wait(int which) { asm volatile("bar.sync %0, 256;" :: "r"(which) : "memory"); }
__device__ __forceinline__ void rm_turn_pass(int which) { asm volatile("bar.arrive %0, 256;" :: "r"(which) : "memory"); }
// The warpgroups that copy, at the last named barrier.
template <int N> __device__ __forceinline__ void rm_copiers_meet() { asm volatile("bar.sync 15, %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void rm_copies_to_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void rm_barrier_init(unsigned at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void rm_barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void rm_barrier_arrive(unsigned at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
}
__device__ __forceinline__ void rm_barrier_wait(unsigned at, int parity) {
  asm volatile("{ .reg .pred done;\\n"
    "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
    "@done bra left;\\n bra again;\\n left: }" :: "r"(at), "r"(parity) : "memory");
}
#endif
"""

_PRODUCT = """
#ifndef RM_WGMMA_{n}
#define RM_WGMMA_{n}
__device__ __forceinline__ void rm_wgmma{n}(float (&d)[{count}], const unsigned (&a)[4], unsigned long long b, int more) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{last}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32 {{{results}}}, {{{operands}}}, %{matrix}, p, 1, 1; }}"
    : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}}
// One product each: sums stay on the tensor cores. ``a`` must not change until rm_warpgroup_wait().
template <int S> __device__ __forceinline__ void rm_products{n}(float (&d)[{count}], unsigned (&a)[S][4],
                                                             unsigned long long b) {{
  rm_pin(a); rm_pin(d);
  rm_warpgroup_begin();
#pragma unroll
  for (int s = 0; s < S; ++s) rm_wgmma{n}(d, a[s], b + s * {step}, 1);
  rm_warpgroup_commit();
}}
// Products of {n} columns with all of an operand's registers: they run until rm_warpgroup_wait(). ``bulk`` and ``rest`` are
// the matrix' halves.
template <int S> __device__ __forceinline__ void rm_products{n}(float (&d)[{count}], unsigned (&big)[S][4],
                                                             unsigned (&small)[S][4], unsigned long long bulk,
                                                             unsigned long long rest) {{
  rm_pin(big); rm_pin(small); rm_pin(d);
  rm_warpgroup_begin();
#pragma unroll
  for (int s = 0; s < S; ++s) rm_wgmma{n}(d, small[s], bulk + s * {step}, s > 0);
#pragma unroll
  for (int s = 0; s < S; ++s) rm_wgmma{n}(d, big[s], rest + s * {step}, 1);
#pragma unroll
  for (int s = 0; s < S; ++s) rm_wgmma{n}(d, big[s], bulk + s * {step}, 1);
  rm_warpgroup_commit();
}}
#endif
"""


#: ``STEP`` is how much further, in 16 bytes, the next instruction's products lie.
_HALF = """
#ifndef RM_WGMMA_{name}
#define RM_WGMMA_{name}
template <int S, int ASTEP, int BSTEP> __device__ __forceinline__ void rm_products_{name}(float (&d)[{count}],
    unsigned long long a, unsigned long long b) {{
  rm_warpgroup_begin();
#pragma unroll
  for (int s = 0; s < S; ++s)
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{last}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{results}}}, %{first}, %{second}, p, 1, 1, {ta}, {tb}; }}"
      : {outputs} : "l"(a + s * ASTEP), "l"(b + s * BSTEP), "r"(1));
  rm_warpgroup_commit();
}}
#endif
"""


def preamble(columns: Sequence[int]) -> str:
    """Device functions for products of these numbers of columns (multiples of 8, at most 256)."""
    return _COMMON + "".join(_product(n) for n in sorted(set(columns)))


def _product(n: int) -> str:
    count = n // 2
    return _PRODUCT.format(
        n=n, count=count, last=count + 5, matrix=count + 4, step=n * DEEP * 4 // 16,
        results=",".join(f"%{i}" for i in range(count)), operands=",".join(f"%{count + i}" for i in range(4)),
        outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
    )  # fmt: skip


def half_preamble(n: int, turned: tuple[bool, bool]) -> str:
    """Device function ``rm_products_{half_name}``: float16 products of ``n`` columns; ``turned`` says of each operand that
    neighbouring rows (or columns), not neighbouring products, are contiguous."""
    count = n // 2
    a, b = map(int, turned)
    return _COMMON + _HALF.format(
        n=n, count=count, name=half_name(n, turned), first=count, second=count + 1, last=count + 2, ta=a, tb=b,
        results=",".join(f"%{i}" for i in range(count)), outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
    )  # fmt: skip


def half_name(n: int, turned: tuple[bool, bool]) -> str:
    """The end of the name of that function."""
    return f"f16_{n}_{'nt'[turned[0]]}{'nt'[turned[1]]}"


def halves(values: Array) -> tuple[Array, Array]:
    """float32 ``values`` as (rounded to tf32, the rest)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    big = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return big, values - big


def cores(values: Array, order: Sequence[int] = range(DEEP)) -> Array:
    """``values[..., k, n]`` as wgmma's operand B, ``[..., k / 8, 8 / w, n / 8, 8, w]``: core matrices of 8 columns by the
    ``w`` products that make 16 bytes (4 of float32, 8 of float16). Place i of 8 products holds product ``order[i]``."""
    *outer, deep, columns = values.shape
    wide = 16 // values.itemsize
    split = values.reshape(*outer, deep // DEEP, DEEP, columns)[..., list(order), :]
    matrices = split.reshape(*outer, deep // DEEP, DEEP // wide, wide, columns // CORE, CORE)
    return np.ascontiguousarray(np.moveaxis(matrices, -3, -1))
