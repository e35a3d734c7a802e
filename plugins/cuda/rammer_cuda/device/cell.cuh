#ifndef RM_CELL
#define RM_CELL
// Adds up N values over LANES lanes: lanes trade halves until each has one value, whose number rm_fold returns, or -1 where
// another lane has it. N + log2(LANES) exchanges instead of N * log2(LANES), always in the same order.
template <int N, int OFFSET> struct rm_folder {
  static __device__ __forceinline__ int fold(float *v, int lane, int first, int limit) {
    constexpr int H = (N + 1) / 2;
    const bool upper = lane & OFFSET;
#pragma unroll
    for (int i = 0; i < H; ++i) {
      const float high = i + H < N ? v[i + H] : 0.0f;
      const float give = N == 1 ? v[0] : upper ? v[i] : high;
      const float mine = N == 1 ? v[0] : upper ? high : v[i];
      v[i] = mine + __shfl_xor_sync(0xffffffff, give, OFFSET);
    }
    if (N > 1) { first += upper ? H : 0; limit = upper ? limit - H : min(limit, H); }
    else if (upper) limit = 0;
    return rm_folder<H, OFFSET / 2>::fold(v, lane, first, limit);
  }
};
template <int N> struct rm_folder<N, 0> {
  static __device__ __forceinline__ int fold(float *v, int lane, int first, int limit) {
    static_assert(N == 1, "more values than lanes");
    return limit > 0 ? first : -1;
  }
};
template <int N, int LANES> __device__ __forceinline__ int rm_fold(float *v, int lane) {
  return rm_folder<N, LANES / 2>::fold(v, lane, 0, N);
}
template <int W> struct __align__(4 * W) rm_vector { float at[W]; };
template <int N> __device__ __forceinline__ void rm_read(const float *from, const int (&at)[N], rm_vector<1> (&value)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) value[n].at[0] = __ldcg(from + at[n]);
}
template <int N> __device__ __forceinline__ void rm_read(const float *from, const int (&at)[N], rm_vector<4> (&value)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) *(float4 *)value[n].at = __ldcg((const float4 *)(from + at[n]));
}
#endif
