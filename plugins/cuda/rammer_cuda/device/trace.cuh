// A traced kernel: rm_after() also declares an object whose life is the task's. Kernels call it once, outside any loop.
struct RmRecord { unsigned long long start, end, sm; };
__device__ __forceinline__ unsigned long long rm_now() {
  unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t) :: "memory"); return t;
}
struct RmSpan {
  RmRecord *record;
  __device__ __forceinline__ RmSpan(RmRecord *records) : record(records + blockIdx.x) {
    if (threadIdx.x == 0) {
      unsigned sm; asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
      record->start = rm_now(); record->sm = sm;
    }
  }
  __device__ __forceinline__ ~RmSpan() {
    if (threadIdx.x % 32 == 0) atomicMax(&record->end, rm_now());
  }
};
#define rm_after() rm_after(); const RmSpan rm_span(rm_records)
