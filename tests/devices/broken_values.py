"""Executors whose arithmetic has a planted mistake: the toy's program with other expressions, or other values around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rammer.device.manifest import Array, RunResult
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Cast, Const, Expr, Op
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.ir.types import is_float

import rammer_toy


def op(fn: str, *args: Expr) -> Op:
    """Return a scalar operation."""
    return Op(fn, args)


class Rewritten(rammer_toy.ToyProgram):
    """A program whose expressions are rewritten by ``rule``, children first. ``kinds`` are the types of the loaded tensors."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        self.kinds = {n: t.dtype for n, t in program.types.items()}
        super().__init__(replace(program, operators=tuple(map(self.operator, program.operators))), constants, limit)

    def operator(self, operator: ROperator) -> ROperator:
        return replace(operator, computes=tuple(map(self.compute, operator.computes)))

    def compute(self, compute: Compute) -> Compute:
        return replace(compute, body=self.changed(compute.body))

    def changed(self, e: Expr) -> Expr:
        if isinstance(e, ex.Load | ex.Table):
            return e
        kids = tuple(map(self.changed, ex.children(e)))
        return self.rule(ex.rebuild_expr(e, kids) if kids else e)

    def rule(self, e: Expr) -> Expr:
        return e

    def floating(self, e: Expr) -> bool:
        return is_float(ex.dtype_of(e, self.kinds))


class Replaced(Rewritten):
    """A program that replaces functions of floats, or of integers."""

    rules: ClassVar[Mapping[str, Callable[..., Expr]]] = {}
    integers = False

    def rule(self, e: Expr) -> Expr:
        if isinstance(e, Op) and e.fn in self.rules and self.floating(e) is not self.integers:
            return self.rules[e.fn](*e.args)
        return e


def _other(fn: str) -> Callable[[Expr, Expr], Expr]:
    """Return a function that gives the other argument if one is NaN, as C's ``fmax`` and ``fmin``."""
    return lambda a, b: op("where", op("isnan", a), b, op("where", op("isnan", b), a, op(fn, a, b)))


class FMax(Replaced):
    """A program whose maximum and minimum give the other argument if one is NaN."""

    rules = {"max": _other("max"), "min": _other("min")}  # noqa: RUF012


class FMaxReduced(Rewritten):
    """A program whose maximum over an axis skips NaN."""

    def compute(self, compute: Compute) -> Compute:
        if compute.combiner not in ("max", "min") or not self.floating(compute.body):
            return compute
        least = Const(-np.inf if compute.combiner == "max" else np.inf)
        return replace(compute, body=op("where", op("isnan", compute.body), least, compute.body))


class FastMath(Replaced):
    """A program whose arithmetic assumes that NaN and infinities do not occur."""

    rules = {  # noqa: RUF012
        "sub": lambda a, b: Const(0.0) if a == b else op("sub", a, b),
        "mul": lambda a, b: Const(0.0) if Const(0.0) in (a, b) else op("mul", a, b),
        "div": lambda a, b: Const(1.0) if a == b else op("div", a, b),
    }

    def rule(self, e: Expr) -> Expr:
        if isinstance(e, Op) and e.fn in ("isnan", "isinf"):
            return op("lt", Const(1, "int64"), Const(0, "int64"))
        return super().rule(e)


class FastFunctions(Replaced):
    """A program whose functions use textbook formulae. They lose all digits near zero, or overflow."""

    rules = {  # noqa: RUF012
        "tanh": lambda x: op("sub", Const(1.0), op("div", Const(2.0), op("add", op("exp", op("add", x, x)), Const(1.0)))),
        "log1p": lambda x: op("log", op("add", x, Const(1.0))),
        "expm1": lambda x: op("sub", op("exp", x), Const(1.0)),
        "sinh": lambda x: op("div", op("sub", op("exp", x), op("exp", op("neg", x))), Const(2.0)),
    }


class FastPower(Replaced):
    """A program that computes powers by logarithms, without negative bases."""

    rules = {"pow": lambda a, b: op("exp", op("mul", b, op("log", a)))}  # noqa: RUF012


class HalfUp(Replaced):
    """A program that rounds halves up."""

    rules = {"round": lambda x: op("floor", op("add", x, Const(0.5)))}  # noqa: RUF012


class FloorDivision(Replaced):
    """A program that divides integers as Python does."""

    integers = True
    rules = {"div": lambda a, b: op("floordiv", a, b)}  # noqa: RUF012


class RoundingCasts(Rewritten):
    """A program that converts a float to the nearest integer."""

    def rule(self, e: Expr) -> Expr:
        if isinstance(e, Cast) and not is_float(e.dtype) and e.dtype != "bool" and self.floating(e.arg):
            return Cast(e.dtype, op("round", e.arg))
        return e


class ShortIntegers(Rewritten):
    """A program that computes integers of 64 bits in 32."""

    def compute(self, compute: Compute) -> Compute:
        if compute.dtype != "int64":
            return compute
        return replace(compute, body=Cast("int64", Cast("int32", compute.body)))


class Saturates(Rewritten):
    """A program whose sums of small integers saturate."""

    def compute(self, compute: Compute) -> Compute:
        if compute.dtype not in ("uint8", "uint16"):
            return compute
        most = Const(np.iinfo(compute.dtype).max, "int64")
        return replace(compute, body=Cast(compute.dtype, op("min", most, Cast("int64", self.widened(compute.body)))))

    def widened(self, e: Expr) -> Expr:
        return replace(e, args=tuple(Cast("int64", a) for a in e.args)) if isinstance(e, Op) and e.fn == "add" else e


