// Copies from global to shared memory by cp.async: zeros where an element is not valid.
#ifndef RM_COPIES
#define RM_COPIES
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
__device__ __forceinline__ void rm_copy2(unsigned short *to, const unsigned short *from, bool valid) {
  unsigned short v = 0;
  if (valid) v = *from;
  *to = v;
}
__device__ __forceinline__ void rm_copy16(unsigned short *to, const unsigned short *from, bool valid) {
  rm_copy16((unsigned)__cvta_generic_to_shared(to), (const float *)from, valid);
}
__device__ __forceinline__ void rm_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void rm_arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
#endif
