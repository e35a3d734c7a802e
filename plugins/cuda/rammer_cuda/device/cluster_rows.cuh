// One value of every block of a cluster, each in its block's shared memory at the same place, and the barrier of them all.
#ifndef RM_CLUSTER_ROWS
#define RM_CLUSTER_ROWS
template <class T> __device__ __forceinline__ T rm_peer_value(const T *mine, int rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "one register, or two");
  unsigned at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(rank));
  union { T value; unsigned narrow; unsigned long long wide; } got;
  if (sizeof(T) == 4)
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(got.narrow) : "r"(at) : "memory");
  else
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(got.wide) : "r"(at) : "memory");
  return got.value;
}
__device__ __forceinline__ void rm_cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
