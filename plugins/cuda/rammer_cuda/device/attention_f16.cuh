#ifndef RM_PAIR
#define RM_PAIR
__device__ __forceinline__ unsigned rm_pair(float low, float high) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
#endif
#ifndef RM_ATTENTION16
#define RM_ATTENTION16
// The same as in attention_tf32x3: a warp's scores, packed in pairs, are the first operand of the second product.
// q, k and v: the row that this lane names to ldmatrix.
template <int FN, int DEPTH, int PQ, int PK>
__device__ __forceinline__ void rm_scores(const unsigned short *q, const unsigned short *k, float (&s)[FN][4]) {
  static_assert(DEPTH % 16 == 0 && FN % 2 == 0, "whole instructions");
#pragma unroll
  for (int d = 0; d < DEPTH; d += 16) {
    unsigned x[4], y[4];
    rm_blocks4<false>(x, q + d);
#pragma unroll
    for (int j = 0; j < FN; j += 2) {
      rm_blocks4<false>(y, k + j * 8 * PK + d);
      rm_mma_f16(s[j], x, y[0], y[1]);
      rm_mma_f16(s[j + 1], x, y[2], y[3]);
    }
  }
}
template <int FN, int NF, int PV>
__device__ __forceinline__ void rm_context(const float (&s)[FN][4], const unsigned short *v, float (&o)[NF][4]) {
  static_assert(FN % 2 == 0 && NF % 2 == 0 && PV % 16 == 8, "whole instructions, rows of an odd number of 16 bytes");
#pragma unroll
  for (int i = 0; i < FN; i += 2) {
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
