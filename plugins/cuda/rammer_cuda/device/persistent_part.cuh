// Tasks of kernels that a launch of their own could run: where such a kernel would wait for others, its task waits for its counters.
// THREADS of a block compute it, at a barrier of their own where the block has more (METHOD 1), or each warp waits for itself
// where warps differ in what they do (METHOD 2). There the first warp that comes looks at the counters and tells the others: were all
// of them to look, those of a whole GPU would ask one line of its cache for a word at a time, and whoever signals would have to queue.
#define RM_OWN_BARRIER 14  // warpgroups use the first ones and the last
template <int THREADS> __device__ __forceinline__ void rm_turn_meet() {
  static_assert(THREADS % 32 == 0, "whole warps");
  asm volatile("bar.sync %0, %1;" :: "n"(RM_OWN_BARRIER), "n"(THREADS) : "memory");
}
// A thread's number, anew for each task: what follows from it would else be computed for all kernels when the rows begin, and kept in
// memory, since registers do not suffice.
template <int THREADS> __device__ __forceinline__ RmPart rm_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  __builtin_assume(x >= 0 && x < THREADS);
  return {x};
}
struct rm_turn { const rm_walk &walk; const unsigned *entry; int order; };
__device__ __forceinline__ bool rm_any(bool mine, int barrier, int threads) {
  unsigned any;
  asm volatile("{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\nbar.red.or.pred any, %2, %3, mine;\nselp.u32 %0, 1, 0, any;\n}"
               : "=r"(any) : "r"((unsigned)mine), "r"(barrier), "r"(threads) : "memory");
  return any;
}
__device__ __forceinline__ unsigned rm_hear() {
  unsigned value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"((unsigned)__cvta_generic_to_shared(&rm_told)) : "memory");
  return value;
}
__device__ __forceinline__ void rm_tell(unsigned value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" :: "r"((unsigned)__cvta_generic_to_shared(&rm_told)), "r"(value) : "memory");
}
template <int METHOD, int THREADS> __device__ __forceinline__ bool rm_ready(const rm_turn &turn) {
  const unsigned *const entry = turn.entry;
  if (entry[1]) {
    const unsigned number = turn.order + 1u, lane = threadIdx.x % 32;
    bool mine = true, stuck = false;
    if (METHOD == 2) mine = __shfl_sync(0xffffffffu, lane ? 0u : atomicExch(&rm_asked, number), 0) != number;
    for (unsigned i = METHOD == 2 ? lane : threadIdx.x; mine && i < entry[1]; i += METHOD == 2 ? 32 : THREADS) {
      const unsigned *const wait = entry + @head@ + 3 * i;
      stuck = !rm_reached(turn.walk, wait[0], turn.walk.epoch * wait[2] + wait[1], turn.order) || stuck;
    }
    if (METHOD == 2 && mine) {
      stuck = __any_sync(0xffffffffu, stuck);
      __syncwarp();
      if (lane == 0) rm_tell(2 * number + stuck);
    } else if (METHOD == 2) {
      unsigned told;
#pragma unroll 1
      do told = rm_hear(); while (told / 2 != number);
      stuck = told % 2;
    } else {
      stuck = METHOD == 1 ? rm_any(stuck, RM_OWN_BARRIER, THREADS) : __syncthreads_or(stuck);
    }
    if (stuck) return false;
  }
  RM_BEGIN(turn.order)
  return true;
}
// What rm_done does, where every thread says whether its part of the task was done. False if the block must give up.
template <int FIRST> __device__ __forceinline__ bool rm_done_if(const rm_walk &walk, const unsigned *entry, bool done) {
  const rm_signal signal = rm_signal_of<FIRST>(entry);
  rm_fetched();
  if (!__syncthreads_and(done)) return false;
  rm_say(walk, signal);
  return true;
}
