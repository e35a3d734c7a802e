"""Training operators: statistics of a batch, and a step of an optimiser."""

from __future__ import annotations

import math

from rammer.frontend.lower.lowering_registry import Lowering, lowering
from rammer.frontend.lower.operands import make_literal, make_op, whole_load
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr

#: The domain of the optimisers.
PREVIEW = "ai.onnx.preview.training"


def batch_statistics(ctx: Lowering) -> None:
    """Lower BatchNormalization in training mode: the batch's mean and variance also update the running ones."""
    shape, dtype = ctx.shape(ctx.input(0)), ctx.out().dtype
    axes = tuple(Axis("c" if d == 1 else f"i{d}", n) for d, n in enumerate(shape))
    channel = (axes[1],) if len(axes) > 1 else (Axis("c", 1),)
    over = tuple(a for a in axes if a.name != "c")
    count = math.prod(a.extent for a in over)
    working = "float64" if dtype == "float64" else "float32"

    def wide(place: int, *indices: str) -> Expr:
        load = ctx.load(ctx.input(place), *indices)
        return load if ctx.type(load.tensor).dtype == working else Cast(working, load)

    def mean(value: Expr, into: str) -> Expr:
        total = ctx.emit(channel, value, over, "sum", dtype=working, into=f"{into}_sum")
        share = make_op("div", ctx.load(total, "c"), make_literal(max(count, 1), working))
        return ctx.load(ctx.emit(channel, share, dtype=working, into=into), "c")

    x = wide(0, *[a.name for a in axes])
    centre = mean(x, "mean")
    centred = make_op("sub", x, centre)
    spread = mean(make_op("mul", centred, centred), "variance")
    deviation = make_op("sqrt", make_op("add", spread, make_literal(float(ctx.attr("epsilon", 1e-5)), working)))
    y = make_op("add", make_op("mul", make_op("div", centred, deviation), wide(1, "c")), wide(2, "c"))
    ctx.emit(axes, y if working == dtype else Cast(dtype, y), into=0)
    momentum = float(ctx.attr("momentum", 0.9))
    for output, (place, current) in enumerate(((3, centre), (4, spread)), 1):
        if ctx.wants(output):
            kept = make_op("mul", wide(place, "c"), make_literal(momentum, working))
            moved = make_op("add", kept, make_op("mul", current, make_literal(1 - momentum, working)))
            target = ctx.out(output).dtype
            ctx.emit(channel, moved if working == target else Cast(target, moved), into=output)


class _Step:
    """A step of an optimiser over several tensors: the rate, the number of past steps, and each tensor's operands."""

    def __init__(self, ctx: Lowering, kinds: int) -> None:
        self.ctx, self.count = ctx, (len(ctx.node.inputs) - 2) // kinds
        if len(ctx.node.inputs) != 2 + kinds * self.count or len(ctx.node.outputs) != (kinds - 1) * self.count:
            raise ctx.refused(f"{len(ctx.node.inputs) - 2} operands are not {kinds} for each tensor")
        self.dtype = ctx.out().dtype
        self.rate = self.scalar(0)
        self.past = self.scalar(1)

    def scalar(self, place: int) -> Expr:
        """Return the rate or the count in the tensors' type."""
        name = self.ctx.input(place)
        load = self.ctx.load(name, *[0] * len(self.ctx.shape(name)))
        return load if self.ctx.type(name).dtype == self.dtype else Cast(self.dtype, load)

    def number(self, name: str, default: float) -> Expr:
        """Return an attribute as a literal."""
        return make_literal(float(self.ctx.attr(name, default)), self.dtype)

    def axes(self, tensor: int) -> tuple[Axis, ...]:
        """Return the axes of tensor number ``tensor``."""
        return self.ctx.axes(self.ctx.input(2 + tensor))

    def operand(self, kind: int, tensor: int) -> Expr:
        """Return an operand: kind 0 is the tensor, 1 its gradient, others its state."""
        return whole_load(self.ctx, self.ctx.input(2 + kind * self.count + tensor), self.axes(tensor))

    def gradient(self, tensor: int) -> Expr:
        """Return the gradient plus the regularisation term, a multiple of the tensor."""
        return _add_exprs(_multiply_exprs(self.number("norm_coefficient", 0.0), self.operand(0, tensor)), self.operand(1, tensor))

    def emit(self, kind: int, tensor: int, value: Expr) -> Expr:
        """Emit a result and return its load for later results."""
        name = self.ctx.emit(self.axes(tensor), value, dtype=self.dtype, into=kind * self.count + tensor)
        return whole_load(self.ctx, name, self.axes(tensor))


