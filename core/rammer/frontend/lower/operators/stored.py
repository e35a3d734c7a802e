"""Conversions between numbers and codes of emulated formats, which ``frontend.lower.emulated_types`` inserts."""

from __future__ import annotations

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import out_axes, whole_load
from rammer.frontend.lower.type_codecs import decode_expr, encode_expr
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.dequantized_product import Decoded
from rammer.ir.expr import Cast, Load
from rammer.ir.formats import FORMATS

#: The domain of these operators, which models cannot name.
DOMAIN = "rammer"


@lowering("Decode", domain=DOMAIN)
def lower_decode(ctx: Lowering) -> None:
    """Lower Decode: the numbers of the codes, in the type of the result."""
    axes = out_axes(ctx)
    number = decode_expr(whole_load(ctx, ctx.input(0), axes), FORMATS[ctx.attr("format")])
    ctx.emit(axes, Cast(ctx.out().dtype, number), into=0)


@lowering("Encode", domain=DOMAIN)
def lower_encode(ctx: Lowering) -> None:
    """Lower Encode: the codes of the nearest numbers."""
    axes, source = out_axes(ctx), ctx.type(ctx.input(0)).dtype
    x = whole_load(ctx, ctx.input(0), axes)
    saturate, rounding = bool(ctx.attr("saturate", 1)), str(ctx.attr("round_mode", "up"))
    code = encode_expr(x, source, FORMATS[ctx.attr("format")], saturate, rounding)
    ctx.emit(axes, Cast(ctx.out().dtype, code), into=0)


@lowering("StoredMatMul", domain=DOMAIN)
def stored_matmul(ctx: Lowering) -> None:
    """Lower StoredMatMul: ``sum[k] x[.., k] * ((number(codes[n, k]) - zero[n, k // block]) * scale[n, k // block])``. Codes of
    fewer than 8 bits are packed along ``k``, the first one in the lowest bits of a byte."""
    x, codes, scale = (ctx.input(i) for i in range(3))
    bits, block, shape = int(ctx.attr("bits")), int(ctx.attr("block")), ctx.out().shape
    axes, inner = tuple(Axis(f"i{d}", n) for d, n in enumerate(shape)), Axis("k", ctx.shape(x)[-1])
    rows, column = [a.name for a in axes[:-1]], axes[-1].name

    def grain(name: str) -> Load:
        columns, blocks = ctx.shape(name)
        return ctx.load(name, column if columns > 1 else 0, ex.make_floordiv("k", block) if blocks > 1 else 0)

    product = Decoded(
        ctx.load(x, *rows, "k"),
        ctx.load(codes, column, ex.make_floordiv("k", 8 // bits)),
        grain(scale),
        grain(ctx.input(3)) if ctx.has(3) else None,
        bits,
        bool(ctx.attr("signed")) and bits < 8,
        column,
        "k",
        block,
    )
    ctx.emit(axes, product.body, (inner,), "sum", into=0)
