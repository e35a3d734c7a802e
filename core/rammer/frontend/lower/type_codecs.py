"""Conversion of emulated formats: numbers from and to their codes, as scalar expressions. Only integers, bits and one float sum
with equal rounding on every device are used. All devices thus give the same codes: those of the nearest numbers, ties to even."""

from __future__ import annotations

from rammer.ir.expr import Cast, Const, Expr, Op
from rammer.ir.formats import FloatFormat, Format, IntegerFormat

#: Mantissa bits and bias of float32, and the codes of infinity and of a NaN.
_MANTISSA, _BIAS, _INFINITY, _NAN = 23, 127, 0x7F800000, 0x7FC00000
#: ONNX's ``round_mode`` for formats with only an exponent.
ROUNDINGS = ("up", "down", "nearest")


def decode_expr(code: Expr, kind: Format) -> Expr:
    """Return the number of ``code``, an integer of the carrier: float32, or int32 for an integer format."""
    if isinstance(kind, IntegerFormat):
        low = _mask_bits(Cast("int32", code), (1 << kind.bits) - 1, "int32")
        if not kind.signed:
            return low
        top = Const(1 << kind.bits - 1, "int32")
        return Op("sub", (Op("xor", (low, top)), top))
    bits = Cast("uint32", code)
    if kind.mantissa == 0:
        return Op("as_float32", (_decode_exponent(bits, kind),))
    if kind.bias == _BIAS:
        return Op("as_float32", (Op("shl", (bits, _uint32_literal(16))),))
    return Op("as_float32", (Op("or_", (_decode_magnitude(bits, kind), _shifted_sign(bits, kind))),))


def _decode_magnitude(bits: Expr, kind: FloatFormat) -> Expr:
    """Return the float32 code of the number without its sign."""
    absolute = _mask_bits(bits, kind.sign - 1)
    shift = _MANTISSA - kind.mantissa
    normal = Op("add", (Op("shl", (absolute, _uint32_literal(shift))), _uint32_literal(_BIAS - kind.bias << _MANTISSA)))
    # Below the least normal number, codes count fractions of it.
    small = Op("mul", (Cast("float32", absolute), Const(2.0 ** (1 - kind.bias - kind.mantissa))))
    found = _select_expr(_less_than(absolute, 1 << kind.mantissa), Op("as_uint32", (small,)), normal)
    if kind.infinity is not None:
        found = _select_expr(_equals_value(absolute, kind.infinity), _uint32_literal(_INFINITY), found)
    if kind.nan is None:
        return found
    if kind.nan == kind.sign:
        return _select_expr(_equals_value(_mask_bits(bits, 2 * kind.sign - 1), kind.nan), _uint32_literal(_NAN), found)
    last = kind.greatest if kind.infinity is None else kind.infinity
    return _select_expr(Op("lt", (_uint32_literal(last), absolute)), _uint32_literal(_NAN), found)


def _shifted_sign(bits: Expr, kind: FloatFormat) -> Expr:
    return Op("shl", (_mask_bits(bits, kind.sign), _uint32_literal(32 - kind.sign.bit_length())))


def _decode_exponent(bits: Expr, kind: FloatFormat) -> Expr:
    """Return the float32 code of a power of two; the least one is below float32's normal numbers."""
    normal = Op("shl", (bits, _uint32_literal(_MANTISSA)))
    found = _select_expr(_equals_value(bits, 0), _uint32_literal(1 << _MANTISSA - 1), normal)
    return _select_expr(_equals_value(bits, kind.nan or 0), _uint32_literal(_NAN), found)


def encode_expr(x: Expr, source: str, kind: Format, saturate: bool = True, rounding: str = "up") -> Expr:
    """Return the code of the number of ``kind`` nearest to ``x``, which has type ``source``.

    The result is uint32, or int32 for an integer format. ``saturate``: an 8-bit float beyond the greatest number becomes that
    number, else infinity or NaN. ``rounding`` applies to formats with only an exponent."""
    if isinstance(kind, IntegerFormat):
        return _mask_bits(x if source == "int32" else Cast("int32", x), (1 << kind.bits) - 1, "int32")
    bits = Op("as_uint32", (_to_float32(x, source),))
    if kind.mantissa == 0:
        return _encoded_exponent(bits, kind, saturate, rounding)
    absolute = _mask_bits(bits, 0x7FFFFFFF)
    code = _round_magnitude(absolute, kind)
    outside = kind.nan if kind.infinity is None else kind.infinity
    limited = outside is None or (saturate and kind.carrier == "uint8")
    code = _select_expr(
        Op("lt", (_uint32_literal(kind.greatest), code)), _uint32_literal(kind.greatest if limited else outside or 0), code
    )
    code = _select_expr(Op("lt", (_uint32_literal(_INFINITY), absolute)), _uint32_literal(kind.nan or 0), code)
    sign = Op("shr", (_mask_bits(bits, 0x80000000), _uint32_literal(32 - kind.sign.bit_length())))
    if kind.nan != kind.sign:
        return Op("or_", (code, sign))
    # If the code of -0 is NaN's, neither has a sign.
    return _select_expr(_equals_value(_mask_bits(code, kind.sign - 1), 0), code, Op("or_", (code, sign)))


