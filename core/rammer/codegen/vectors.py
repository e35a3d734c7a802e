"""C text of float32 vectors: one set of names, spelled by OpenCL C and by GNU C.

``rm_f{W}`` is a vector and ``rm_i{W}`` a mask of 0 and -1. ``rm_vload``/``rm_vstore`` need no alignment,
``rm_veven`` loads every second element, ``rm_vsel`` chooses by mask, ``rm_within`` tests ``i + s * lane``
against ``[0, n)``, ``rm_fold_sum`` and its kin combine the lanes.
"""

from __future__ import annotations

#: Mathematical functions of the scalar language with a C spelling of their own.
MATH = ("floor", "ceil", "round", "sqrt", "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
         "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "log1p", "expm1", "pow", "fmod", "abs")  # fmt: skip

#: Widths of the float32 vectors of a dialect.
WIDTHS = (4, 8, 16)

OPENCL_TEXT = """
#define rm_f{w} float{w}
#define rm_i{w} int{w}
#define rm_vload{w}(p) vload{w}(0, p)
#define rm_veven{w}(p) ((float{w})(vload{w}(0, p).even, vload{w}(0, (p) + {last}).odd))
#define rm_vstore{w}(p, v) vstore{w}(v, 0, p)
#define rm_splat{w}(x) ((float{w})(x))
#define rm_mask{w}(p) vload{w}(0, p)
#define rm_every{w}(x) ((int{w})(-(x)))
#define rm_vsel{w}(m, a, b) select(b, a, m)
#define rm_within{w}(i, s, n) (((uint{w})((uint)(i)) + (uint)(s) * (uint{w})({lanes})) < (uint{w})(n))
inline static float{w} rm_vmax{w}(float{w} a, float{w} b) {{ return select(b, a, (a > b) | (a != a)); }}
inline static float{w} rm_vmin{w}(float{w} a, float{w} b) {{ return select(b, a, (a < b) | (a != a)); }}
"""
GNU = """
typedef float rm_f{w} __attribute__((vector_size({bytes})));
typedef int rm_i{w} __attribute__((vector_size({bytes})));
typedef unsigned rm_w{w} __attribute__((vector_size({bytes})));
typedef float rm_u{w} __attribute__((vector_size({bytes}), aligned(4), may_alias));
typedef int rm_j{w} __attribute__((vector_size({bytes}), aligned(4), may_alias));
#define rm_vload{w}(p) ((rm_f{w})*(const rm_u{w} *)(p))
#define rm_vstore{w}(p, v) (*(rm_u{w} *)(p) = (v))
#define rm_splat{w}(x) ((float)(x) - (rm_f{w}){{0}})
#define rm_mask{w}(p) ((rm_i{w})*(const rm_j{w} *)(p))
#define rm_every{w}(x) (-(int)(x) - (rm_i{w}){{0}})
#define rm_within{w}(i, s, n) (((unsigned)(i) + (unsigned)(s) * (rm_w{w}){{{lanes}}}) < (unsigned)(n))
#define rm_vsel{w}(m, a, b) ((rm_f{w})(((rm_i{w})(a) & (m)) | ((rm_i{w})(b) & ~(m))))
static inline rm_f{w} rm_veven{w}(const float *p) {{
  return __builtin_shuffle(rm_vload{w}(p), rm_vload{w}(p + {last}), (rm_i{w}){{{even}}});
}}
static inline rm_f{w} rm_vmax{w}(rm_f{w} a, rm_f{w} b) {{
  rm_i{w} m = (a > b) | (a != a);
  return rm_vsel{w}(m, a, b);
}}
static inline rm_f{w} rm_vmin{w}(rm_f{w} a, rm_f{w} b) {{
  rm_i{w} m = (a < b) | (a != a);
  return rm_vsel{w}(m, a, b);
}}
"""


def _folds(w: int, opencl: bool) -> str:
    """Functions that combine the lanes of a vector, always in the same order."""
    parts, head = [], "inline static" if opencl else "static inline"
    for name, step in (
        ("sum", "r + {0}"),
        ("prod", "r * {0}"),
        ("max", "rm_max_f32(r, {0})"),
        ("min", "rm_min_f32(r, {0})"),
    ):
        if opencl and w > 4:
            call = {"sum": "v.lo + v.hi", "prod": "v.lo * v.hi"}.get(name, f"rm_v{name}{w // 2}(v.lo, v.hi)")
            parts.append(
                f"{head} float rm_fold_{name}{w}(rm_f{w} v) {{ return rm_fold_{name}{w // 2}({call}); }}\n"
            )
            continue
        lanes = [f"v.s{k}" if opencl else f"v[{k}]" for k in range(w)]
        body = " ".join(f"r = {step.format(lane)};" for lane in lanes[1:])
        parts.append(
            f"{head} float rm_fold_{name}{w}(rm_f{w} v) {{ float r = {lanes[0]}; {body} return r; }}\n"
        )
    return "".join(parts)


def vectors(template: str, opencl: bool) -> str:
    """The vector types and functions of a dialect: OpenCL's own, or GNU C's with functions lane by lane."""
    parts = []
    for w in WIDTHS:
        # A stride-2 load: half from one vector, half from the one that ends on its last element.
        even = ", ".join(str(2 * k if 2 * k < w else 2 * k + 1) for k in range(w))
        lanes = ", ".join(map(str, range(w)))
        parts.append(template.format(w=w, bytes=4 * w, last=w - 1, even=even, lanes=lanes))
        parts.append(_folds(w, opencl))
        for fn in MATH:
            pair = fn in ("pow", "fmod")
            name = {"round": "rint", "abs": "fabs"}.get(fn, fn)
            if opencl:
                parts.append(f"#define rm_v{fn}{w} {name}\n")
            else:
                arguments, call = (f"rm_f{w} a, rm_f{w} b", "a[k], b[k]") if pair else (f"rm_f{w} a", "a[k]")
                body = f"for (int k = 0; k < {w}; ++k) a[k] = {name}f({call}); return a;"
                parts.append(f"static inline rm_f{w} rm_v{fn}{w}({arguments}) {{ {body} }}\n")
    return "".join(parts)
