"""The OpenCL C dialect: types, functions and vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rammer.codegen.c_target import CTarget
from rammer.codegen.dialects import STANDARD, helper_functions, one_thread
from rammer.codegen.vector_text import MATH, WIDTHS, Vectors, vector_definitions, vector_name
from rammer.ir.device import VDevice

_TYPES: Final = {
    **STANDARD,
    "bool": "uchar",
    "int8": "char",
    "uint8": "uchar",
    "uint16": "ushort",
    "uint32": "uint",
    "int64": "long",
    "uint64": "ulong",
    "float16": "half",
}
_VECTORS = """
#define rm_f{w} float{w}
#define rm_i{w} int{w}
#define rm_vload{w}(p) vload{w}(0, p)
#define rm_veven{w}(p) ((float{w})(vload{w}(0, p).even, vload{w}(0, (p) + {last}).odd))
#define rm_vstore{w}(p, v) vstore{w}(v, 0, p)
#define rm_hload{w}(p) vload_half{w}(0, p)
#define rm_heven{w}(p) ((float{w})(vload_half{w}(0, p).even, vload_half{w}(0, (p) + {last}).odd))
#define rm_hstore{w}(p, v) vstore_half{w}(v, 0, p)
inline static float{w} rm_hround{w}(float{w} v) {{
  ushort h[{w}];
  vstore_half{w}(v, 0, (half *)h);
  return vload_half{w}(0, (half *)h);
}}
#define rm_uload{w}(p) convert_int{w}(vload{w}(0, p))
#define rm_sload{w}(p) convert_int{w}(vload{w}(0, p))
#define rm_iload{w}(p) vload{w}(0, p)
#define rm_ueven{w}(p) ((int{w})(rm_uload{w}(p).even, rm_uload{w}((p) + {last}).odd))
#define rm_seven{w}(p) rm_ueven{w}(p)
#define rm_ieven{w}(p) rm_ueven{w}(p)
#define rm_ustore{w}(p, v) vstore{w}(convert_uchar{w}(v), 0, p)
#define rm_sstore{w}(p, v) vstore{w}(convert_char{w}(v), 0, p)
#define rm_istore{w}(p, v) vstore{w}(v, 0, p)
#define rm_isplat{w}(x) ((int{w})(x))
#define rm_isel{w}(m, a, b) select(b, a, m)
#define rm_wrap{w}(a, op, b) as_int{w}(as_uint{w}(a) op as_uint{w}(b))
#define rm_float{w}(v) convert_float{w}(v)
#define rm_int{w}(v) convert_int{w}(v)
#define rm_splat{w}(x) ((float{w})(x))
#define rm_mask{w}(p) vload{w}(0, p)
#define rm_every{w}(x) ((int{w})(-(x)))
#define rm_vsel{w}(m, a, b) select(b, a, m)
#define rm_within{w}(i, s, n) (((uint{w})((uint)(i)) + (uint)(s) * (uint{w})({lanes})) < (uint{w})(n))
#define rm_evens{w}(a, b) ((float{w})((a).even, (b).even))
#define rm_odds{w}(a, b) ((float{w})((a).odd, (b).odd))
inline static float{w} rm_vmax{w}(float{w} a, float{w} b) {{ return select(b, a, (a > b) | (a != a)); }}
inline static float{w} rm_vmin{w}(float{w} a, float{w} b) {{ return select(b, a, (a < b) | (a != a)); }}
"""


def _define_builtin(function: str, width: int) -> str:
    """Return the definition of a builtin for vectors: OpenCL functions accept vectors."""
    return f"#define {vector_name(function, width)} {_SPELLED.get(function, function)}\n"


_SPELLED: Final = {"round": "rint", "abs": "fabs"}

#: Bit casts between numeric types.
_BITS: Final = {f"as_{t}": f"as_{_TYPES[t]}({{v}})" for t in ("uint32", "float32", "uint64", "float64")}

#: A float32 quotient rounded as in IEEE 754, which quantisation at ties needs. OpenCL allows an error of 2.5 ulp unless the
#: program is built with correctly rounded division (RM_ROUNDED). One step along the residual reduces the error below one ulp. The
#: exact residuals then decide which of two neighbours is nearer. Outside 1e-20 to 1e20 the quotient is the device's result.
ROUNDED: Final = """
inline static float rm_rounded(float a, float b, float q) {
  if (!(fabs(q) > 1e-20f && fabs(q) < 1e20f && fabs(a) < 1e37f)) return q;
  if (fabs(a) < 1e-10f) { a *= 0x1p64f; b *= 0x1p64f; }
  q += fma(-q, b, a) / b;
  const float left = fma(-q, b, a);
  const float next = nextafter(q, (left < 0.0f) == (b < 0.0f) ? INFINITY : -INFINITY);
  return fabs(fma(-next, b, a)) < fabs(left) ? next : q;
}
#ifdef RM_ROUNDED
#define rm_quotient(a, b) ((a) / (b))
#else
inline static float rm_quotient(float a, float b) { return rm_rounded(a, b, a / b); }
#endif
"""

#: Every operation of a map rounds separately, as in the source models. A contracted multiply-add would move numbers at ties to
#: the neighbouring quantised value. Sums of products use ``fma`` explicitly.
EACH_ROUNDED: Final = "#pragma OPENCL FP_CONTRACT OFF\n"

#: OpenCL C 1.2 or later; a work-group is one vEU. float64 needs ``cl_khr_fp64``.
OPENCL = CTarget(
    name="opencl",
    function="",
    global_="__global",
    local="__local",
    constant="__constant",
    thread="rm_item()",
    threads="(int)get_local_size(0)",
    barrier="barrier(CLK_LOCAL_MEM_FENCE);",
    types=_TYPES,
    functions={n: n for n in (*MATH, "fma")}
    | _SPELLED
    | _BITS
    | {
        "load:float16": "vload_half({i}, {p})",
        "store:float16": "vstore_half({v}, {i}, {p})",
        "round:float16": "rm_hround({v})",
    },
    preamble=EACH_ROUNDED + "#ifdef cl_khr_fp64\n#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n#endif\n"
    "#define RM_INF INFINITY\n#define RM_NAN NAN\n"
    "inline static float rm_hround(float v) { ushort h; vstore_half(v, 0, (half *)&h); return vload_half(0, (half *)&h); }\n"
    + helper_functions("inline static", _TYPES, overloaded=True, double_guard="defined(cl_khr_fp64)")
    + vector_definitions(Vectors(_VECTORS, "inline static", "v.s{k}", _define_builtin, halves=True)),
    vectors=WIDTHS,
    restrict="restrict",
)
#: A CPU core's scratch memory is a slice of a global buffer: unlike local memory it has no separate limit. Inlining every task
#: into the table walk would lengthen the build, while a call costs nanoseconds. On a GPU a call costs registers, which the
#: calling convention reserves.
CPU_DIALECT = replace(one_thread(OPENCL), local="__global", function="__attribute__((noinline))", rereads=True)
#: The number of a work-item in its group. NVIDIA's compiler would compute what depends on it before a loop over tasks, for all
#: functions of the loop, and spill it.
ITEM: Final = """
#if defined(cl_nv_pragma_unroll)
inline static int rm_item(void) { int item; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(item)); return item & 1023; }
#else
#define rm_item() ((int)get_local_id(0))
#endif
"""
#: CPUs have a correctly rounded division instruction; GPUs round correctly only with a build option (``build.build_options``).
GPU_DIALECT = replace(OPENCL, functions={**OPENCL.functions, "div": "rm_quotient"}, preamble=OPENCL.preamble + ITEM + ROUNDED)


def dialect_of(device: VDevice) -> CTarget:
    """Return the OpenCL C dialect for a device's tasks."""
    return CPU_DIALECT if device.threads == 1 else GPU_DIALECT
