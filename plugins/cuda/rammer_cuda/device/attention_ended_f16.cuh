#ifndef RM_ATTENTION16_ENDED
#define RM_ATTENTION16_ENDED
// The same where a run has keys in the first ``count`` fragments of a warp alone, an even number.
template <int FN, int DEPTH, int PQ, int PK>
__device__ __forceinline__ void rm_scores(const unsigned short *q, const unsigned short *k, float (&s)[FN][4], int count) {
  static_assert(DEPTH % 16 == 0 && FN % 2 == 0, "whole instructions");
#pragma unroll
  for (int d = 0; d < DEPTH; d += 16) {
    unsigned x[4], y[4];
    rm_blocks4<false>(x, q + d);
#pragma unroll
    for (int j = 0; j < FN; j += 2) {
      if (j >= count) continue;
      rm_blocks4<false>(y, k + j * 8 * PK + d);
      rm_mma_f16(s[j], x, y[0], y[1]);
      rm_mma_f16(s[j + 1], x, y[2], y[3]);
    }
  }
}
template <int FN, int NF, int PV>
__device__ __forceinline__ void rm_context(const float (&s)[FN][4], const unsigned short *v, float (&o)[NF][4], int count) {
  static_assert(FN % 2 == 0 && NF % 2 == 0 && PV % 16 == 8, "whole instructions, rows of an odd number of 16 bytes");
#pragma unroll
  for (int i = 0; i < FN; i += 2) {
    if (i >= count) continue;
    unsigned y[4];
    const unsigned x[4] = {rm_pair(s[i][0], s[i][1]), rm_pair(s[i][2], s[i][3]),
                           rm_pair(s[i + 1][0], s[i + 1][1]), rm_pair(s[i + 1][2], s[i + 1][3])};
#pragma unroll
    for (int j = 0; j < NF; j += 2) {
      rm_blocks4<true>(y, v + i * 8 * PV + j * 8);
      rm_mma_f16(o[j], x, y[0], y[1]);
      rm_mma_f16(o[j + 1], x, y[2], y[3]);
    }
  }
}
#endif
