#ifndef RM_MMA_F16
#define RM_MMA_F16
// DA, DB: the operand lies [unit][k], else [k][unit].
template <int FM, int FN, int BK, int PA, int PB, bool DA, bool DB>
__device__ __forceinline__ void rm_multiply_f16(const unsigned short *a, const unsigned short *b, float (&acc)[FM][FN][4]) {
  static_assert(BK % 16 == 0 && PA % 16 == 8 && PB % 16 == 8, "whole instructions, rows of an odd number of 16 bytes");
#pragma unroll
  for (int k = 0; k < BK; k += 16) {
    unsigned x[FM][4], y[(FN + 1) / 2][4];
#pragma unroll
    for (int i = 0; i < FM; ++i) rm_blocks4<!DA>(x[i], a + (DA ? k + i * 16 * PA : k * PA + i * 16));
#pragma unroll
    for (int j = 0; j < (FN + 1) / 2; ++j) {
      const unsigned short *const at = b + (DB ? k + j * 16 * PB : k * PB + j * 16);
      if (2 * j + 1 < FN) rm_blocks4<!DB>(y[j], at);
      else rm_blocks2<!DB>(y[j], at);
    }
#pragma unroll
    for (int j = 0; j < FN; ++j)
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma_f16(acc[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
  }
}
// The same for rows of the first operand that lie anywhere: this lane names row ``rows[i]`` of fragment i.
template <int FM, int FN, int BK, int PB, bool DB>
__device__ __forceinline__ void rm_multiply_rows_f16(const unsigned short *a, const int (&rows)[FM], const unsigned short *b,
                                                     float (&acc)[FM][FN][4]) {
  static_assert(BK % 16 == 0 && PB % 16 == 8, "whole instructions, rows of an odd number of 16 bytes");
#pragma unroll
  for (int k = 0; k < BK; k += 16) {
    unsigned x[FM][4], y[(FN + 1) / 2][4];
#pragma unroll
    for (int i = 0; i < FM; ++i) rm_blocks4<false>(x[i], a + rows[i] + k);
#pragma unroll
    for (int j = 0; j < (FN + 1) / 2; ++j) {
      const unsigned short *const at = b + (DB ? k + j * 16 * PB : k * PB + j * 16);
      if (2 * j + 1 < FN) rm_blocks4<!DB>(y[j], at);
      else rm_blocks2<!DB>(y[j], at);
    }
#pragma unroll
    for (int j = 0; j < FN; ++j)
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma_f16(acc[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
  }
}
#endif
