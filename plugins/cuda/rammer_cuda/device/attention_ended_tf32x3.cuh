#ifndef RM_ATTENTION3_ENDED
#define RM_ATTENTION3_ENDED
// The same where a run has keys in the first ``count`` fragments of a warp alone.
template <int FN, int DEPTH, int PQ, int PK>
__device__ __forceinline__ void rm_scores(const float *q, const float *k, float (&s)[FN][4], int count) {
  static_assert(DEPTH % 8 == 0, "whole instructions");
#pragma unroll (FN > 4 ? 1 : DEPTH / 8)
  for (int d = 0; d < DEPTH; d += 8) {
    unsigned ab[4], as[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) rm_split(q[e % 2 * 8 * PQ + d + e / 2 * 4], ab[e], as[e]);
#pragma unroll
    for (int j = 0; j < FN; ++j) {
      if (j >= count) continue;
      unsigned bb[2], bs[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) rm_split(k[j * 8 * PK + d + e * 4], bb[e], bs[e]);
      float part[4] = {};
      rm_mma(part, as, bb);
      rm_mma(part, ab, bs);
      rm_mma(part, ab, bb);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] += part[e];
    }
  }
}
template <int FN, int NF, int PV>
__device__ __forceinline__ void rm_context(const float (&s)[FN][4], const float *v, float (&o)[NF][4], int count) {
#pragma unroll
  for (int i = 0; i < FN; ++i) {
    if (i >= count) continue;
    unsigned ab[4], as[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) rm_split(s[i][e / 2 + e % 2 * 2], ab[e], as[e]);
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      unsigned bb[2], bs[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) rm_split(v[(i * 8 + e) * PV + j * 8], bb[e], bs[e]);
      float part[4] = {};
      rm_mma(part, as, bb);
      rm_mma(part, ab, bs);
      rm_mma(part, ab, bb);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[j][e] += part[e];
    }
    if (FN > 4) asm volatile("" ::: "memory");
  }
}
#endif
