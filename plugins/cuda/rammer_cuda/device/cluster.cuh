// Blocks of a cluster: four elements of another one's shared memory, the barrier between them, and sums over all of them.
#ifndef RM_CLUSTER
#define RM_CLUSTER
__device__ __forceinline__ float4 rm_peer(const float *mine, int rank) {
  unsigned at; float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void rm_cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void rm_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void rm_add(float4 &sum, const float4 v) { sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w; }
// Add up the slices of the same sums, SIZE elements each, in this block's memory.
template <int SLICES, int SIZE, int THREADS> __device__ __forceinline__ void rm_gather_slices(float *shared, int tid) {
  static_assert(SLICES > 1 && SIZE % 4 == 0, "16 bytes at a time");
#pragma unroll 1
  for (int e = tid * 4; e < SIZE; e += THREADS * 4) {
    float4 sum = *(float4 *)(shared + e);
#pragma unroll
    for (int q = 1; q < SLICES; ++q) rm_add(sum, *(const float4 *)(shared + q * SIZE + e));
    *(float4 *)(shared + e) = sum;
  }
}
// Add up rows low to high over the memories of all of the cluster, in the order of ranks, into this block's: nobody else reads
// these rows here. All blocks have arrived before.
template <int BLOCKS, int LINE, int THREADS>
__device__ __forceinline__ void rm_gather_blocks(float *shared, int tid, int low, int high) {
  static_assert(BLOCKS > 1 && LINE % 4 == 0, "16 bytes at a time");
  rm_cluster_wait();
  for (int e = low * (LINE / 4) + tid; e < high * (LINE / 4); e += THREADS) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < BLOCKS; ++r) rm_add(sum, rm_peer(shared + e * 4, r));
    *(float4 *)(shared + e * 4) = sum;
  }
  rm_cluster_arrive();
  __syncthreads();
}
#endif
