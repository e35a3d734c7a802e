#ifndef RM_MMA_TF32
#define RM_MMA_TF32
// TA: the rows lie [unit][k] and are rounded already. RB: the columns still are to be.
template <int FM, int FN, int BK, int PA, int PB, bool TA, bool RB>
__device__ __forceinline__ void rm_multiply_tf32(const float *a, const float *b, float (&acc)[FM][FN][4]) {
  static_assert(BK % 8 == 0 && (!TA || PA % 8 == 4), "whole instructions, rows of an odd number of 16 bytes");
#pragma unroll
  for (int k = 0; k < BK; k += 8) {
    unsigned x[FM][4];
#pragma unroll
    for (int i = 0; i < FM; ++i) {
      if (TA) { rm_words4(x[i], a + k + i * 16 * PA); continue; }
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = rm_tf32<true>(a[(k + e / 2 * 4) * PA + i * 16 + e % 2 * 8]);
    }
#pragma unroll
    for (int j = 0; j < FN; ++j) {
      unsigned y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) y[e] = rm_tf32<RB>(b[(k + e * 4) * PB + j * 8]);
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma(acc[i][j], x[i], y);
    }
  }
}
#endif
