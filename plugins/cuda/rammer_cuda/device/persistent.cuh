// What the persistent kernel's blocks do with counters, words and their rows of the table.
struct rm_control { unsigned @control@; };
struct rm_walk {
  const unsigned *entries; unsigned *counters; rm_control *control; unsigned long long limit; unsigned epoch;
};
__device__ __forceinline__ unsigned rm_acquire(const unsigned *from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void rm_release(unsigned *to) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(to) : "memory");
}
__device__ __forceinline__ unsigned long long rm_now() {
  unsigned long long value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
// Start copying an entry of the table into shared memory.
__device__ __forceinline__ void rm_fetch(const rm_walk &walk, unsigned *to, int at) {
  if (threadIdx.x < @words@ / @copy@) {
    const unsigned shared = (unsigned)__cvta_generic_to_shared(to + threadIdx.x * @copy@);
    const unsigned *from = walk.entries + (size_t)at * @words@ + threadIdx.x * @copy@;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(from) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void rm_fetched() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
// Whether to stop waiting: another block gave up, or this one has waited too long. Notes where this row stopped.
__device__ __noinline__ bool rm_hopeless(const rm_walk &walk, unsigned long long &start, int order) {
  const unsigned long long now = rm_now();
  if (start == 0) start = now;
  if (!rm_acquire(&walk.control->aborted) && now - start <= walk.limit) return false;
  atomicExch(&walk.control->aborted, 1u);
  ((unsigned *)(walk.control + 1))[blockIdx.x] = order + 1;
  return true;
}
// One wait of a task, by one thread. False if it was in vain.
__device__ __forceinline__ bool rm_reached(const rm_walk &walk, unsigned counter, unsigned wanted, int order) {
  unsigned long long start = 0;
  for (;;) {
    for (int i = 0; i < @patience@; ++i)
      if ((int)(rm_acquire(walk.counters + counter * @line@u) - wanted) >= 0) return true;
    if (rm_hopeless(walk, start, order)) return false;
  }
}
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
  for (;;) {
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
    if (rm_hopeless(walk, start, order)) return false;
  }
}
__device__ __forceinline__ void rm_send(const rm_walk &walk, unsigned *words, int span, int at, float value) {
  unsigned *const to = words + at, word = __float_as_uint(value);
  if (word == @empty@u) word = 0x7fffffffu;  // another NaN
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to + (walk.epoch & 1u ? span : 0)), "r"(word) : "memory");
  to[walk.epoch & 1u ? 0 : span] = @empty@u;
}
// All waits of a task, by the whole block. True if the block must give up.
__device__ __forceinline__ bool rm_wait(const rm_walk &walk, const unsigned *entry, int order) {
  bool stuck = false;
  for (unsigned i = threadIdx.x; i < entry[1]; i += blockDim.x) {
    const unsigned *const wait = entry + @head@ + 3 * i;
    stuck = !rm_reached(walk, wait[0], walk.epoch * wait[2] + wait[1], order) || stuck;
  }
  return __syncthreads_or(stuck);
}
// Say that a task is done; the next entry is there when this returns.
__device__ __forceinline__ void rm_done(const rm_walk &walk, const unsigned *entry) {
  const bool signals = threadIdx.x < entry[2];
  const unsigned counter = signals ? entry[@signal_at@ + threadIdx.x] : 0u;
  rm_fetched();
  __syncthreads();
  if (signals) rm_release(walk.counters + counter * @line@u);
}
template <typename T> __device__ __forceinline__ T *rm_pointer(const unsigned *entry, int i) {
  return (T *)((const unsigned long long *)(entry + @pointer_at@))[i];
}
