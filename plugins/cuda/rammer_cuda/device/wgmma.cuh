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
// Producers, at the last named barrier.
template <int N> __device__ __forceinline__ void rm_producers_meet() { asm volatile("bar.sync 15, %0;" :: "n"(N) : "memory"); }
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
// What this thread has copied so far arrives by itself.
__device__ __forceinline__ void rm_copies_arrive(unsigned at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at) : "memory");
}
__device__ __forceinline__ void rm_barrier_wait(unsigned at, int parity) {
  asm volatile("{ .reg .pred done;\n"
    "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
    "@done bra left;\n bra again;\n left: }" :: "r"(at), "r"(parity) : "memory");
}
#endif
