#ifndef RM_PIN_I32
#define RM_PIN_I32
template <int N> __device__ __forceinline__ void rm_pin(int (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i]) :: "memory");
}
#endif
#ifndef RM_WGMMA_@name@
#define RM_WGMMA_@name@
// ``STEP`` is how much further, in 16 bytes, the next instruction's products lie.
template <int S, int ASTEP, int BSTEP> __device__ __forceinline__ void rm_products_@name@(int (&d)[@count@],
    unsigned long long a, unsigned long long b) {
  static_assert(S > 0 && (@n@ % 16 == 0 || @n@ < 32) && @n@ % 8 == 0 && @n@ <= 256, "whole instructions");
  rm_warpgroup_begin();
#pragma unroll
  for (int s = 0; s < S; ++s)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %@last@, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n@n@k32.s32.@ta@.@tb@ {@results@}, %@first@, %@second@, p; }"
      : @outputs@ : "l"(a + s * ASTEP), "l"(b + s * BSTEP), "r"(1));
  rm_warpgroup_commit();
}
#endif
