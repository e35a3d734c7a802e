// What the persistent kernel's blocks do with counters and their rows of the table.
static_assert(@words@ % @copy@ == 0 && @copy@ == 4, "entries are copied 16 bytes at a time");
static_assert(@pointer_at@ % 2 == 0, "pointers are two words each");
struct rm_control { unsigned @control@; };
struct rm_walk {
  const unsigned *entries; unsigned *counters; rm_control *control; unsigned long long limit; unsigned epoch;
};
struct rm_row { int begin, end; };  // its entries
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
