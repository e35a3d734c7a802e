"""LinearAttention: the steps of its state are unrolled; reads of the state are matrix products."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import make_literal, make_op, whole_load
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr, Load
from rammer.ir.piecewise import concat_body


@lowering("LinearAttention")
def linear_attention(ctx: Lowering) -> None:
    """Lower LinearAttention: ``S = exp(g) S + k (x) u; o = scale q S``, with ``u = v``, or ``beta (v -
    S' k)`` for delta rules."""
    net = _Net(ctx)
    state = net.initial()
    shown: list[str] = []
    for step in range(net.steps):
        state = net.next(state, step)
        shown.append(net.read(state, step))
    axes = ctx.axes(ctx.node.outputs[0])
    if shown:
        ctx.emit(axes, net.narrowed(concat_body([(s, 1) for s in shown], axes, 1), 0), into=0)
    else:
        ctx.emit(axes, make_literal(0, ctx.out().dtype), into=0)
    if ctx.wants(1):
        last = ctx.axes(ctx.node.outputs[1])
        ctx.emit(last, net.narrowed(whole_load(ctx, state, last), 1), into=1)


@dataclass(frozen=True)
class _Net:
    """The sizes and operands of a node, which computes in float32 (float64 for float64)."""

    ctx: Lowering

    def __post_init__(self) -> None:
        ctx, query, key, value = self.ctx, self.ctx.shape(self.ctx.input(0)), self.shape(1), self.shape(2)
        heads, shared = self.query_heads, self.heads
        fits = len(query) == len(key) == len(value) == 3 and query[:2] == key[:2] == value[:2]
        if not fits or shared < 1 or heads < 1 or heads % shared or query[2] % heads or key[2] % shared or value[2] % shared:
            raise ctx.refused(f"{heads} and {shared} heads do not match operands of {list(query)}, {list(key)} and {list(value)}")
        if query[2] // heads != self.depth:
            raise ctx.refused(f"queries of {query[2] // heads} elements and keys of {self.depth}")
        if ctx.has(3) and self.shape(3) != (query[0], shared, self.depth, self.width):
            raise ctx.refused(f"a state of {list(self.shape(3))} for {shared} heads of {self.depth} and {self.width} elements")
        for place, wanted, sizes in ((4, self.gated, (shared, shared * self.depth)), (5, self.corrected, (shared, 1))):
            if ctx.has(place) != wanted or (wanted and self.shape(place) not in [(*query[:2], n) for n in sizes]):
                given = list(self.shape(place)) if ctx.has(place) else "nothing"
                raise ctx.refused(f"{'decay' if place == 4 else 'beta'} is {given} where the rule is {self.rule!r}")

    def shape(self, place: int) -> tuple[int, ...]:
        """Return the shape of an input."""
        return self.ctx.shape(self.ctx.input(place))

    @property
    def rule(self) -> str:
        """The update rule: linear, gated, delta or gated_delta."""
        return str(self.ctx.attr("update_rule", "gated_delta"))

    @property
    def gated(self) -> bool:
        """True if the state decays."""
        return self.rule.startswith("gated")

    @property
    def corrected(self) -> bool:
        """True if the state's prediction for the key is subtracted from the value."""
        return self.rule.endswith("delta")

    @property
    def query_heads(self) -> int:
        """The number of query heads; several may share a state."""
        return int(self.ctx.attr("q_num_heads", 0))

    @property
    def heads(self) -> int:
        """The number of heads of keys, values and states."""
        return int(self.ctx.attr("kv_num_heads", 0))

    @property
    def steps(self) -> int:
        """The length of the sequence."""
        return self.shape(0)[1]

    @property
    def depth(self) -> int:
        """The number of elements of a key."""
        return self.shape(1)[2] // self.heads

    @property
    def width(self) -> int:
        """The number of elements of a value."""
        return self.shape(2)[2] // self.heads

    @property
    def working(self) -> str:
        """The type of the state between steps."""
        return "float64" if self.ctx.out().dtype == "float64" else "float32"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the state."""
        return Axis("b", self.shape(0)[0]), Axis("h", self.heads), Axis("d", self.depth), Axis("m", self.width)

    def wide(self, load: Load) -> Expr:
        """Return an operand in the working type."""
        return load if self.ctx.type(load.tensor).dtype == self.working else Cast(self.working, load)

    def narrowed(self, value: Expr, output: int) -> Expr:
        """Return a result in the type of an output."""
        dtype = self.ctx.out(output).dtype
        return value if dtype == self.working else Cast(dtype, value)

    def initial(self) -> str:
        """Return the state before the first step."""
        given = (
            self.wide(whole_load(self.ctx, self.ctx.input(3), self.axes)) if self.ctx.has(3) else make_literal(0, self.working)
        )
        return self.ctx.emit(self.axes, given, dtype=self.working, into="before")

    def operand(self, place: int, step: int, element: Expr | str, size: int) -> Expr:
        """Return input ``place`` at a step: ``element`` of the head's ``size`` elements."""
        return self.wide(self.ctx.load(self.ctx.input(place), "b", step, ex.make_add(ex.make_mul("h", size), element)))

    def next(self, state: str, step: int) -> str:
        """Return the state after ``step``."""
        ctx, old = self.ctx, whole_load(self.ctx, state, self.axes)
        key, value = self.operand(1, step, "d", self.depth), self.operand(2, step, "m", self.width)
        kept: Expr = old
        if self.gated:
            whole = self.shape(4)[2] == self.heads
            decay = self.operand(4, step, ex.integer(0) if whole else "d", 1 if whole else self.depth)
            kept = make_op("mul", old, make_op("exp", decay))
        if self.corrected:
            if self.gated:
                kept = whole_load(ctx, ctx.emit(self.axes, kept, dtype=self.working, into=f"kept{step}"), self.axes)
            batch, head, each, column = self.axes
            given = ctx.emit(
                (batch, head, column), make_op("mul", kept, key), (each,), "sum", dtype=self.working, into=f"given{step}"
            )
            share = self.operand(5, step, ex.integer(0), 1 if self.shape(5)[2] == self.heads else 0)
            value = make_op("mul", share, make_op("sub", value, ctx.load(given, "b", "h", "m")))
        return ctx.emit(self.axes, make_op("add", kept, make_op("mul", key, value)), dtype=self.working, into=f"state{step}")

    def read(self, state: str, step: int) -> str:
        """Return the values that a step's queries read, ``[b, 1, h * m]``."""
        ctx, (batch, _, each, column) = self.ctx, self.axes
        scale = float(self.ctx.attr("scale", 0.0)) or 1.0 / math.sqrt(self.depth)
        heads = Axis("h", self.query_heads)
        asked = make_op("mul", self.operand(0, step, "d", self.depth), make_literal(scale, self.working))
        query = ctx.emit((batch, heads, each), asked, dtype=self.working, into=f"query{step}")
        found = ctx.load(state, "b", ex.make_floordiv("h", self.query_heads // self.heads), "d", "m")
        body = make_op("mul", ctx.load(query, "b", "h", "d"), found)
        result = ctx.emit((batch, heads, column), body, (each,), "sum", dtype=self.working, into=f"read{step}")
        flat = (batch, Axis("t", 1), Axis("x", heads.extent * self.width))
        shown = ctx.load(result, "b", ex.make_floordiv("x", self.width), ex.make_mod("x", self.width))
        return ctx.emit(flat, shown, into=f"shown{step}")
