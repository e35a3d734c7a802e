// A block a vEU, its row's runs one after another.
extern "C" __global__ void __launch_bounds__(@threads@, 1) rm_persistent(const unsigned *entries, const int3 *runs,
    const int *rows, unsigned *counters, rm_control *control, unsigned long long limit) {
  extern __shared__ __align__(16) char rm_scratch[];
  __shared__ __align__(16) unsigned slots[@slots@][@words@];
  const rm_walk walk = {entries, counters, control, limit, rm_acquire(&control->epoch)};
  bool alive = true;
  for (int r = rows[blockIdx.x], end = rows[blockIdx.x + 1], begin = r < end ? runs[r].y : 0; r < end && alive; ++r) {
    const int3 run = runs[r];
    switch (run.x) {
@cases@
    }
  }
  __syncthreads();
  // The last block to finish starts the next epoch; the end of the launch orders that before the next run.
  if (threadIdx.x == 0 && atomicAdd(&control->finished, 1u) == gridDim.x - 1) {
    control->finished = 0;
    control->epoch = walk.epoch + 1;
  }
}
