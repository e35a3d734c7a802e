// A barrier of the first THREADS threads of a block, whole warps.
#ifndef RM_PART_MEET
#define RM_PART_MEET
template <int THREADS> __device__ __forceinline__ void rm_part_meet() {
  static_assert(THREADS % 32 == 0, "whole warps");
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
#endif
