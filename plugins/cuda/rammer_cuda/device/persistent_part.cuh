// Tasks of kernels that a launch of their own could run: where such a kernel would wait for others, its task waits for its counters.
// THREADS of a block compute it, at a barrier of their own where the block has more (METHOD 1), or each warp waits for itself
// where warps differ in what they do (METHOD 2).
#define RM_OWN_BARRIER 14  // warpgroups use the first ones and the last
template <int THREADS> __device__ __forceinline__ void rm_turn_meet() {
  static_assert(THREADS % 32 == 0, "whole warps");
  asm volatile("bar.sync %0, %1;" :: "n"(RM_OWN_BARRIER), "n"(THREADS) : "memory");
}
struct rm_turn { const rm_walk &walk; const unsigned *entry; int order; };
__device__ __forceinline__ bool rm_any(bool mine, int barrier, int threads) {
  unsigned any;
  asm volatile("{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\nbar.red.or.pred any, %2, %3, mine;\nselp.u32 %0, 1, 0, any;\n}"
               : "=r"(any) : "r"((unsigned)mine), "r"(barrier), "r"(threads) : "memory");
  return any;
}
template <int METHOD, int THREADS> __device__ __forceinline__ bool rm_ready(const rm_turn &turn) {
  const unsigned *const entry = turn.entry;
  if (entry[1]) {
    bool stuck = false;
    for (unsigned i = METHOD == 2 ? threadIdx.x % 32 : threadIdx.x; i < entry[1]; i += METHOD == 2 ? 32 : THREADS) {
      const unsigned *const wait = entry + @head@ + 3 * i;
      stuck = !rm_reached(turn.walk, wait[0], turn.walk.epoch * wait[2] + wait[1], turn.order) || stuck;
    }
    if (METHOD == 2 ? __any_sync(0xffffffffu, stuck) : METHOD == 1 ? rm_any(stuck, RM_OWN_BARRIER, THREADS) : __syncthreads_or(stuck)) return false;
  }
  RM_BEGIN(turn.order)
  return true;
}
// What rm_done does, where every thread says whether its part of the task was done. False if the block must give up.
__device__ __forceinline__ bool rm_done_if(const rm_walk &walk, const unsigned *entry, bool done) {
  const bool signals = threadIdx.x < entry[2];
  const unsigned counter = signals ? entry[@signal_at@ + threadIdx.x] : 0u;
  rm_fetched();
  if (!__syncthreads_and(done)) return false;
  if (signals) rm_release(walk.counters + counter * @line@u);
  return true;
}
