#ifndef RM_I8
#define RM_I8
// A warp's products of bytes, exact: SA and SB say whether those of an operand have signs.
template <bool SA, bool SB>
__device__ __forceinline__ void rm_mma_i8(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define RM_OF(A, B) \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." A "." B ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if (SA && SB) RM_OF("s8", "s8");
  else if (SA) RM_OF("s8", "u8");
  else if (SB) RM_OF("u8", "s8");
  else RM_OF("u8", "u8");
#undef RM_OF
}
#endif
#ifndef RM_MMA_I8
#define RM_MMA_I8
// Both operands lie [unit][k].
template <int FM, int FN, int BK, int PA, int PB, bool SA, bool SB>
__device__ __forceinline__ void rm_multiply_i8(const unsigned char *a, const unsigned char *b, int (&acc)[FM][FN][4]) {
  static_assert(BK % 32 == 0 && PA % 32 == 16 && PB % 32 == 16, "whole instructions, rows of an odd number of 16 bytes");
#pragma unroll
  for (int k = 0; k < BK; k += 32) {
    unsigned x[FM][4], y[(FN + 1) / 2][4];
#pragma unroll
    for (int i = 0; i < FM; ++i) rm_blocks4<false>(x[i], (const unsigned short *)(a + k + i * 16 * PA));
#pragma unroll
    for (int j = 0; j < (FN + 1) / 2; ++j) {
      const unsigned short *const at = (const unsigned short *)(b + k + j * 16 * PB);
      if (2 * j + 1 < FN) rm_blocks4<false>(y[j], at);
      else rm_blocks2<false>(y[j], at);
    }
#pragma unroll
    for (int j = 0; j < FN; ++j)
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma_i8<SA, SB>(acc[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
  }
}
#endif
