// Copies of four float16 by cp.async.
#ifndef RM_COPIES_F16
#define RM_COPIES_F16
__device__ __forceinline__ void rm_copy8(unsigned short *to, const unsigned short *from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
    :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(valid ? 8 : 0) : "memory");
}
#endif
