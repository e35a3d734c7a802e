// float16 in words: the one in the low bits as a float, and two floats as a word.
#ifndef RM_HALVES
#define RM_HALVES
__device__ __forceinline__ float rm_half(unsigned bits) {
  const unsigned short half = (unsigned short)bits;
  return rm_load_f16(&half);
}
__device__ __forceinline__ unsigned rm_two_halves(float low, float high) {
  unsigned short halves[2];
  rm_store_f16(halves, low);
  rm_store_f16(halves + 1, high);
  return halves[0] | (unsigned)halves[1] << 16;
}
#endif
