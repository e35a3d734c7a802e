"""CUDA C++ as a dialect."""

from __future__ import annotations

from dataclasses import replace

from rammer.codegen.c_target import CTarget
from rammer.codegen.dialects import STANDARD, helper_functions

_HALF = """
__device__ __forceinline__ float rm_load_f16(const unsigned short *p) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(*p));
  return f;
}
__device__ __forceinline__ void rm_store_f16(unsigned short *p, float f) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  *p = h;
}
__device__ __forceinline__ float rm_round_f16(float f) {
  unsigned short h;
  rm_store_f16(&h, f);
  return rm_load_f16(&h);
}
"""

#: Conversions between numbers and their bits.
_BITS = {
    "as_uint32": "__float_as_uint({v})",
    "as_float32": "__uint_as_float({v})",
    "as_uint64": "((unsigned long long)__double_as_longlong({v}))",
    "as_float64": "__longlong_as_double((long long)({v}))",
}

#: Functions whose errors are small beside the rounding of float16.
_FAST = {"exp": "__expf", "div": "__fdividef"}

#: CUDA C++ under NVRTC; a thread block is one vEU. No ``restrict``: another vEU of the same launch may have
#: written an input, and read-only pointers would license the non-coherent load path.
CUDA = CTarget(
    name="cuda",
    function="__device__",
    global_="",
    local="",
    constant="__device__ const",
    thread="(int)threadIdx.x",
    threads="(int)blockDim.x",
    barrier="__syncthreads();",
    types={**STANDARD, "float16": "unsigned short"},
    functions={
        "load:float16": "rm_load_f16({p} + {i})",
        "store:float16": "rm_store_f16({p} + {i}, {v})",
        "round:float16": "rm_round_f16({v})",
        **{f"{fn}:float16": spelling for fn, spelling in _FAST.items()},
        **_BITS,
    },
    preamble="#define RM_INF __int_as_float(0x7f800000)\n#define RM_NAN __int_as_float(0x7fc00000)\n"
    + helper_functions("__device__ __forceinline__", STANDARD, overloaded=False)
    + _HALF,
)
#: The same for float32 that is rounded to float16 in the end.
ROUNDED = replace(CUDA, functions={**CUDA.functions, **_FAST})
