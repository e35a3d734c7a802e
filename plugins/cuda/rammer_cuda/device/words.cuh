// Values that are their own flags, for the kernels of cells: a word is a float, or @empty@ until its value is there. Of a tensor's
// two sets of words, a span apart, odd and even runs use one each; who sends a word empties that of the other set.
static_assert((@empty@u & 0x7fffffffu) > 0x7f800000u && @empty@u != 0x7fffffffu, "a NaN that no arithmetic gives");
__device__ __forceinline__ rm_vector<1> rm_peek(const unsigned *from, rm_vector<1> *) {
  unsigned a;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(a) : "l"(from) : "memory");
  return {{__uint_as_float(a)}};
}
__device__ __forceinline__ rm_vector<4> rm_peek(const unsigned *from, rm_vector<4> *) {
  unsigned a, b, c, d;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from) : "memory");
  return {{__uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d)}};
}
// Words at N places, W side by side at each, by one thread. False if they never came.
template <int N, int W> __device__ __forceinline__ bool rm_receive(const rm_walk &walk, const unsigned *words, int span,
    const int (&at)[N], rm_vector<W> (&value)[N], int order) {
  const unsigned *const from = words + (walk.epoch & 1u ? span : 0);
  unsigned long long start = 0;
#pragma unroll 1
  do {
    for (int i = 0; i < @patience@; ++i) {
      bool all = true;
#pragma unroll
      for (int n = 0; n < N; ++n) value[n] = rm_peek(from + at[n], (rm_vector<W> *)nullptr);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int w = 0; w < W; ++w) all = all && __float_as_uint(value[n].at[w]) != @empty@u;
      if (all) { RM_BEGIN(order) return true; }
    }
    start = rm_hopeful(walk.control, walk.limit, start, order);
  } while (start != 0);
  return false;
}
__device__ __forceinline__ void rm_send(const rm_walk &walk, unsigned *words, int span, int at, float value) {
  unsigned *const to = words + at, word = __float_as_uint(value);
  if (word == @empty@u) word = 0x7fffffffu;  // another NaN
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to + (walk.epoch & 1u ? span : 0)), "r"(word) : "memory");
  to[walk.epoch & 1u ? 0 : span] = @empty@u;
}
