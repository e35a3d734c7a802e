"""Between numbers and the codes of formats that nothing computes in: what ``frontend.carriers`` puts between other operators."""

from __future__ import annotations

from rammer.frontend.codes import decode, encode
from rammer.frontend.lowering import Lowering, lowering
from rammer.frontend.operands import out_axes, whole_load
from rammer.ir.expr import Cast
from rammer.ir.formats import FORMATS

#: The domain of these operators, which no model can name.
DOMAIN = "rammer"


@lowering("Decode", domain=DOMAIN)
def decoded(ctx: Lowering) -> None:
    """The numbers of the codes, in the type of the result."""
    axes = out_axes(ctx)
    number = decode(whole_load(ctx, ctx.input(0), axes), FORMATS[ctx.attr("format")])
    ctx.emit(axes, Cast(ctx.out().dtype, number), into=0)


@lowering("Encode", domain=DOMAIN)
def encoded(ctx: Lowering) -> None:
    """The codes of the nearest numbers."""
    axes, source = out_axes(ctx), ctx.type(ctx.input(0)).dtype
    x = whole_load(ctx, ctx.input(0), axes)
    saturate, rounding = bool(ctx.attr("saturate", 1)), str(ctx.attr("round_mode", "up"))
    code = encode(x, source, FORMATS[ctx.attr("format")], saturate, rounding)
    ctx.emit(axes, Cast(ctx.out().dtype, code), into=0)
