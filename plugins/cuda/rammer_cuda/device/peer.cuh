// One-sided writes between GPUs. A launch carries out entries of a table, each by blocks of its own: payloads with a flag behind
// them, credits, waits. Flags and credits are numbers of runs, which only grow; each end of a transfer counts its own runs, so a
// launch may stand in a graph. Numbers and fields are those of rammer_cuda.peer.entries.
struct rm_entry { unsigned long long @long@; unsigned @short@; };
struct rm_entries { rm_entry entry[@most@]; };
struct rm_failure { unsigned @failure@; };
#ifndef RM_PEER_HOST
__device__ __forceinline__ unsigned rm_peer_get(const unsigned *from) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ unsigned rm_peer_read(const unsigned *from) {
  unsigned value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// Behind the fence of rm_peer_last, which makes it a release.
__device__ __forceinline__ void rm_peer_set(unsigned *to, unsigned value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(to), "r"(value) : "memory");
}
// All that this block read and wrote is over before whatever follows. Says whether all other blocks of the entry got here before.
__device__ __forceinline__ bool rm_peer_last(unsigned *arrived, unsigned blocks) {
  __threadfence_system();
  if (blocks == 1u) return true;
  if (atomicAdd(arrived, 1u) != blocks - 1u) return false;
  *arrived = 0u;
  __threadfence_system();
  return true;
}
__device__ __forceinline__ bool rm_peer_first(unsigned *failed) { return atomicExch(failed, 1u) == 0u; }
__device__ __forceinline__ unsigned long long rm_peer_now() {
  unsigned long long value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}
#endif
// One thread waits until a word has reached a number. False where it gives up, or another one did; the first says why.
__device__ __forceinline__ bool rm_peer_reached(const unsigned *word, unsigned wanted, const rm_entry &e, rm_failure *failure,
    unsigned long long limit, unsigned long long *waited) {
  unsigned long long start = 0;
  for (;;) {
    unsigned seen = 0;
    for (int i = 0; i < @patience@; ++i) {
      seen = rm_peer_get(word);
      if ((int)(seen - wanted) < 0) continue;
      if (start && waited) *waited += rm_peer_now() - start;
      return true;
    }
    const unsigned long long now = rm_peer_now();
    if (start == 0) start = now;
    if (rm_peer_read(&failure->failed)) return false;
    if (now - start <= limit) continue;
    if (rm_peer_first(&failure->failed)) {
      failure->kind = e.kind; failure->name = e.name; failure->wanted = wanted; failure->seen = seen;
    }
    return false;
  }
}
// The part of one block, of 16 bytes a thread; the last bytes one by one. Of a small payload each thread has read its vector.
__device__ __forceinline__ void rm_peer_copy(const rm_entry &e, unsigned block, bool small, const uint4 &held) {
  const uint4 *const from = (const uint4 *)e.from;
  uint4 *const to = (uint4 *)e.to;
  const unsigned long long n = e.bytes / 16u, step = (unsigned long long)e.blocks * blockDim.x;
  unsigned long long i = (unsigned long long)block * blockDim.x + threadIdx.x;
  if (small && i < n) { to[i] = held; i += step; }
  for (; i + 3u * step < n; i += 4u * step) {
    uint4 value[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) value[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < 4; ++k) to[i + k * step] = value[k];
  }
  for (; i < n; i += step) to[i] = from[i];
  if (block == 0u)
    for (unsigned long long k = n * 16u + threadIdx.x; k < e.bytes; k += blockDim.x)
      ((unsigned char *)e.to)[k] = ((const unsigned char *)e.from)[k];
}
// Entries are a parameter, which no block has to fetch; what they need of memory is asked for at once.
extern "C" __global__ void __launch_bounds__(@threads@) rm_exchange(const __grid_constant__ rm_entries all, rm_failure *failure,
    unsigned long long limit) {
  rm_after();
  int at = 0;
  while (blockIdx.x >= all.entry[at].first + all.entry[at].blocks) ++at;
  const rm_entry &e = all.entry[at];
  const unsigned block = blockIdx.x - e.first;
  unsigned *const count = (unsigned *)e.count;
  const unsigned long long place = (unsigned long long)block * blockDim.x + threadIdx.x;
  const bool small = e.bytes <= 16ull * e.blocks * blockDim.x;
  uint4 held = {0u, 0u, 0u, 0u};
  if (small && place < e.bytes / 16u) held = ((const uint4 *)e.from)[place];
  __shared__ unsigned number, go;
  if (threadIdx.x == 0) {
    const bool waits = e.kind == @wait@u, asks = e.kind == @put@u || e.kind == @room@u;
    const unsigned *const word = (const unsigned *)(waits ? e.flag : asks ? e.credit : 0ull);
    const unsigned before = rm_peer_read(count), failed = rm_peer_read(&failure->failed), seen = word ? rm_peer_get(word) : 0u;
    const unsigned wanted = before + 1u - (waits ? 0u : e.depth);
    number = before + 1u;
    unsigned long long *const waited = block == 0u ? (unsigned long long *)(count + 2) : nullptr;
    go = !failed && (!word || (int)(seen - wanted) >= 0 || rm_peer_reached(word, wanted, e, failure, limit, waited));
  }
  __syncthreads();
  if (!go) return;
  if (e.kind == @put@u) rm_peer_copy(e, block, small, held);
  __syncthreads();
  if (threadIdx.x != 0 || e.kind == @room@u) return;
  if (e.kind == @wait@u) { *count = number; return; }
  if (!rm_peer_last(count + 1, e.blocks)) return;
  *count = number;
  rm_peer_set((unsigned *)e.flag, number);
}
