// What no task writes, where a kernel says so of a pointer (const __restrict__): loads of it need not stay behind stores, so a thread
// that stores several values has all it adds to them under way at once. Of a parameter of a launch the compiler sees that itself.
template <typename T> struct rm_constant {
  const T *at;
  __device__ __forceinline__ rm_constant(const T *from) : at(from) {}
  template <typename I> __device__ __forceinline__ T operator[](I i) const { return __ldg(at + i); }
  template <typename I> __device__ __forceinline__ rm_constant operator+(I i) const { return at + i; }
  __device__ __forceinline__ operator const T *() const { return at; }
  template <typename U> __device__ __forceinline__ explicit operator const U *() const { return (const U *)at; }
};
__device__ __forceinline__ float rm_load_f16(const rm_constant<unsigned short> &from) {
  const unsigned short value = from[0];
  return rm_load_f16(&value);
}
