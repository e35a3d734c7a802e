"""C text of float32 vectors: one set of names, which every dialect with vectors spells. In memory they may be float16.

``rm_f{W}`` is a vector and ``rm_i{W}`` a mask of 0 and -1. ``rm_vload``/``rm_vstore`` need no alignment, ``rm_veven`` loads every
second element. ``rm_hload`` and the other ``rm_h`` functions access float16 memory. ``rm_vsel`` chooses by mask, ``rm_within``
tests ``i + s * lane`` against ``[0, n)``. ``rm_fold_sum`` and the other folds combine the lanes. ``rm_turn`` transposes as many
vectors as they have lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rammer.codegen.vector_math import WHOLE, whole_vectors
from rammer.ir.expr import TRANSCENDENTAL

__all__ = ["GNU", "MATH", "WIDTHS", "Vectors", "lane_by_lane", "vector_definitions", "vector_name"]

#: Mathematical functions of the scalar language with a separate C spelling.
MATH = ("floor", "ceil", "round", "sqrt", *TRANSCENDENTAL, "pow", "fmod", "abs")

#: Widths of the float32 vectors of a dialect.
WIDTHS = (4, 8, 16)

#: Types of a dialect's vectors in memory, by the letter in the names of their loads and stores, which convert and round.
STORED: Final[Mapping[str, str]] = {"float32": "v", "float16": "h"}

#: Integer types in memory, likewise: their vectors have 32-bit lanes, and stores narrow them.
CODES: Final[Mapping[str, str]] = {"uint8": "u", "int8": "s", "int32": "i"}

_GNU = """
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
#define rm_halves{w}(p, s) __extension__ ({{ \
  rm_f{w} r_; const _Float16 *p_ = (p); for (int k_ = 0; k_ < {w}; ++k_) r_[k_] = (float)p_[k_ * (s)]; r_; }})
#define rm_hload{w}(p) rm_halves{w}(p, 1)
#define rm_heven{w}(p) rm_halves{w}(p, 2)
#define rm_hstore{w}(p, v) do {{ \
  rm_f{w} r_ = (v); _Float16 *p_ = (p); for (int k_ = 0; k_ < {w}; ++k_) p_[k_] = (_Float16)r_[k_]; }} while (0)
#define rm_hround{w}(v) __extension__ ({{ \
  rm_f{w} h_ = (v); for (int k_ = 0; k_ < {w}; ++k_) h_[k_] = (float)(_Float16)h_[k_]; h_; }})
#define rm_codes{w}(p, s) __extension__ ({{ \
  rm_i{w} r_; __typeof__(p) p_ = (p); for (int k_ = 0; k_ < {w}; ++k_) r_[k_] = (int)p_[k_ * (s)]; r_; }})
#define rm_uload{w}(p) rm_codes{w}(p, 1)
#define rm_sload{w}(p) rm_codes{w}(p, 1)
#define rm_iload{w}(p) rm_mask{w}(p)
#define rm_ueven{w}(p) rm_codes{w}(p, 2)
#define rm_seven{w}(p) rm_codes{w}(p, 2)
#define rm_ieven{w}(p) rm_codes{w}(p, 2)
#define rm_ustore{w}(p, v) do {{ \
  rm_i{w} r_ = (v); __typeof__(p) p_ = (p); for (int k_ = 0; k_ < {w}; ++k_) p_[k_] = r_[k_]; }} while (0)
