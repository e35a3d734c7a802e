#ifndef RM_HALF
#define RM_HALF
__device__ __forceinline__ void rm_copy2(unsigned short *to, const unsigned short *from, bool valid) {
  unsigned short v = 0;
  if (valid) v = *from;
  *to = v;
}
__device__ __forceinline__ void rm_copy16(unsigned short *to, const unsigned short *from, bool valid) {
  rm_copy16((unsigned)__cvta_generic_to_shared(to), (const float *)from, valid);
}
// Four (or two) 8 x 8 blocks of float16; lane l of the first 8, 16 or 32 names row l % 8 of block l / 8.
template <bool TURN> __device__ __forceinline__ void rm_blocks4(unsigned (&r)[4], const unsigned short *at) {
  const unsigned s = (unsigned)__cvta_generic_to_shared(at);
  if (TURN)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s));
}
template <bool TURN> __device__ __forceinline__ void rm_blocks2(unsigned (&r)[4], const unsigned short *at) {
  const unsigned s = (unsigned)__cvta_generic_to_shared(at);
  if (TURN)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(s));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(s));
}
__device__ __forceinline__ void rm_mma_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// DA, DB: the operand lies [unit][k], else [k][unit].
template <int FM, int FN, int BK, int PA, int PB, bool DA, bool DB>
__device__ __forceinline__ void rm_multiply_f16(const unsigned short *a, const unsigned short *b, float (&acc)[FM][FN][4]) {
#pragma unroll
  for (int k = 0; k < BK; k += 16) {
    unsigned x[FM][4], y[(FN + 1) / 2][4];
#pragma unroll
    for (int i = 0; i < FM; ++i) rm_blocks4<!DA>(x[i], a + (DA ? k + i * 16 * PA : k * PA + i * 16));
#pragma unroll
    for (int j = 0; j < (FN + 1) / 2; ++j) {
      const unsigned short *const at = b + (DB ? k + j * 16 * PB : k * PB + j * 16);
      if (2 * j + 1 < FN) rm_blocks4<!DB>(y[j], at);
      else rm_blocks2<!DB>(y[j], at);
    }
#pragma unroll
    for (int j = 0; j < FN; ++j)
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma_f16(acc[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
  }
}
#endif
