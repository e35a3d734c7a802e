"""Functions of whole float32 vectors in GNU C: roundings that lack an instruction, and polynomials.

Results of exp, log, tanh and erf are within 2 units in the last place. The maximum is 1.04, 0.80, 1.30 and 1.06 over every 61st
number, of erf every 997th. NaN, infinities and signs of zeros are those of C; the other functions are C's. Polynomials were
fitted for this file, by least squares weighted until the largest relative error was least. Arguments are reduced as by Cody and
Waite ("Software Manual for the Elementary Functions", 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: ln 2 in two parts; a small number times the first is exact.
_LN2 = ("0.693359375f", "-2.12194440e-4f")
#: (e^r - 1 - r) / r^2 for |r| up to ln 2 / 2; the highest power first, as in all of these.
_EXP = (0.0013951717410236597, 0.008369598537683487, 0.0416661873459816, 0.16666512191295624, 0.5)
#: (log(1 + f) - f + f^2 / 2) / f^3 from sqrt(1/2) - 1 to sqrt(2) - 1.
_LOG = (
    *(0.06746601313352585, -0.11675640940666199, 0.11888174712657928, -0.12405591458082199, 0.14219550788402557),
    *(-0.1666799634695053, 0.2000211924314499, -0.25000008940696716, 0.3333331346511841),
)
#: (tanh(x) / x - 1) / x^2 in x^2 up to 0.64^2.
_TANH = (-0.00560390530154109, 0.020551711320877075, -0.05371410399675369, 0.13331152498722076, -0.33333271741867065)
#: erf(x) / x - 1 in x^2 up to 0.93^2, and -log(1 - erf(x)) from 0.9 to 3.95.
_ERF = (
    *(8.345221431227401e-05, -0.0008137436234392226, 0.005200634244829416, -0.02685927040874958),
    *(0.11283694207668304, -0.37612634897232056, 0.12837916612625122),
)
_ERFC = (
    *(2.0828618289669976e-05, -0.0004313935642130673, 0.004156255163252354, -0.025080615654587746),
    *(0.10822038352489471, 0.6334008574485779, 1.1294883489608765, -0.0001692051300778985),
)


def _horner_text(name: str, powers: Sequence[float]) -> str:
    """Return the Horner form of a polynomial in the variable ``name``."""
    text = f"{powers[0]!r}f"
    for power in powers[1:]:
        text = f"({text} * {name} {'-' if power < 0 else '+'} {abs(power)!r}f)"
    return text


#: Function -> body for the vector ``a`` of @ lanes.
_BODIES: Final = {
    "abs": "return (rm_f@)((rm_i@)a & 0x7fffffff);",
    "round": """
  rm_f@ m = rm_vabs@(a), r = (m + 8388608.0f) - 8388608.0f; /* to the nearest even; whoever is larger is whole */
  return rm_vsel@(m < 8388608.0f, (rm_f@)((rm_i@)r | ((rm_i@)a & (-0x7fffffff - 1))), a);
""",
    "floor": "rm_f@ r = rm_vround@(a); return rm_vsel@(r > a, r - 1.0f, r);",
    "ceil": """
  rm_f@ r = rm_vround@(a);
  return (rm_f@)((rm_i@)rm_vsel@(r < a, r + 1.0f, r) | ((rm_i@)a & (-0x7fffffff - 1)));
""",
    "exp": f"""
  rm_f@ x = rm_vmin@(rm_vmax@(a, rm_splat@(-104.0f)), rm_splat@(89.0f)), n = rm_vround@(x * 1.44269504f);
  rm_f@ r = x - n * {_LN2[0]} - n * {_LN2[1]}, y = {_horner_text("r", _EXP)} * (r * r) + r + 1.0f;
  rm_i@ e = __builtin_convertvector(rm_vsel@(a == a, n, rm_splat@(0.0f)), rm_i@), half = e >> 1;
  y = y * (rm_f@)((half + 127) << 23) * (rm_f@)((e - half + 127) << 23); /* twice: beyond the normal numbers, too */
  return rm_vsel@(a > 88.7228394f, rm_splat@(RM_INF), y); /* an infinity that a fused multiply-add would not round to */
""",
    "log": f"""
  rm_i@ small = a < 1.17549435e-38f, i = (rm_i@)rm_vsel@(small, a * 8388608.0f, a);
  rm_f@ m = (rm_f@)((i & 0x7fffff) | 0x3f000000);
  rm_i@ low = m < 0.707106781f, e = (i >> 23) - 126 + (small & -23) + low;
  rm_f@ f = rm_vsel@(low, m + m, m) - 1.0f, z = f * f, n = __builtin_convertvector(e, rm_f@);
  rm_f@ r = (f + ({_horner_text("f", _LOG)} * f * z + n * {_LN2[1]} - 0.5f * z)) + n * {_LN2[0]};
  r = rm_vsel@(a == 0.0f, rm_splat@(-RM_INF), rm_vsel@(a < 0.0f, rm_splat@(RM_NAN), r));
  return rm_vsel@((a != a) | (a == RM_INF), a, r);
""",
    "tanh": f"""
  rm_f@ m = rm_vabs@(a), z = a * a;
  rm_f@ far = 1.0f - 2.0f / (rm_vexp@(2.0f * rm_vmin@(m, rm_splat@(10.0f))) + 1.0f);
  rm_f@ r = rm_vsel@(m < 0.625f, m + m * (z * {_horner_text("z", _TANH)}), far);
  return (rm_f@)((rm_i@)r | ((rm_i@)a & (-0x7fffffff - 1)));
""",
    "erf": f"""
  rm_f@ m = rm_vmin@(rm_vabs@(a), rm_splat@(3.95f)), z = m * m;
  rm_f@ far = 1.0f - rm_vexp@(-{_horner_text("m", _ERFC)});
  rm_f@ r = rm_vsel@(m < 0.93f, m + m * {_horner_text("z", _ERF)}, far);
  return (rm_f@)((rm_i@)r | ((rm_i@)a & (-0x7fffffff - 1)));
""",
}
#: Functions in an order in which each uses only earlier ones.
WHOLE: Final = tuple(_BODIES)


def whole_vectors(function: str, width: int) -> str:
    """Return a function of ``WHOLE`` for vectors of ``width`` lanes."""
    text = f"static inline rm_f@ rm_v{function}@(rm_f@ a) {{ {_BODIES[function].strip()} }}\n"
    return text.replace("@", str(width))
