// Copies of bytes from global to shared memory, by cp.async where there are four or more; where an element is not valid, ``fill``.
#ifndef RM_COPIES_I8
#define RM_COPIES_I8
__device__ __forceinline__ void rm_copy1(unsigned char *to, const unsigned char *from, bool valid, unsigned fill = 0) {
  unsigned char v = (unsigned char)fill;
  if (valid) v = *from;
  *to = v;
}
__device__ __forceinline__ void rm_copy4(unsigned char *to, const unsigned char *from, bool valid) {
  rm_copy4((unsigned)__cvta_generic_to_shared(to), (const float *)from, valid);
}
__device__ __forceinline__ void rm_copy8(unsigned char *to, const unsigned char *from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(valid ? 8 : 0) : "memory");
}
__device__ __forceinline__ void rm_copy16(unsigned char *to, const unsigned char *from, bool valid) {
  rm_copy16((unsigned)__cvta_generic_to_shared(to), (const float *)from, valid);
}
// ``fill`` has the same byte four times.
__device__ __forceinline__ void rm_copy4(unsigned char *to, const unsigned char *from, bool valid, unsigned fill) {
  if (valid) rm_copy4(to, from, true);
  else *(unsigned *)to = fill;
}
__device__ __forceinline__ void rm_copy8(unsigned char *to, const unsigned char *from, bool valid, unsigned fill) {
  if (valid) rm_copy8(to, from, true);
  else *(uint2 *)to = make_uint2(fill, fill);
}
__device__ __forceinline__ void rm_copy16(unsigned char *to, const unsigned char *from, bool valid, unsigned fill) {
  if (valid) rm_copy16(to, from, true);
  else *(uint4 *)to = make_uint4(fill, fill, fill, fill);
}
#endif
