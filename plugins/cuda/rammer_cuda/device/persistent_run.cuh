// The entries of one run, by one function: what it holds on chip stays valid. While it works on one entry the next is copied, be it
// of the next run.
__device__ @call@ bool run_@name@(const rm_walk walk, unsigned (*slots)[@words@], const rm_row row, int first, int slot, int count,
                                        char *scratch) {
  static_assert(@slots@ > 2, "slow warps may still read the entry before");
  @hold@
  for (int i = 0; i < count; ++i) {
    unsigned *const entry = slots[slot];
    slot = slot == @slots@ - 1 ? 0 : slot + 1;
    if (first + i + 1 < row.end) rm_fetch(walk, slots[slot], first + i + 1);
    @step@
  }
  @after@
  return true;
}
