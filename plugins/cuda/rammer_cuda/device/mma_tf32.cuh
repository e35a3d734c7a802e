#ifndef RM_TF32
#define RM_TF32
template <bool ROUND> __device__ __forceinline__ unsigned rm_tf32(float x) {
  unsigned r = __float_as_uint(x);
  if (ROUND) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
// A block of 8 x 4 words is one of 8 x 8 halfwords to ldmatrix, which leaves each lane the word that mma wants of it.
__device__ __forceinline__ void rm_words4(unsigned (&r)[4], const float *at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((unsigned)__cvta_generic_to_shared(at)));
}
// TA: the rows lie [unit][k] and are rounded already. RB: the columns still are to be.
template <int FM, int FN, int BK, int PA, int PB, bool TA, bool RB>
__device__ __forceinline__ void rm_multiply_tf32(const float *a, const float *b, float (&acc)[FM][FN][4]) {
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
