// Sums of integers over a cluster, as those of floats.
#ifndef RM_CLUSTER_I32
#define RM_CLUSTER_I32
__device__ __forceinline__ int4 rm_peer(const int *mine, int rank) {
  unsigned at; int4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void rm_add(int4 &sum, const int4 v) { sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w; }
template <int SLICES, int SIZE, int THREADS> __device__ __forceinline__ void rm_gather_slices(int *shared, int tid) {
  static_assert(SLICES > 1 && SIZE % 4 == 0, "16 bytes at a time");
#pragma unroll 1
  for (int e = tid * 4; e < SIZE; e += THREADS * 4) {
    int4 sum = *(int4 *)(shared + e);
#pragma unroll
    for (int q = 1; q < SLICES; ++q) rm_add(sum, *(const int4 *)(shared + q * SIZE + e));
    *(int4 *)(shared + e) = sum;
  }
}
template <int BLOCKS, int LINE, int THREADS>
__device__ __forceinline__ void rm_gather_blocks(int *shared, int tid, int low, int high) {
  static_assert(BLOCKS > 1 && LINE % 4 == 0, "16 bytes at a time");
  rm_cluster_wait();
  for (int e = low * (LINE / 4) + tid; e < high * (LINE / 4); e += THREADS) {
    int4 sum = make_int4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < BLOCKS; ++r) rm_add(sum, rm_peer(shared + e * 4, r));
    *(int4 *)(shared + e * 4) = sum;
  }
  rm_cluster_arrive();
  __syncthreads();
}
#endif
