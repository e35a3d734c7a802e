"""Products of floats with weights that are dequantised where they are read: the lowered form of ``StoredMatMul``.

``sum[k] x[.., k] * (float32(code - zero[n, k // block]) * scale[n, k // block])``. Kernel families with quantised weights find
their operands here; all others treat the Compute as an ordinary expression."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.ir import expr as ex
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref

#: Supported bits of a quantised value.
BITS = (8, 4, 2)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The operands of a dequantised product.

    ``x`` are floats, ``codes`` quantised values of ``bits`` bits (``signed`` or not). Values of fewer than 8 bits are packed into
    bytes along axis ``depth``, the first in the lowest bits. ``scale`` and the optional ``zero`` have one value per ``block`` of
    ``depth`` and per element of axis ``column`` (or one for all)."""

    x: Load
    codes: Load
    scale: Load
    zero: Load | None
    bits: int
    signed: bool
    column: str
    depth: str
    block: int

    @property
    def weight(self) -> Expr:
        """The dequantised weight as a float32 expression, by column and position in the sum."""
        number = self._integer_code()
        if self.zero is not None:
            number = Op("sub", (number, Cast("int32", self.zero)))
        return Op("mul", (Cast("float32", number), self.scale))

    @property
    def body(self) -> Expr:
        """The expression that is summed."""
        return Op("mul", (self.x, self.weight))

    def _integer_code(self) -> Expr:
        if self.bits == 8:
            return Cast("int32", self.codes)
        place = Cast("int32", ex.make_mul(ex.make_mod(self.depth, 8 // self.bits), self.bits))
        shifted = Op("shr", (Cast("int32", self.codes), place))
        low = Op("and_", (shifted, Const((1 << self.bits) - 1, "int32")))
        top = Const(1 << self.bits - 1, "int32")
        return Op("sub", (Op("xor", (low, top)), top)) if self.signed else low


def decoded_of(body: Expr, depth: str, extent: int) -> Decoded | None:
    """Return the dequantised product if ``body``, summed over axis ``depth`` of ``extent`` values, has this form, else None."""
    loads = tuple(ex.loads(body))
    if len(loads) not in (3, 4):
        return None
    x, codes, scale, zero = loads[0], loads[1], loads[-1], loads[2] if len(loads) == 4 else None
    if any(len(ld.indices) != 2 or ld.fill is not None for ld in loads[1:]) or x.fill is not None:
        return None
    column = codes.indices[0]
    if not isinstance(column, Ref) or column.axis in ex.axes_of(x) or depth not in ex.axes_of(x):
        return None
    grains = [ld for ld in (scale, zero) if ld is not None]
    blocks = {_block_size(ld.indices[1], depth, extent) for ld in grains}
    if len(blocks) != 1 or 0 in blocks or any(ld.indices[0] not in (column, ex.integer(0)) for ld in grains):
        return None
    for bits in BITS:
        for signed in (False, True):
            found = Decoded(x, codes, scale, zero, bits, signed, column.axis, depth, min(blocks))
            if codes.indices[1] == ex.make_floordiv(depth, 8 // bits) and found.body == body:
                return found
    return None


def _block_size(index: Expr, depth: str, extent: int) -> int:
    """Return the number of values of axis ``depth`` that share one ``index``; 0 if it is not a block number."""
    if index == ex.integer(0):
        return extent
    divisor = index.args[1] if isinstance(index, Op) and index.fn == "floordiv" else ex.integer(1)
    if not isinstance(divisor, Const) or index != ex.make_floordiv(depth, int(divisor.value)):
        return 0
    return int(divisor.value)
