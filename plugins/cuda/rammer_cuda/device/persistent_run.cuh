// The entries of one run, by one function: what it holds on chip stays valid.
__device__ __noinline__ bool run_@name@(const rm_walk &walk, unsigned (*slots)[@words@], int first, int count, int begin,
                                        char *scratch) {
  static_assert(@slots@ > 2, "slow warps may still read the entry before");
  rm_fetch(walk, slots[0], first);
  rm_fetched();
  __syncthreads();
  @hold@
  for (int i = 0, slot = 0; i < count; ++i) {
    unsigned *const entry = slots[slot];
    slot = slot == @slots@ - 1 ? 0 : slot + 1;
    if (i + 1 < count) rm_fetch(walk, slots[slot], first + i + 1);
    if (entry[1] && rm_wait(walk, entry, first + i - begin)) return false;
    RM_BEGIN(first + i - begin)
    @step@
  }
  __syncthreads();
  return true;
}
