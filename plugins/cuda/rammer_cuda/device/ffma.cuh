// A thread's TM x TN results of BK products; rows of the operands have PA and PB elements.
#ifndef RM_FFMA
#define RM_FFMA
template <int TM, int TN, int BM, int BN, int BK, int PA, int PB>
__device__ __forceinline__ void rm_multiply(const float *a, const float *b, float (&acc)[TM][TN]) {
  static_assert(TM % 4 == 0 && TN % 4 == 0 && BM % (TM / 4) == 0 && BN % (TN / 4) == 0, "16 bytes at a time");
#pragma unroll
  for (int k = 0; k < BK; ++k) {
    float x[TM], y[TN];
#pragma unroll
    for (int i = 0; i < TM; i += 4) *(float4 *)(x + i) = *(const float4 *)(a + k * PA + i / 4 * (BM / (TM / 4)));
#pragma unroll
    for (int j = 0; j < TN; j += 4) *(float4 *)(y + j) = *(const float4 *)(b + k * PB + j / 4 * (BN / (TN / 4)));
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(x[i], y[j], acc[i][j]);
  }
}
#endif
