// A block a vEU, its row's runs one after another.
extern "C" __global__ void __launch_bounds__(@threads@, @blocks@) rm_persistent(const unsigned *entries, const int *rows,
    unsigned *counters, rm_control *control, unsigned long long limit) {
  extern __shared__ __align__(16) char rm_scratch[];
  __shared__ __align__(16) unsigned slots[@slots@][@words@];
  const rm_walk walk = {entries, counters, control, limit, rm_acquire(&control->epoch)};
  const rm_row row = {rows[blockIdx.x], rows[blockIdx.x + 1]};
  if (row.begin < row.end) {
    rm_fetch(walk, slots[0], row.begin);
    rm_fetched();
  }
  if (threadIdx.x == 0) rm_asked = rm_told = 0;
  __syncthreads();
  bool alive = true;
  for (int first = row.begin, slot = 0; first < row.end && alive;) {
    const unsigned run = slots[slot][3];
    const int count = (int)(run >> @kernel_bits@);
    switch (run & ((1u << @kernel_bits@) - 1u)) {
@cases@
    }
    first += count;
    slot = (slot + count) % @slots@;
  }
  __syncthreads();
  // The last block to finish starts the next epoch; the end of the launch orders that before the next run.
  if (threadIdx.x == 0 && atomicAdd(&control->finished, 1u) == gridDim.x - 1) {
    control->finished = 0;
    control->epoch = walk.epoch + 1;
  }
}