class ShortDoubles(Rewritten):
    """A program that computes float64 in float32."""

    def compute(self, compute: Compute) -> Compute:
        return replace(compute, body=Cast("float64", Cast("float32", compute.body))) if compute.dtype == "float64" else compute


class ShortProducts(Rewritten):
    """A program whose products over an axis skip the last factor."""

    def compute(self, compute: Compute) -> Compute:
        if compute.combiner != "prod":
            return compute
        last = compute.reduce[-1]
        inside = op("lt", ex.Ref(last.name), ex.integer(last.extent - 1))
        return replace(compute, body=op("where", inside, compute.body, Const(1.0)))


class TablesFromOne(Rewritten):
    """A program that reads constant tables one element too far, except for the last."""

    def compute(self, compute: Compute) -> Compute:
        def moved(e: Expr) -> Expr | None:
            return ex.Table((*e.values[1:], e.values[-1]), e.index, e.dtype) if isinstance(e, ex.Table) else None

        return replace(compute, body=ex.transform(compute.body, moved))


class TilesFromZero(rammer_toy.ToyProgram):
    """A program in which an index used as a value counts from the tile's first element."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        def local(o: ROperator) -> ROperator:
            if any(isinstance(e, Cast) and isinstance(e.arg, ex.Ref) for c in o.computes for e in ex.walk(c.body)) and o.tile:
                first = {a.name: op("mod", ex.Ref(a.name), ex.integer(t)) for a, t in zip(o.anchor.axes, o.tile, strict=True)}

                def rule(e: Expr) -> Expr | None:
                    return Cast(e.dtype, first[e.arg.axis]) if isinstance(e, Cast) and isinstance(e.arg, ex.Ref) else None

                return replace(o, computes=tuple(replace(c, body=ex.transform(c.body, rule)) for c in o.computes))
            return o

        super().__init__(replace(program, operators=tuple(map(local, program.operators))), constants, limit)


class Around(rammer_toy.ToyProgram):
    """A program that changes the inputs or outputs of a run."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run({n: self.given(a) for n, a in inputs.items()})
        return replace(result, outputs={n: self.made(a) for n, a in result.outputs.items()})

    def given(self, values: Array) -> Array:
        return values

    def made(self, values: Array) -> Array:
        return values


class CapsInfinity(Around):
    """A program that converts infinities to the largest number."""

    def given(self, values: Array) -> Array:
        return np.clip(values, -3e38, 3e38) if values.dtype == np.float32 else values


class DropsNaN(Around):
    """A program that converts NaN to zero."""

    def given(self, values: Array) -> Array:
        return np.nan_to_num(values, posinf=np.inf, neginf=-np.inf) if values.dtype.kind == "f" else values


class CoarseHalf(Around):
    """A program whose float16 results have seven bits of mantissa, as bfloat16 has."""

    def made(self, values: Array) -> Array:
        if values.dtype != np.float16:
            return values
        bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(values.dtype)


class FlushedHalf(Around):
    """A program that flushes the smallest float16 numbers to zero."""

    def made(self, values: Array) -> Array:
        if values.dtype != np.float16:
            return values
        return np.where(np.abs(values) < 2.0**-14, np.float16(0), values).astype(np.float16)


class CappedHalf(Around):
    """A program that converts float16 overflow to the largest number."""

    def made(self, values: Array) -> Array:
        if values.dtype != np.float16:
            return values
        return np.where(np.isinf(values), np.copysign(np.float16(65504), values), values).astype(np.float16)


class HalfSums(rammer_toy.ToyProgram):
    """A program that accumulates sums of float16 in float16."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        sums = [o for o in self.program.operators if o.main.combiner == "sum" and self.half(o)]
        if not sums:
            return result
        depth = max(int(np.prod([r.extent for r in o.main.reduce])) for o in sums)
        rng = np.random.default_rng(0)  # the error of a random walk of roundings

        def walked(values: Array) -> Array:
            noise = rng.standard_normal(values.shape) * depth**0.5 * 2.0**-12
            return (values.astype(np.float64) * (1 + noise)).astype(values.dtype)

        return replace(result, outputs={n: walked(a) if a.dtype.kind == "f" else a for n, a in result.outputs.items()})

    def half(self, operator: ROperator) -> bool:
        return any(self.program.types[n].dtype == "float16" for n in operator.inputs)


class Tf32(rammer_toy.ToyProgram):
    """A program whose products round their operands to tf32 without permission."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, {n: self.short(a) for n, a in constants.items()}, limit)

    @staticmethod
    def short(values: Array) -> Array:
        if values.dtype != np.float32:
            return values
        return ((values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


class Tails(Rewritten):
    """A program whose sums skip elements that do not fill a vector of four."""

    def compute(self, compute: Compute) -> Compute:
        body = self.changed(compute.body)
        if compute.combiner != "sum" or not is_float(compute.dtype) or compute.reduce[-1].extent < 8:
            return replace(compute, body=body)
        last = compute.reduce[-1]
        inside = op("lt", ex.Ref(last.name), ex.integer(last.extent // 4 * 4))
        return replace(compute, body=op("where", inside, body, Const(0.0)))


class OneUlp(rammer_toy.ToyProgram):
    """A program whose outputs are off by a ten-thousandth."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        result = super().run(inputs)
        return replace(result, outputs={n: (a * np.float32(1.0001)).astype(a.dtype) for n, a in result.outputs.items()})


class Remembers(rammer_toy.ToyProgram):
    """A program whose outputs depend on the number of runs."""

    runs = 0

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        self.runs += 1
        result, scale = super().run(inputs), np.float32(1 + 2e-7 * self.runs)
        return replace(result, outputs={n: (a * scale).astype(a.dtype) for n, a in result.outputs.items()})
