#ifndef RM_WGMMA_@n@
#define RM_WGMMA_@n@
__device__ __forceinline__ void rm_wgmma@n@(float (&d)[@count@], const unsigned (&a)[4], unsigned long long b, int more) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %@last@, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n@n@k8.f32.tf32.tf32 {@results@}, {@operands@}, %@matrix@, p, 1, 1; }"
    : @outputs@ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
// One product each: sums stay on the tensor cores. ``a`` must not change until rm_warpgroup_wait().
template <int S> __device__ __forceinline__ void rm_products@n@(float (&d)[@count@], unsigned (&a)[S][4],
                                                             unsigned long long b) {
  static_assert(S > 0 && @n@ % 8 == 0 && @n@ <= 256, "whole instructions");
  rm_pin(a); rm_pin(d);
  rm_warpgroup_begin();
#pragma unroll
  for (int s = 0; s < S; ++s) rm_wgmma@n@(d, a[s], b + s * @step@, 1);
  rm_warpgroup_commit();
}
// Products of @n@ columns with all of an operand's registers: they run until rm_warpgroup_wait(). ``bulk`` and ``rest`` are
// the matrix' halves.
template <int S> __device__ __forceinline__ void rm_products@n@(float (&d)[@count@], unsigned (&big)[S][4],
                                                             unsigned (&small)[S][4], unsigned long long bulk,
                                                             unsigned long long rest) {
  rm_pin(big); rm_pin(small); rm_pin(d);
  rm_warpgroup_begin();
#pragma unroll
  for (int s = 0; s < S; ++s) rm_wgmma@n@(d, small[s], bulk + s * @step@, s > 0);
#pragma unroll
  for (int s = 0; s < S; ++s) rm_wgmma@n@(d, big[s], rest + s * @step@, 1);
#pragma unroll
  for (int s = 0; s < S; ++s) rm_wgmma@n@(d, big[s], bulk + s * @step@, 1);
  rm_warpgroup_commit();
}
#endif
