"""Device text of the ring: copies from global to local memory, and fences between groups."""

from __future__ import annotations

from typing import Final

#: Copies of 4 and 16 bytes to local memory, zeros where ``valid`` is false. With RM_ASYNC (``build.build_options``) they finish
#: later, as NVIDIA's processors of compute capability 8 and newer copy: ``rm_arrived(n)`` waits until at most ``n`` committed
#: groups of copies are unfinished. Elsewhere a copy is finished when it returns.
COPIES: Final = """
#ifdef RM_ASYNC
inline static void rm_copy4(__local float *to, __global const float *from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               : : "r"((uint)(size_t)to), "l"((ulong)from), "r"(valid ? 4 : 0) : "memory");
}
inline static void rm_copy16(__local float *to, __global const float *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               : : "r"((uint)(size_t)to), "l"((ulong)from), "r"(valid ? 16 : 0) : "memory");
}
#define rm_commit() asm volatile("cp.async.commit_group;" : : : "memory")
#define rm_arrived(n) asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory")
#else
inline static void rm_copy4(__local float *to, __global const float *from, bool valid) { *to = valid ? *from : 0.0f; }
inline static void rm_copy16(__local float *to, __global const float *from, bool valid) {
  *(__local float4 *)to = valid ? *(__global const float4 *)from : (float4)(0.0f);
}
#define rm_commit()
#define rm_arrived(n)
#endif
"""

#: Order of memory accesses between groups: writes before a fence are visible to groups that see a later write of this work-item.
#: ``rm_raise`` adds one to a counter after a group's writes; what follows ``rm_seen`` sees the writes before the value read.
FENCE: Final = """
#if defined(cl_nv_pragma_unroll)
#define rm_fence() asm volatile("fence.acq_rel.gpu;" : : : "memory")
inline static void rm_raise(volatile __global int *at) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" : : "l"(at) : "memory");
}
inline static int rm_seen(volatile __global int *at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
#else
#if __OPENCL_C_VERSION__ >= 200
#define rm_fence() atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_acq_rel, memory_scope_device)
#else
#define rm_fence() mem_fence(CLK_GLOBAL_MEM_FENCE)
#endif
inline static void rm_raise(volatile __global int *at) { rm_fence(); atomic_inc(at); }
inline static int rm_seen(volatile __global int *at) { const int value = *at; rm_fence(); return value; }
#endif
"""
