"""Numbers of the formats that nothing computes in, from and to their codes, as scalar expressions.

Only integers and bits are used, and one sum of floats that every device rounds alike, so that all devices give the same codes:
those of the nearest numbers, ties to even.
"""

from __future__ import annotations

from rammer.ir.expr import Cast, Const, Expr, Op
from rammer.ir.formats import FloatFormat, Format, IntegerFormat

#: Bits of float32's mantissa, its bias, and the codes of its infinity and of a NaN.
_MANTISSA, _BIAS, _INFINITY, _NAN = 23, 127, 0x7F800000, 0x7FC00000
#: ONNX's ``round_mode`` for formats that are exponents alone.
ROUNDINGS = ("up", "down", "nearest")


def decode(code: Expr, kind: Format) -> Expr:
    """The number that ``code``, an integer of the carrier, stands for: float32, or int32 for an integer."""
    if isinstance(kind, IntegerFormat):
        low = _and(Cast("int32", code), (1 << kind.bits) - 1, "int32")
        if not kind.signed:
            return low
        top = Const(1 << kind.bits - 1, "int32")
        return Op("sub", (Op("xor", (low, top)), top))
    bits = Cast("uint32", code)
    if kind.mantissa == 0:
        return Op("as_float32", (_exponent(bits, kind),))
    if kind.bias == _BIAS:
        return Op("as_float32", (Op("shl", (bits, _u(16))),))
    return Op("as_float32", (Op("or_", (_magnitude(bits, kind), _shifted_sign(bits, kind))),))


def _magnitude(bits: Expr, kind: FloatFormat) -> Expr:
    """float32's code of the number without its sign."""
    absolute = _and(bits, kind.sign - 1)
    shift = _MANTISSA - kind.mantissa
    normal = Op("add", (Op("shl", (absolute, _u(shift))), _u(_BIAS - kind.bias << _MANTISSA)))
    # Below the least normal number, codes count its fractions.
    small = Op("mul", (Cast("float32", absolute), Const(2.0 ** (1 - kind.bias - kind.mantissa))))
    found = _where(_less(absolute, 1 << kind.mantissa), Op("as_uint32", (small,)), normal)
    if kind.infinity is not None:
        found = _where(_equal(absolute, kind.infinity), _u(_INFINITY), found)
    if kind.nan is None:
        return found
    if kind.nan == kind.sign:
        return _where(_equal(_and(bits, 2 * kind.sign - 1), kind.nan), _u(_NAN), found)
    last = kind.greatest if kind.infinity is None else kind.infinity
    return _where(Op("lt", (_u(last), absolute)), _u(_NAN), found)


def _shifted_sign(bits: Expr, kind: FloatFormat) -> Expr:
    return Op("shl", (_and(bits, kind.sign), _u(32 - kind.sign.bit_length())))


def _exponent(bits: Expr, kind: FloatFormat) -> Expr:
    """float32's code of a power of two; the least one is below its normal numbers."""
    normal = Op("shl", (bits, _u(_MANTISSA)))
    found = _where(_equal(bits, 0), _u(1 << _MANTISSA - 1), normal)
    return _where(_equal(bits, kind.nan or 0), _u(_NAN), found)


def encode(x: Expr, source: str, kind: Format, saturate: bool = True, rounding: str = "up") -> Expr:
    """The code of the number of ``kind`` that is nearest to ``x``, which is a ``source``; uint32, or int32 for an integer.

    ``saturate``: a float of 8 bits beyond the greatest number becomes that one, else infinity or NaN. ``rounding`` is about
    formats that are exponents alone.
    """
    if isinstance(kind, IntegerFormat):
        return _and(x if source == "int32" else Cast("int32", x), (1 << kind.bits) - 1, "int32")
    bits = Op("as_uint32", (_single(x, source),))
    if kind.mantissa == 0:
        return _encoded_exponent(bits, kind, saturate, rounding)
    absolute = _and(bits, 0x7FFFFFFF)
    code = _nearest(absolute, kind)
    outside = kind.nan if kind.infinity is None else kind.infinity
    limited = outside is None or (saturate and kind.carrier == "uint8")
    code = _where(Op("lt", (_u(kind.greatest), code)), _u(kind.greatest if limited else outside or 0), code)
    code = _where(Op("lt", (_u(_INFINITY), absolute)), _u(kind.nan or 0), code)
    sign = Op("shr", (_and(bits, 0x80000000), _u(32 - kind.sign.bit_length())))
    if kind.nan != kind.sign:
        return Op("or_", (code, sign))
    # Where the code of -0 is NaN's, neither has a sign.
    return _where(_equal(_and(code, kind.sign - 1), 0), code, Op("or_", (code, sign)))


