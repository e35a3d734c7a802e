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
  static_assert(LANES <= 32 && (LANES & (LANES - 1)) == 0, "lanes of a warp trade halves");
  return rm_folder<N, LANES / 2>::fold(v, lane, 0, N);
}
// Adds the products of a lane's weights w, SHARE of each of EACH columns, with its part of every row's vector.
template <int ROWS, int EACH, int SHARE, int DEPTH, int LANES, int HELD>
__device__ __forceinline__ void rm_multiply_held(const float *own, const float (&w)[HELD], float (&sum)[EACH * ROWS]) {
  static_assert(SHARE % 4 == 0 && SHARE * LANES == DEPTH && EACH * SHARE <= HELD, "16 bytes at a time, and whole columns");
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int i = 0; i < SHARE / 4; ++i) {
      const float4 x = *(const float4 *)(own + r * DEPTH + i * (LANES * 4));
#pragma unroll
      for (int c = 0; c < EACH; ++c) {
        const float *const y = w + (c * (SHARE / 4) + i) * 4;
        float &s = sum[r * EACH + c];
        s = fmaf(x.x, y[0], s); s = fmaf(x.y, y[1], s); s = fmaf(x.z, y[2], s); s = fmaf(x.w, y[3], s);
      }
    }
}
// Four values as floats: constants, or what other SMs may have written.
__device__ __forceinline__ float4 rm_fetch4(const float *from) { return __ldg((const float4 *)from); }
__device__ __forceinline__ float4 rm_four_halves(uint2 all) {
  return make_float4(rm_half(all.x), rm_half(all.x >> 16), rm_half(all.y), rm_half(all.y >> 16));
}
__device__ __forceinline__ float4 rm_fetch4(const unsigned short *from) { return rm_four_halves(__ldg((const uint2 *)from)); }
template <int W> struct __align__(4 * W) rm_vector { float at[W]; };
__device__ __forceinline__ void rm_read_at(const float *from, rm_vector<1> &value) { value.at[0] = __ldcg(from); }
__device__ __forceinline__ void rm_read_at(const float *from, rm_vector<4> &value) {
  *(float4 *)value.at = __ldcg((const float4 *)from);
}
__device__ __forceinline__ void rm_read_at(const unsigned short *from, rm_vector<1> &value) {
  const unsigned short half = __ldcg(from);
  value.at[0] = rm_load_f16(&half);
}
__device__ __forceinline__ void rm_read_at(const unsigned short *from, rm_vector<4> &value) {
  *(float4 *)value.at = rm_four_halves(__ldcg((const uint2 *)from));
}
template <class T, int W, int N>
__device__ __forceinline__ void rm_read(const T *from, const int (&at)[N], rm_vector<W> (&value)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) rm_read_at(from + at[n], value[n]);
}
#endif
