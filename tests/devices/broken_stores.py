"""Executors with a planted mistake in loads, stores or addresses of elements: the toy's program, task by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from broken_values import Rewritten, op
from numpy.lib.stride_tricks import as_strided

from rammer.device.manifest import Array, RunResult
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Const, Expr, Load, Op
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram, Storage
from rammer.runtime.host_memory import evaluate_task, storage_view

import rammer_toy

# --- rounding of float16 ----------------------------------------------------------------------------


class Stores(rammer_toy.ToyProgram):
    """A program that changes results where a task stores them. Results of float16 are float32 until then."""

    def run_row(self, tasks: list[tuple[ROperator, int]]) -> None:
        for operator, index in tasks:
            wide = (replace(c, dtype="float32") if c.dtype == "float16" else c for c in operator.computes)
            for name, (box, values) in evaluate_task(replace(operator, computes=tuple(wide)), index, self.read(operator)).items():
                target = self.memory.tensors[name]
                with np.errstate(all="ignore"):
                    target[tuple(slice(low, high) for low, high in box)] = self.stored(operator, values, target.dtype)

    def read(self, operator: ROperator) -> Mapping[str, Array]:
        """Return the tensors that ``operator`` reads."""
        return self.memory.tensors

    def stored(self, operator: ROperator, values: Array, dtype: Any) -> Array:
        """Return the values to be stored."""
        return self.half(values) if dtype == np.float16 and values.dtype == np.float32 else values

    def half(self, values: Array) -> Array:
        """Return values rounded to float16."""
        return values.astype(np.float16)


def around(values: Array) -> tuple[Array, Array, Array]:
    """Return the float16 numbers below and above, and each value's relative position between them."""
    near = values.astype(np.float16)
    below = np.where(near > values, np.nextafter(near, np.float16(-np.inf)), near)
    above = np.where(below == values, below, np.nextafter(below, np.float16(np.inf)))
    step = above.astype(np.float64) - below
    part = np.where(step > 0, (values - below.astype(np.float64)) / np.where(step > 0, step, 1), 0)
    return below, above, part


class Directed(Stores):
    """A program that rounds up where ``up`` is true. Its arguments are the values, the numbers below, and the positions between
    the numbers."""

    up: ClassVar[Callable[..., Array]]

    def half(self, values: Array) -> Array:
        below, above, part = around(values)
        chosen = np.where(type(self).up(values, below, part), above, below)
        return np.where(np.isfinite(values) & np.isfinite(chosen), chosen, values.astype(np.float16)).astype(np.float16)


def rounds(up: Callable[..., Array]) -> type[Directed]:
    """Return a device that rounds float16 by ``up``."""
    return type("Rounds", (Directed,), {"up": staticmethod(up)})


def _odd(numbers: Array) -> Array:
    return (numbers.astype(np.float16).view(np.uint16) & 1).astype(bool)


TRUNCATES = rounds(lambda v, below, part: (v < 0) & (part > 0))
FLOORS = rounds(lambda v, below, part: np.zeros(v.shape, bool))
CEILS = rounds(lambda v, below, part: part > 0)
TIES_UP = rounds(lambda v, below, part: part >= 0.5)
TIES_DOWN = rounds(lambda v, below, part: part > 0.5)
TIES_AWAY = rounds(lambda v, below, part: np.where(v < 0, part > 0.5, part >= 0.5))
TIES_TO_ZERO = rounds(lambda v, below, part: np.where(v < 0, part >= 0.5, part > 0.5))
TIES_TO_ODD = rounds(lambda v, below, part: np.where(part == 0.5, ~_odd(below), part > 0.5))


class TruncatesSums(TRUNCATES):  # type: ignore[misc,valid-type]
    """A program that truncates only sums."""

    def stored(self, operator: ROperator, values: Array, dtype: Any) -> Array:
        return super().stored(operator, values, dtype) if operator.main.combiner == "sum" else values


