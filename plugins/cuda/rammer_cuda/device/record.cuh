// With RM_TRACE each task leaves its SM, when its last wait (as thread 0 sees it) ended, and when its last warp ended.
#ifdef RM_TRACE
struct RmRecord { unsigned long long start, end, sm; };
__device__ RmRecord *rm_records;
__device__ const unsigned *rm_begins;
#define RM_RECORD(order) rm_records[rm_begins[blockIdx.x] + (order)]
#define RM_BEGIN(order) if (threadIdx.x == 0) { \
    unsigned sm; asm volatile("mov.u32 %0, %smid;" : "=r"(sm)); \
    RM_RECORD(order).sm = sm; RM_RECORD(order).start = rm_now(); }
#define RM_END(order) if (threadIdx.x % 32 == 0) atomicMax(&RM_RECORD(order).end, rm_now());
#else
#define RM_BEGIN(order)
#define RM_END(order)
#endif
