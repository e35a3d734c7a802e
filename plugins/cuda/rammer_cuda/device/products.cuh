#ifndef RM_GEMM
#define RM_GEMM
__device__ __forceinline__ void rm_copy4(unsigned to, const float *from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
__device__ __forceinline__ void rm_copy16(unsigned to, const float *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void rm_copy4(float *to, const float *from, bool valid) {
  rm_copy4((unsigned)__cvta_generic_to_shared(to), from, valid);
}
__device__ __forceinline__ void rm_copy16(float *to, const float *from, bool valid) {
  rm_copy16((unsigned)__cvta_generic_to_shared(to), from, valid);
}
__device__ __forceinline__ void rm_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void rm_arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ float4 rm_peer(const float *mine, int rank) {
  unsigned at; float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void rm_cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void rm_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <int TM, int TN, int BM, int BN, int BK, int PA, int PB>
__device__ __forceinline__ void rm_multiply(const float *a, const float *b, float (&acc)[TM][TN]) {
#pragma unroll
  for (int k = 0; k < BK; ++k) {
    float x[TM], y[TN];
#pragma unroll
    for (int i = 0; i < TM; i += 4) *(float4 *)(x + i) = *(const float4 *)(a + k * PA + i / 4 * (BM / (TM / 4)));
#pragma unroll
    for (int j = 0; j < TN; j += 4) *(float4 *)(y + j) = *(const float4 *)(b + k * PB + j / 4 * (BN / (TN / 4)));
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(x[i], y[j], acc[i][j]);
  }
}
// Three tf32 products for one of fp32: x = big + small to 21 bits, and small * small is below fp32's last bit.
__device__ __forceinline__ void rm_split(float x, unsigned &big, unsigned &small) {
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(big) : "f"(x));
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(small) : "f"(x - __uint_as_float(big)));
}
__device__ __forceinline__ void rm_mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <int FM, int FN, int BK, int PA, int PB>
__device__ __forceinline__ void rm_multiply3(const float *a, const float *b, float (&acc)[FM][FN][4]) {
#pragma unroll
  for (int k = 0; k < BK; k += 8) {
    unsigned ab[FM][4], as[FM][4];
#pragma unroll
    for (int i = 0; i < FM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) rm_split(a[(k + e / 2 * 4) * PA + i * 16 + e % 2 * 8], ab[i][e], as[i][e]);
#pragma unroll
    for (int j = 0; j < FN; ++j) {
      unsigned bb[2], bs[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) rm_split(b[(k + e * 4) * PB + j * 8], bb[e], bs[e]);
      // Tensor cores truncate when they add, which would bias long sums of one sign: they add up 8 products only.
      float part[FM][4] = {};
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma(part[i], as[i], bb);
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma(part[i], ab[i], bs);
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma(part[i], ab[i], bb);
#pragma unroll
      for (int i = 0; i < FM; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] += part[i][e];
    }
  }
}
#endif
