"""Common parts of C dialects, and the dialect that any host compiles: C99 with GNU vectors.

A device's dialect is a value of CTarget in its plugin, made of ``STANDARD``, ``helper_functions`` and ``vector_definitions``.
Arithmetic is that of the element type; float32 never uses approximate ("fast-math") functions. The preamble holds functions that
C lacks: floor division, NaN-propagating extrema and the like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from rammer.codegen.c_target import CTarget
from rammer.codegen.vector_text import GNU, WIDTHS, vector_definitions

__all__ = ["C99", "STANDARD", "helper_functions", "one_thread"]

#: Suffix of helper functions by element type. Narrow integers compute in 32 bits.
SUFFIX: dict[str, str] = {"float32": "f32", "float64": "f64", "int32": "i32", "int64": "i64", "uint32": "u32", "uint64": "u64"}

_INTEGER = """
{q} {t} rm_div_{s}({t} a, {t} b) {{ return b == 0 ? 0 : {minus} a / b; }}
{q} {t} rm_fmod_{s}({t} a, {t} b) {{ return b == 0 {orminus} ? 0 : a % b; }}
{q} {t} rm_floordiv_{s}({t} a, {t} b) {{
  {t} m = rm_fmod_{s}(a, b);
  return rm_div_{s}(a, b) - (m != 0 && (m < 0) != (b < 0));
}}
{q} {t} rm_mod_{s}({t} a, {t} b) {{
  {t} m = rm_fmod_{s}(a, b);
  return m + (m != 0 && (m < 0) != (b < 0) ? b : 0);
}}
{q} {t} rm_max_{s}({t} a, {t} b) {{ return a > b ? a : b; }}
{q} {t} rm_min_{s}({t} a, {t} b) {{ return a < b ? a : b; }}
{q} {t} rm_pow_{s}({t} a, {t} n) {{ {t} r = 1; for (; n > 0; n >>= 1, a *= a) if (n & 1) r *= a; return r; }}
{q} {t} rm_shl_{s}({t} a, {t} n) {{ return ({u})n < {bits} ? ({t})(({u})a << n) : 0; }}
{q} {t} rm_shr_{s}({t} a, {t} n) {{ return ({u})n < {bits} ? a >> n : (a < 0 ? -1 : 0); }}
"""
_FLOAT = """
{q} {t} rm_max_{s}({t} a, {t} b) {{ return ((a > b) | (a != a)) ? a : b; }}
{q} {t} rm_min_{s}({t} a, {t} b) {{ return ((a < b) | (a != a)) ? a : b; }}
{q} {t} rm_sign_{s}({t} a) {{ return a != a ? a : ({t})((a > 0) - (a < 0)); }}
{q} {t} rm_mod_{s}({t} a, {t} b) {{ {t} m = {fmod}(a, b); return m != 0 && (m < 0) != (b < 0) ? m + b : m; }}
{q} {t} rm_floordiv_{s}({t} a, {t} b) {{
  {t} d = (a - rm_mod_{s}(a, b)) / b, f = {floor}(d);
  return b == 0 ? a / b : d - f > ({t})0.5 ? f + 1 : f;
}}
"""


def helper_functions(qualifier: str, types: Mapping[str, str], overloaded: bool, double_guard: str = "") -> str:
    """Return the helper functions of a dialect; ``overloaded`` spells ``floor`` alike for float and double. ``double_guard`` is a
    preprocessor condition under which float64 exists."""
    parts = []
    for name, suffix in SUFFIX.items():
        spelling = types[name]
        if name.startswith("float"):
            plain = overloaded or name == "float64"
            text = _FLOAT.format(
                q=qualifier, t=spelling, s=suffix, fmod="fmod" if plain else "fmodf", floor="floor" if plain else "floorf"
            )
            guarded = name == "float64" and double_guard
            parts.append(f"\n#if {double_guard}{text}#endif\n" if guarded else text)
        else:
            signed = name.startswith("int")
            wide = spelling if not signed else types["u" + name]
            parts.append(
                _INTEGER.format(
                    q=qualifier,
                    t=spelling,
                    s=suffix,
                    u=wide,
                    bits=64 if name.endswith("64") else 32,
                    minus=f"b == ({spelling})-1 ? ({spelling})(0 - ({wide})a) :" if signed else "",
                    orminus="|| b == -1" if signed else "",
                )
            )
    return "".join(parts).replace("  ", " ")


#: Element types as C and C++ spell them. Each dialect spells float16 itself.
STANDARD: Final[Mapping[str, str]] = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float32": "float",
    "float64": "double",
}

#: Bit casts in C99.
_BITS: Final[Mapping[str, str]] = {
    f"as_{to}": f"(((union {{{{ {STANDARD[source]} a; {STANDARD[to]} b; }}}}){{{{{{v}}}}}}).b)"
    for source, to in (("float32", "uint32"), ("uint32", "float32"), ("float64", "uint64"), ("uint64", "float64"))
}
#: Bit casts in C++, by compiler built-ins.
BITS: Final[Mapping[str, str]] = {
    f"as_{to}": f"__builtin_bit_cast({STANDARD[to]}, {{v}})" for to in ("uint32", "float32", "uint64", "float64")
}

#: Host C (C99 with GNU vectors) with one thread per task.
C99 = CTarget(
    name="c99",
    function="",
    global_="",
    local="",
    constant="static const",
    thread="0",
    threads="1",
    barrier="",
    types={**STANDARD, "float16": "_Float16"},
    functions={"round:float16": "((float)(_Float16)({v}))", **_BITS},
    preamble="#include <math.h>\n#define RM_INF INFINITY\n#define RM_NAN NAN\n"
    + helper_functions("static inline", STANDARD, overloaded=False)
    + vector_definitions(GNU),
    vectors=WIDTHS,
    restrict="restrict",
)


def one_thread(target: CTarget) -> CTarget:
    """Return the dialect with one thread per vEU (a CPU core): no strided loops, no barriers."""
    return replace(target, name=f"{target.name}_one_thread", thread="0", threads="1", barrier="")
