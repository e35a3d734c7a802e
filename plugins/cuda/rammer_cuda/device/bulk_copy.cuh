#ifndef RM_CHAIN
#define RM_CHAIN
__device__ __forceinline__ void rm_bulk(unsigned to, const float *from, int bytes, unsigned at) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(at) : "memory");
}
#endif