def _single(x: Expr, source: str) -> Expr:
    """``x`` as float32. A float64 is rounded to an odd code, which no tie has, so that it is rounded once."""
    if source != "float64":
        return x if source == "float32" else Cast("float32", x)
    near = Cast("float32", x)
    bits, back = Op("as_uint32", (near,)), Cast("float64", near)
    beyond = Op("lt", (Op("abs", (x,)), Op("abs", (back,))))
    cut = _where(beyond, Op("sub", (bits, _u(1))), bits)
    exact = Op("or_", (Op("eq", (back, x)), Op("isnan", (x,))))
    return Op("as_float32", (_where(exact, bits, Op("or_", (cut, _u(1)))),))


def _nearest(absolute: Expr, kind: FloatFormat) -> Expr:
    """The code nearest to the number without sign whose float32 code is ``absolute``, as if there were a code for any."""
    drop = _MANTISSA - kind.mantissa
    moved = absolute if kind.bias == _BIAS else Op("sub", (absolute, _u(_BIAS - kind.bias << _MANTISSA)))
    odd = _and(Op("shr", (moved, _u(drop))), 1)
    normal = Op("shr", (Op("add", (Op("add", (moved, _u((1 << drop - 1) - 1))), odd)), _u(drop)))
    if kind.bias == _BIAS:
        return normal
    # Added to a power of two whose neighbours are as far apart as the least numbers of the format, a float rounds to those.
    power = _MANTISSA + 1 - kind.bias - kind.mantissa
    total = Op("add", (Op("as_float32", (absolute,)), Const(2.0**power)))
    small = Op("sub", (Op("as_uint32", (total,)), _u(power + _BIAS << _MANTISSA)))
    return _where(_less(absolute, 1 - kind.bias + _BIAS << _MANTISSA), small, normal)


def _encoded_exponent(bits: Expr, kind: FloatFormat, saturate: bool, rounding: str) -> Expr:
    """A power of two: the next one of greater or less magnitude, or the nearest. NaN where ``x`` is no finite number, as ONNX's
    reference has it, whatever the sign."""
    exponent = _and(Op("shr", (bits, _u(_MANTISSA))), 0xFF)
    fraction = _and(bits, (1 << _MANTISSA) - 1)
    found = exponent
    if rounding != "down":
        half = 1 << _MANTISSA - 1
        more = Op("lt", (_u(0 if rounding == "up" else half - 1), fraction))
        if rounding == "nearest":
            # ONNX's reference takes the even one of two for the least number alone.
            more = _where(_equal(exponent, 0), Op("lt", (_u(half), fraction)), more)
        found = _where(more, Op("add", (exponent, _u(1))), exponent)
        if saturate:
            found = Op("min", (found, _u(kind.greatest)))
    return _where(_equal(exponent, 0xFF), _u(kind.nan or 0), found)


def _u(value: int) -> Const:
    return Const(value, "uint32")


def _and(x: Expr, mask: int, dtype: str = "uint32") -> Op:
    return Op("and_", (x, Const(mask, dtype)))


def _equal(x: Expr, value: int) -> Op:
    return Op("eq", (x, _u(value)))


def _less(x: Expr, value: int) -> Op:
    return Op("lt", (x, _u(value)))


def _where(test: Expr, yes: Expr, no: Expr) -> Op:
    return Op("where", (test, yes, no))