#define rm_sstore{w}(p, v) rm_ustore{w}(p, v)
#define rm_istore{w}(p, v) (*(rm_j{w} *)(p) = (v))
#define rm_isplat{w}(x) ((int)(x) - (rm_i{w}){{0}})
#define rm_isel{w}(m, a, b) (((a) & (m)) | ((b) & ~(m)))
#define rm_wrap{w}(a, op, b) ((rm_i{w})((rm_w{w})(a) op (rm_w{w})(b)))
#define rm_float{w}(v) __builtin_convertvector(v, rm_f{w})
#define rm_int{w}(v) __builtin_convertvector(v, rm_i{w})
static inline rm_f{w} rm_veven{w}(const float *p) {{
#ifdef __clang__
  return __builtin_shufflevector(rm_vload{w}(p), rm_vload{w}(p + {last}), {even});
#else
  return __builtin_shuffle(rm_vload{w}(p), rm_vload{w}(p + {last}), (rm_i{w}){{{even}}});
#endif
}}
#ifdef __clang__
#define rm_evens{w}(a, b) __builtin_shufflevector(a, b, {evens})
#define rm_odds{w}(a, b) __builtin_shufflevector(a, b, {odds})
#else
#define rm_evens{w}(a, b) __builtin_shuffle(a, b, (rm_i{w}){{{evens}}})
#define rm_odds{w}(a, b) __builtin_shuffle(a, b, (rm_i{w}){{{odds}}})
#endif
static inline rm_f{w} rm_vmax{w}(rm_f{w} a, rm_f{w} b) {{
  rm_i{w} m = (a > b) | (a != a);
  return rm_vsel{w}(m, a, b);
}}
static inline rm_f{w} rm_vmin{w}(rm_f{w} a, rm_f{w} b) {{
  rm_i{w} m = (a < b) | (a != a);
  return rm_vsel{w}(m, a, b);
}}
"""


@dataclass(frozen=True, slots=True)
class Vectors:
    """The spelling of vectors in one language.

    ``template``: text of one width ``w``, with ``bytes``, ``last`` (its last lane), ``lanes`` (their numbers), ``even`` (the
    lanes that ``rm_veven`` reads of two vectors), ``evens`` and ``odds`` (of both). ``head``: qualifiers of a function. ``lane``:
    lane ``k`` of a vector ``v``. ``function``: text that defines a function of ``MATH`` under its ``vector_name``. ``halves``: a
    vector has ``.lo`` and ``.hi``.
    """

    template: str
    head: str
    lane: str
    function: Callable[[str, int], str]
    halves: bool = False


def vector_name(function: str, width: int) -> str:
    """Return the name of a function of ``MATH`` for vectors."""
    return f"rm_v{function}{width}"


def lane_by_lane(function: str, width: int) -> str:
    """Return a function of vectors that calls C's function for every lane."""
    pair = function in ("pow", "fmod")
    name = {"round": "rint", "abs": "fabs"}.get(function, function)
    arguments, call = (f"rm_f{width} a, rm_f{width} b", "a[k], b[k]") if pair else (f"rm_f{width} a", "a[k]")
    body = f"for (int k = 0; k < {width}; ++k) a[k] = {name}f({call}); return a;"
    return f"static inline rm_f{width} {vector_name(function, width)}({arguments}) {{ {body} }}\n"


def _gnu_function(function: str, width: int) -> str:
    return whole_vectors(function, width) if function in WHOLE else lane_by_lane(function, width)


#: GNU C: arithmetic, comparisons and the commonest functions of whole vectors; other functions call C's own lane by lane.
GNU = Vectors(_GNU, "static inline", "v[{k}]", _gnu_function)


def _definition_order(function: str) -> int:
    """Return a sort key that puts functions before those that use them."""
    return WHOLE.index(function) if function in WHOLE else len(WHOLE)


def vector_definitions(spelled: Vectors) -> str:
    """Return the vector types and functions of a dialect, for every width."""
    parts = []
    for w in WIDTHS:
        # A stride-2 load: half from one vector, half from the one that ends on its last element.
        even = ", ".join(str(2 * k if 2 * k < w else 2 * k + 1) for k in range(w))
        lanes = ", ".join(map(str, range(w)))
        evens, odds = (", ".join(map(str, range(k, 2 * w, 2))) for k in (0, 1))
        places = {"lanes": lanes, "even": even, "evens": evens, "odds": odds}
        parts.append(spelled.template.format(w=w, bytes=4 * w, last=w - 1, **places))
        parts += [_fold_functions(w, spelled), _transpose_function(w, spelled)]
        parts += [spelled.function(name, w) for name in sorted(MATH, key=_definition_order)]
    return "".join(parts)


def _transpose_function(w: int, spelled: Vectors) -> str:
    """Return a function that exchanges rows and columns of ``w`` vectors. Each step joins the even lanes of two vectors, and
    their odd lanes."""
    lines = list[str]()
    names = [f"v[{k}]" for k in range(w)]
    step, number = 1, 0
    while step < w:
        made = list[str]()
        for k in range(0, w, 2):
            pair = names[k], names[k + 1]
            for odd in (0, 1):
                made.append(f"t{number}")
                pick = ("rm_evens", "rm_odds")[odd]
                lines.append(f"const rm_f{w} t{number} = {pick}{w}({pair[0]}, {pair[1]});")
                number += 1
        names = made[0::2] + made[1::2]
        step *= 2
    lines += [f"v[{k}] = {name};" for k, name in enumerate(names)]
    return f"{spelled.head} void rm_turn{w}(rm_f{w} *v) {{ {' '.join(lines)} }}\n"


def _fold_functions(w: int, spelled: Vectors) -> str:
    """Return functions that combine the lanes of a vector, always in the same order."""
    parts = []
    for name, step in (("sum", "r + {0}"), ("prod", "r * {0}"), ("max", "rm_max_f32(r, {0})"), ("min", "rm_min_f32(r, {0})")):
        if spelled.halves and w > 4:
            call = {"sum": "v.lo + v.hi", "prod": "v.lo * v.hi"}.get(name, f"rm_v{name}{w // 2}(v.lo, v.hi)")
            body = f"return rm_fold_{name}{w // 2}({call});"
        else:
            lanes = [spelled.lane.format(k=k) for k in range(w)]
            body = f"float r = {lanes[0]}; {' '.join(f'r = {step.format(lane)};' for lane in lanes[1:])} return r;"
        parts.append(f"{spelled.head} float rm_fold_{name}{w}(rm_f{w} v) {{ {body} }}\n")
    return "".join(parts)
