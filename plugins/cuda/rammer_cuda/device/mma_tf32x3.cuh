// Three tf32 products for one of fp32: x = big + small to 21 bits, and small * small is below fp32's last bit.
#ifndef RM_MMA_TF32X3
#define RM_MMA_TF32X3
template <int FM, int FN, int BK, int PA, int PB>
__device__ __forceinline__ void rm_multiply_tf32x3(const float *a, const float *b, float (&acc)[FM][FN][4]) {
  static_assert(BK % 8 == 0, "whole instructions");
#pragma unroll
  for (int k = 0; k < BK; k += 8) {
    unsigned ab[FM][4], as[FM][4];
#pragma unroll
    for (int i = 0; i < FM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) rm_split(a[(k + e / 2 * 4) * PA + i * 16 + e % 2 * 8], ab[i][e], as[i][e]);
#pragma unroll
    for (int j = 0; j < FN; ++j) {
      unsigned bb[2], bs[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) rm_split(b[(k + e * 4) * PB + j * 8], bb[e], bs[e]);
      // Tensor cores truncate when they add, which would bias long sums of one sign: they add up 8 products only.
      float part[FM][4] = {};
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma(part[i], as[i], bb);
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma(part[i], ab[i], bs);
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma(part[i], ab[i], bb);
#pragma unroll
      for (int i = 0; i < FM; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] += part[i][e];
    }
  }
}
#endif