def _add_exprs(a: Expr, b: Expr) -> Expr:
    return make_op("add", a, b)


def _multiply_exprs(a: Expr, b: Expr) -> Expr:
    return make_op("mul", a, b)


@lowering("Adagrad", domain=PREVIEW)
def lower_adagrad(ctx: Lowering) -> None:
    """Lower Adagrad: ``H' = H + G^2; X' = X - R / (1 + T decay) G / (sqrt(H') + epsilon)``."""
    step = _Step(ctx, 3)
    slowed = _add_exprs(make_literal(1, step.dtype), _multiply_exprs(step.past, step.number("decay_factor", 0.0)))
    rate = make_op("div", step.rate, slowed)
    for i in range(step.count):
        gradient = step.gradient(i)
        squares = step.emit(1, i, _add_exprs(step.operand(2, i), _multiply_exprs(gradient, gradient)))
        below = _add_exprs(make_op("sqrt", squares), step.number("epsilon", 1e-6))
        step.emit(0, i, make_op("sub", step.operand(0, i), make_op("div", _multiply_exprs(rate, gradient), below)))


@lowering("Adam", domain=PREVIEW)
def lower_adam(ctx: Lowering) -> None:
    """Lower Adam: moving averages of gradients and of their squares, with a bias-corrected rate."""
    step = _Step(ctx, 4)
    alpha, beta, one = step.number("alpha", 0.9), step.number("beta", 0.999), make_literal(1, step.dtype)
    young = make_op("sqrt", make_op("sub", one, make_op("pow", beta, step.past)))
    grown = make_op("div", _multiply_exprs(step.rate, young), make_op("sub", one, make_op("pow", alpha, step.past)))
    rate = make_op("where", make_op("lt", make_literal(0, step.dtype), step.past), grown, step.rate)
    for i in range(step.count):
        gradient = step.gradient(i)
        mean = step.emit(
            1, i, _add_exprs(_multiply_exprs(alpha, step.operand(2, i)), _multiply_exprs(make_op("sub", one, alpha), gradient))
        )
        kept = _multiply_exprs(beta, step.operand(3, i))
        squares = step.emit(
            2, i, _add_exprs(kept, _multiply_exprs(make_op("sub", one, beta), _multiply_exprs(gradient, gradient)))
        )
        below = _add_exprs(make_op("sqrt", squares), step.number("epsilon", 1e-6))
        moved = make_op("sub", step.operand(0, i), make_op("div", _multiply_exprs(rate, mean), below))
        step.emit(0, i, _multiply_exprs(make_op("sub", one, step.number("norm_coefficient_post", 0.0)), moved))


@lowering("Momentum", domain=PREVIEW)
def lower_momentum(ctx: Lowering) -> None:
    """Lower Momentum: ``V' = alpha V + beta G; X' = X - R V'``, or Nesterov's ``X - R (G + alpha V')``; beta is 1 in the first
    step."""
    step = _Step(ctx, 3)
    alpha, given = step.number("alpha", 0.9), step.number("beta", 1.0)
    beta = make_op("where", make_op("lt", make_literal(0, step.dtype), step.past), given, make_literal(1, step.dtype))
    for i in range(step.count):
        gradient = step.gradient(i)
        speed = step.emit(1, i, _add_exprs(_multiply_exprs(alpha, step.operand(2, i)), _multiply_exprs(beta, gradient)))
        ahead = _add_exprs(gradient, _multiply_exprs(alpha, speed)) if ctx.attr("mode") == "nesterov" else speed
        step.emit(0, i, make_op("sub", step.operand(0, i), _multiply_exprs(step.rate, ahead)))
