// What the persistent kernel's blocks do with counters and their rows of the table.
static_assert(@words@ % @copy@ == 0 && @copy@ == 4, "entries are copied 16 bytes at a time");
static_assert(@pointer_at@ % 2 == 0, "pointers are two words each");
struct rm_control { unsigned @control@; };
struct rm_walk {
  const unsigned *entries; unsigned *counters; rm_control *control; unsigned long long limit; unsigned epoch;
};
struct rm_row { int begin, end; };  // its entries
// Of the entry whose counters a warp of several looks at: its number from 1; and, when it has, twice that, and 1 if in vain.
__shared__ unsigned rm_asked, rm_told;
__device__ __forceinline__ unsigned rm_acquire(const unsigned *from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void rm_release(unsigned *to, unsigned tasks) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" :: "l"(to), "r"(tasks) : "memory");
}
__device__ __forceinline__ unsigned long long rm_now() {
  unsigned long long value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
// Start copying an entry of the table into shared memory.
__device__ __forceinline__ void rm_fetch(const rm_walk &walk, unsigned *to, int at) {
  if (threadIdx.x < @words@ / @copy@) {
#if __CUDA_ARCH__ < 800
    *(uint4 *)(to + threadIdx.x * @copy@) = *(const uint4 *)(walk.entries + (size_t)at * @words@ + threadIdx.x * @copy@);
#else
    const unsigned shared = (unsigned)__cvta_generic_to_shared(to + threadIdx.x * @copy@);
    const unsigned *from = walk.entries + (size_t)at * @words@ + threadIdx.x * @copy@;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(from) : "memory");
#endif
  }
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ void rm_fetched() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}
// When a wait began (0: it has just begun); 0 if it is to stop, since another block gave up or this one has waited too long. Notes
// where this row stopped. A call of its own, by values, so that whoever waits keeps all it has in registers.
__device__ __noinline__ unsigned long long rm_hopeful(rm_control *control, unsigned long long limit, unsigned long long start,
                                                      int order) {
  const unsigned long long now = rm_now();
  if (start == 0) start = now;
  if (!rm_acquire(&control->aborted) && now - start <= limit) return start;
  atomicExch(&control->aborted, 1u);
  ((unsigned *)(control + 1))[blockIdx.x] = order + 1;
  return 0;
}
// One wait of a task, by one thread. False if it was in vain.
__device__ __forceinline__ bool rm_reached(const rm_walk &walk, unsigned counter, unsigned wanted, int order) {
  const unsigned *const at = walk.counters + counter * @line@u;
  unsigned long long start = 0;
#pragma unroll 1
  do {
#pragma unroll 1
    for (int i = 0; i < @patience@; ++i)
      if ((int)(rm_acquire(at) - wanted) >= 0) return true;
    start = rm_hopeful(walk.control, walk.limit, start, order);
  } while (start != 0);
  return false;
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
// What a task says when it is done, by the warp of thread FIRST: until it is seen everywhere that warp does nothing else. So it is none
// that the next task needs at once, to fetch entries or constants, or to look at counters.
#define RM_SAYS 96  // of a product's warps, one that multiplies
struct rm_signal { bool mine; unsigned counter, tasks; };
template <int FIRST = RM_SAYS> __device__ __forceinline__ rm_signal rm_signal_of(const unsigned *entry) {
  static_assert(@signals@ <= 32, "a warp says all of them");
  const unsigned number = threadIdx.x - FIRST;
  const bool mine = number < entry[2];
  const unsigned *const at = entry + @signal_at@ + 2 * number;
  return {mine, mine ? at[0] : 0u, mine ? at[1] : 0u};
}
__device__ __forceinline__ void rm_say(const rm_walk &walk, const rm_signal &signal) {
  if (signal.mine) rm_release(walk.counters + signal.counter * @line@u, signal.tasks);
}
// Say that a task is done; the next entry is there when this returns.
__device__ __forceinline__ void rm_done(const rm_walk &walk, const unsigned *entry) {
  const rm_signal signal = rm_signal_of(entry);
  rm_fetched();
  __syncthreads();
  rm_say(walk, signal);
}
// Said to be global: the compiler knows that of a kernel's parameters, but not of what lies in memory.
template <typename T> __device__ __forceinline__ T *rm_pointer(const unsigned *entry, int i) {
  T *const pointer = (T *)((const unsigned long long *)(entry + @pointer_at@))[i];
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}