def _to_float32(x: Expr, source: str) -> Expr:
    """Return ``x`` as float32. A float64 is first rounded to an odd code, which is never a tie, so it is rounded only once."""
    if source != "float64":
        return x if source == "float32" else Cast("float32", x)
    near = Cast("float32", x)
    bits, back = Op("as_uint32", (near,)), Cast("float64", near)
    beyond = Op("lt", (Op("abs", (x,)), Op("abs", (back,))))
    cut = _select_expr(beyond, Op("sub", (bits, _uint32_literal(1))), bits)
    exact = Op("or_", (Op("eq", (back, x)), Op("isnan", (x,))))
    return Op("as_float32", (_select_expr(exact, bits, Op("or_", (cut, _uint32_literal(1)))),))


def _round_magnitude(absolute: Expr, kind: FloatFormat) -> Expr:
    """Return the code nearest to the unsigned number with float32 code ``absolute``, as if the format were unbounded."""
    drop = _MANTISSA - kind.mantissa
    moved = absolute if kind.bias == _BIAS else Op("sub", (absolute, _uint32_literal(_BIAS - kind.bias << _MANTISSA)))
    odd = _mask_bits(Op("shr", (moved, _uint32_literal(drop))), 1)
    normal = Op("shr", (Op("add", (Op("add", (moved, _uint32_literal((1 << drop - 1) - 1))), odd)), _uint32_literal(drop)))
    if kind.bias == _BIAS:
        return normal
    # Adding a power of two whose float spacing is the format's least number rounds a float to multiples of that number.
    power = _MANTISSA + 1 - kind.bias - kind.mantissa
    total = Op("add", (Op("as_float32", (absolute,)), Const(2.0**power)))
    small = Op("sub", (Op("as_uint32", (total,)), _uint32_literal(power + _BIAS << _MANTISSA)))
    return _select_expr(_less_than(absolute, 1 - kind.bias + _BIAS << _MANTISSA), small, normal)


def _encoded_exponent(bits: Expr, kind: FloatFormat, saturate: bool, rounding: str) -> Expr:
    """Return the code of a power of two: the next of greater or less magnitude, or the nearest. It is NaN if ``x`` is not finite,
    as in ONNX's reference, for either sign."""
    exponent = _mask_bits(Op("shr", (bits, _uint32_literal(_MANTISSA))), 0xFF)
    fraction = _mask_bits(bits, (1 << _MANTISSA) - 1)
    found = exponent
    if rounding != "down":
        half = 1 << _MANTISSA - 1
        more = Op("lt", (_uint32_literal(0 if rounding == "up" else half - 1), fraction))
        if rounding == "nearest":
            # ONNX's reference rounds ties to even only at the least number.
            more = _select_expr(_equals_value(exponent, 0), Op("lt", (_uint32_literal(half), fraction)), more)
        found = _select_expr(more, Op("add", (exponent, _uint32_literal(1))), exponent)
        if saturate:
            found = Op("min", (found, _uint32_literal(kind.greatest)))
    return _select_expr(_equals_value(exponent, 0xFF), _uint32_literal(kind.nan or 0), found)


def _uint32_literal(value: int) -> Const:
    return Const(value, "uint32")


def _mask_bits(x: Expr, mask: int, dtype: str = "uint32") -> Op:
    return Op("and_", (x, Const(mask, dtype)))


def _equals_value(x: Expr, value: int) -> Op:
    return Op("eq", (x, _uint32_literal(value)))


def _less_than(x: Expr, value: int) -> Op:
    return Op("lt", (x, _uint32_literal(value)))


def _select_expr(test: Expr, yes: Expr, no: Expr) -> Op:
    return Op("where", (test, yes, no))