class TruncatesTails(TRUNCATES):  # type: ignore[misc,valid-type]
    """A program that truncates only elements that do not fill a vector of eight."""

    def half(self, values: Array) -> Array:
        found = values.astype(np.float16)
        found[..., values.shape[-1] // 8 * 8 :] = super().half(values)[..., values.shape[-1] // 8 * 8 :]
        return found


class Saturates(Stores):
    """A program that converts overflow to the largest float16 number."""

    def half(self, values: Array) -> Array:
        return np.clip(values, -65504, 65504).astype(np.float16)


# --- subnormal numbers ------------------------------------------------------------------------------

TINY: Mapping[Any, float] = {np.dtype(np.float32): 2.0**-126, np.dtype(np.float16): 2.0**-14}


def flushed(values: Array) -> Array:
    """Return ``values`` with subnormal numbers as zero."""
    tiny = TINY.get(values.dtype)
    return values if tiny is None else np.where(np.abs(values) < tiny, values.dtype.type(0), values)


class FlushesStores(Stores):
    """A program that flushes subnormal float32 results to zero."""

    def stored(self, operator: ROperator, values: Array, dtype: Any) -> Array:
        return (
            flushed(super().stored(operator, values, dtype)) if dtype == np.float32 else super().stored(operator, values, dtype)
        )


class FlushesLoads(Stores):
    """A program that reads subnormal float32 operands as zero."""

    def read(self, operator: ROperator) -> Mapping[str, Array]:
        kinds = self.memory.tensors
        return {n: flushed(a) if n in operator.inputs and a.dtype == np.float32 else a for n, a in kinds.items()}


class FlushesSums(FlushesLoads):
    """A program whose reductions read subnormal operands as zero."""

    def read(self, operator: ROperator) -> Mapping[str, Array]:
        return super().read(operator) if operator.main.kind == "reduction" else self.memory.tensors


class FlushesHalves(Stores):
    """A program that reads subnormal float16 operands as zero."""

    def read(self, operator: ROperator) -> Mapping[str, Array]:
        kinds = self.memory.tensors
        return {n: flushed(a) if n in operator.inputs and a.dtype == np.float16 else a for n, a in kinds.items()}


# --- strides ----------------------------------------------------------------------------------------


def inside(storage: Storage, size: int) -> Storage | None:
    """Return ``storage`` moved into a buffer of ``size`` elements, or None if it is larger."""
    low, high = storage.span()
    moved = replace(storage, offset=storage.offset - min(0, low) - max(0, high - size))
    return moved if moved.span()[0] >= 0 and moved.span()[1] <= size else None


class Strides(rammer_toy.ToyProgram):
    """A program that looks for tensors at wrong addresses."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        super().__init__(program, constants, limit)
        written = {t for o in program.operators for t in o.outputs}
        for s in program.storages:
            flat = self.memory.buffers[s.buffer]
            other = inside(self.moved(s, s.tensor in written), flat.size)
            if other is not None and other != s:
                self.memory.tensors[s.tensor] = storage_view(flat, other)

    def moved(self, storage: Storage, written: bool) -> Storage:
        """Return the assumed storage of the tensor."""
        return storage


def dense_strides(storage: Storage) -> tuple[int, ...]:
    """Return the strides of a dense tensor of the same shape."""
    return tuple(int(np.prod(storage.shape[i + 1 :])) for i in range(len(storage.shape)))


class NegativeAsPositive(Strides):
    """A program that ignores the sign of strides and starts at the first element."""

    def moved(self, storage: Storage, written: bool) -> Storage:
        return replace(storage, strides=tuple(map(abs, storage.strides)))


class NegativeFromLowest(Strides):
    """A program that ignores the sign of strides and starts at the lowest element."""

    def moved(self, storage: Storage, written: bool) -> Storage:
        return replace(storage, offset=storage.span()[0], strides=tuple(map(abs, storage.strides)))


class NegativeInner(Strides):
    """A program that ignores the sign of the last stride if a tensor has several axes."""

    def moved(self, storage: Storage, written: bool) -> Storage:
        if len(storage.strides) < 2 or storage.strides[-1] >= 0:
            return storage
        low = storage.offset + storage.strides[-1] * (storage.shape[-1] - 1)
        return replace(storage, offset=low, strides=(*storage.strides[:-1], -storage.strides[-1]))


class NegativeResults(NegativeFromLowest):
    """A program with the mistake of ``NegativeFromLowest`` for results only."""

    def moved(self, storage: Storage, written: bool) -> Storage:
        return super().moved(storage, written) if written else storage


class RepeatedAsDense(Strides):
    """A program that replaces a stride of zero by that of a dense tensor."""

    def moved(self, storage: Storage, written: bool) -> Storage:
        dense = dense_strides(storage)
        return replace(storage, strides=tuple(d if s == 0 else s for s, d in zip(storage.strides, dense, strict=True)))


class RowsAsDense(Strides):
    """A program that assumes contiguous rows."""

    def moved(self, storage: Storage, written: bool) -> Storage:
        wide = len(storage.strides) > 1 and storage.strides[-1] == 1
        return replace(storage, strides=dense_strides(storage)) if wide else storage


class TurnedAsDense(Strides):
    """A program that treats a transposed tensor as dense."""

    def moved(self, storage: Storage, written: bool) -> Storage:
        turned = len(storage.strides) > 1 and 1 == storage.strides[0] < storage.strides[-1]
        return replace(storage, strides=dense_strides(storage)) if turned else storage


class NarrowAtEven(Strides):
    """A program that reads elements of a byte from even offsets."""

    def moved(self, storage: Storage, written: bool) -> Storage:
        byte = self.memory.buffers[storage.buffer].itemsize == 1
        return replace(storage, offset=storage.offset // 2 * 2) if byte else storage


class Operand(Stores):
    """A program that treats one operand of a kind of operator as dense."""

    kind, number = "contraction", 1

    def read(self, operator: ROperator) -> Mapping[str, Array]:
        if operator.main.kind != self.kind or len(operator.inputs) <= self.number:
            return self.memory.tensors
        name = operator.inputs[self.number]
        storage = self.program.storage[name]
        flat = self.memory.buffers[storage.buffer]
        other = inside(replace(storage, strides=dense_strides(storage)), flat.size)
        return self.memory.tensors if other is None else {**self.memory.tensors, name: storage_view(flat, other)}


def dense_operand(kind: str, number: int) -> type[Operand]:
    """Return a device that treats an operand as dense."""
    return type("DenseOperand", (Operand,), {"kind": kind, "number": number})


class ReversedRuns(rammer_toy.ToyProgram):
    """A program whose ``run`` copies inputs with negative strides in memory order."""

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        return super().run({n: self.forwards(a) for n, a in inputs.items()})

    @staticmethod
    def forwards(values: Array) -> Array:
        """Return the memory of an array from its lowest element on."""
        if not any(s < 0 for s in values.strides):
            return values
        lowest = values[tuple(slice(None, None, -1 if s < 0 else 1) for s in values.strides)]
        return as_strided(lowest, values.shape, lowest.strides)


# --- lanes ------------------------------------------------------------------------------------------


class Lanes(Rewritten):
    """A program whose reductions skip elements of a row by ``out``, of the index and the row's length."""

    combiners: ClassVar[tuple[str, ...]] = ("max",)
    out: ClassVar[Callable[..., Expr]]
    kinds_left: ClassVar[tuple[str, ...]] = ("float32", "float16", "int8")

    def compute(self, compute: Compute) -> Compute:
        if compute.combiner not in self.combiners or compute.dtype not in self.kinds_left:
            return compute
        last = compute.reduce[-1]
        least = {"max": -np.inf, "min": np.inf, "sum": 0.0, "prod": 1.0}[compute.combiner]
        if compute.dtype == "int8":
            least = -128 if compute.combiner == "max" else 127 if compute.combiner == "min" else least
        skipped = type(self).out(ex.Ref(last.name), last.extent)
        empty = Const(int(least), "int64") if compute.dtype == "int8" else Const(least)
        kept = ex.Cast(compute.dtype, empty) if compute.dtype == "int8" else empty
        return replace(compute, body=op("where", skipped, kept, compute.body))


def lanes(out: Callable[..., Expr], *combiners: str) -> type[Lanes]:
    """Return a device that skips elements of reductions."""
    return type("LeavesOut", (Lanes,), {"out": staticmethod(out), "combiners": combiners or ("max",)})


def at(k: Expr, place: int, of: int) -> Expr:
    """Return the condition for lane ``place`` of each vector of ``of`` elements."""
    return op("eq", op("mod", k, ex.integer(of)), ex.integer(place))


def from_on(k: Expr, first: int) -> Expr:
    """Return the condition for indices from ``first`` on."""
    return op("le", ex.integer(first), k)


NEVER = op("lt", Const(1, "int64"), Const(0, "int64"))
LAST_LANE = lanes(lambda k, n: at(k, 3, 4) if n >= 4 else NEVER)
FIRST_LANE = lanes(lambda k, n: at(k, 0, 8) if n > 8 else NEVER)
TAIL_OF_MAXIMUM = lanes(lambda k, n: from_on(k, n // 8 * 8) if n >= 8 else NEVER, "max", "min")
LAST_OF_MINIMUM = lanes(lambda k, n: from_on(k, n - 1) if n > 1 else NEVER, "min")
MIDDLE_OF_LONG = lanes(lambda k, n: op("eq", k, ex.integer(n // 2)) if n > 256 else NEVER)
WARP_LANE = lanes(lambda k, n: at(k, 31, 32) if n >= 32 else NEVER)
LANE_OF_SUM = lanes(lambda k, n: at(k, 5, 8) if n % 8 == 0 else NEVER, "sum")
LANE_OF_PRODUCT = lanes(lambda k, n: from_on(k, n - n % 4) if n > 4 else NEVER, "prod")


class ElementLane(Rewritten):
    """A program whose maximum returns the first operand in the third lane of a vector."""

    def compute(self, compute: Compute) -> Compute:
        if compute.reduce or not compute.axes or not isinstance(compute.body, Op) or compute.body.fn != "max":
            return compute
        a, _ = compute.body.args
        return replace(compute, body=op("where", at(ex.Ref(compute.axes[-1].name), 2, 4), a, compute.body))


# --- narrow integers --------------------------------------------------------------------------------


class Pairs(Rewritten):
    """A program that changes loads of narrow elements."""

    narrow: ClassVar[tuple[str, ...]] = ("int8", "uint8", "bool")

    def __init__(self, program: RProgram, constants: Mapping[str, Array], limit: int) -> None:
        self.shapes = {n: t.shape for n, t in program.types.items()}
        super().__init__(program, constants, limit)

    def compute(self, compute: Compute) -> Compute:
        def rule(e: Expr) -> Expr | None:
            if (
                isinstance(e, Load)
                and self.kinds.get(e.tensor) in self.narrow
                and self.shapes[e.tensor]
                and not ex.has_loads(e.indices[-1])
            ):
                return self.loaded(e, self.shapes[e.tensor][-1])
            return None

        return replace(compute, body=ex.transform(compute.body, rule))

    def loaded(self, load: Load, length: int) -> Expr:
        """Return the expression that replaces a load from a row of ``length``."""
        return load


def _last_index(load: Load, index: Expr) -> Load:
    return replace(load, indices=(*load.indices[:-1], index))


class FirstOfPair(Pairs):
    """A program that reads the first of a pair for both."""

    def loaded(self, load: Load, length: int) -> Expr:
        last = load.indices[-1]
        return _last_index(load, op("sub", last, op("mod", last, ex.integer(2))))


class OddEnd(Pairs):
    """A program that reads the last element of an odd row as the one before it."""

    def loaded(self, load: Load, length: int) -> Expr:
        last = load.indices[-1]
        return _last_index(load, op("min", last, ex.integer(max(0, length // 2 * 2 - 1)))) if length > 1 else load


class Swapped(Pairs):
    """A program that swaps the two of a pair, except at the end of an odd row."""

    def loaded(self, load: Load, length: int) -> Expr:
        last = load.indices[-1]
        other = op("add", last, op("sub", ex.integer(1), op("mul", ex.integer(2), op("mod", last, ex.integer(2)))))
        return _last_index(load, op("where", op("lt", other, ex.integer(length)), other, last))


class ShortOdd(OddEnd):
    """A program with the mistake of ``OddEnd`` for two-byte elements, which are read four bytes at a time."""

    narrow = ("int16", "uint16", "float16")


class PairStores(Stores):
    """A program that stores byte elements in pairs, also past an odd end."""

    def run_row(self, tasks: list[tuple[ROperator, int]]) -> None:
        super().run_row(tasks)
        for name in {n for operator, _ in tasks for n in operator.outputs}:
            storage = self.program.storage[name]
            flat, end = self.memory.buffers[storage.buffer], storage.span()[1]
            if flat.itemsize == 1 and storage.shape and storage.shape[-1] % 2:
                flat[end : end + 1] = 0


class DropsByteTail(Rewritten):
    """A program whose products of bytes skip elements that do not fill a group of four."""

    def compute(self, compute: Compute) -> Compute:
        names = {ld.tensor for ld in ex.loads(compute.body)}
        if compute.combiner != "sum" or not any(self.kinds.get(n) in ("int8", "uint8") for n in names):
            return compute
        last = compute.reduce[-1]
        inside_of = op("lt", ex.Ref(last.name), ex.integer(last.extent // 4 * 4))
        return replace(compute, body=op("where", inside_of, compute.body, ex.Cast(compute.dtype, Const(0, "int64"))))
