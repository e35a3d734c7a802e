// Products in bfloat16 with float32 sums; operands lie as float32 and are rounded (to nearest even) on their way to registers.
#ifndef RM_BF16
#define RM_BF16
__device__ __forceinline__ unsigned rm_pair_bf16(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ void rm_mma_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
#ifndef RM_MMA_BF16
#define RM_MMA_BF16
// Of 16 products lane t takes t, t + 4, t + 8 and t + 12 of both operands as the instruction's 2 t, 2 t + 1, 2 t + 8 and 2 t + 9:
// the same sum, and lanes read different banks.
template <int FM, int FN, int BK, int PA, int PB>
__device__ __forceinline__ void rm_multiply_bf16(const float *a, const float *b, float (&acc)[FM][FN][4]) {
  static_assert(BK % 16 == 0, "whole instructions");
#pragma unroll
  for (int k = 0; k < BK; k += 16) {
    unsigned x[FM][4], y[2];
#pragma unroll
    for (int i = 0; i < FM; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float *const at = a + (k + r / 2 * 8) * PA + i * 16 + r % 2 * 8;
        x[i][r] = rm_pair_bf16(at[0], at[4 * PA]);
      }
#pragma unroll
    for (int j = 0; j < FN; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) y[r] = rm_pair_bf16(b[(k + r * 8) * PB + j * 8], b[(k + r * 8 + 4) * PB + j * 8]);
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma_bf16(acc[i][j], x[i], y);
    }
  }
}
#endif
