"""TopK: the largest or smallest elements along an axis, in order, as counts of how many come before.

Every element gets a whole number that orders as it does (``_keys``), its place among the equal ones included, so that no two are
the same. A short axis counts for each element how many are before it. Of a long one the k-th key is found four bits at a time,
by counting how many keys reach each of 15 bounds; what reaches it is gathered by the counts of blocks, and only that is
ordered. NaN is the largest number, as in NumPy and torch; of equal elements the first one comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from rammer.frontend.lower.lowering_registry import CannotLower, Lowering, lowering
from rammer.frontend.lower.operands import axis_of, make_literal, make_op
from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Cast, Expr, Load
from rammer.ir.types import is_float, itemsize

#: Most steps of all counts together; the host sorts more.
MOST_STEPS: Final = 1 << 29
#: An axis up to this length is ordered as a whole.
SHORT_AXIS: Final = 512
#: Elements of a block whose chosen ones are counted, and bits of a key that are found at a time.
BLOCK: Final = 64
DIGIT: Final = 4
#: An axis this many times as long as what is chosen of it is looked through by blocks first.
SPARSE: Final = 16
#: An expression at the axis of this name.
_Value: TypeAlias = Callable[[str], Expr]


@lowering("TopK")
def top_k(ctx: Lowering) -> None:
    """Values and indices of the ``k`` largest (``largest=0``: smallest) elements along ``axis``, in order."""
    known = ctx.static(1, "k") if ctx.has(1) else None
    if known is None:
        raise CannotLower("TopK without its k")
    shape, count = ctx.shape(ctx.input(0)), int(known.item())
    row = _Row(ctx, axis_of(ctx, int(ctx.attr("axis", -1)), len(shape)))
    wide = itemsize(ctx.type(ctx.input(0)).dtype) == 8
    _check_steps(ctx, row, count, wide)
    if count == 0 or 0 in shape:
        for place in (p for p in (0, 1) if ctx.wants(p)):
            ctx.emit(ctx.axes(ctx.node.outputs[place]), make_literal(0, ctx.out(place).dtype), into=place)
        return
    if row.extent <= SHORT_AXIS or wide:
        before = row.before_wide(row.wide_keys()) if wide else row.before(row.keys())
        index = row.inverse(row.emit_count(before, row.extent, "rank"), row.extent, count, lambda i: ex.as_index(i))
    else:
        index = _of_long(row, count)
    _emit_chosen(ctx, row, index, count)


def _check_steps(ctx: Lowering, row: _Row, count: int, wide: bool) -> None:
    n = row.extent
    steps = n * n + count * n
    if n > SHORT_AXIS and not wide:
        few = n if n < SPARSE * count else 4 * int(math.sqrt(n * count))  # through the blocks, and of those chosen
        digits, blocks = -(-row.bits // DIGIT), -(-few // BLOCK)
        steps = n + digits * few * (1 << DIGIT) + few * BLOCK + blocks * blocks + count * (blocks + BLOCK) + 2 * count * count
    if steps * row.rows > MOST_STEPS:
        raise CannotLower(f"TopK of {count} among {n} would take {steps * row.rows} steps; most are {MOST_STEPS}")


def _emit_chosen(ctx: Lowering, row: _Row, index: str, count: int) -> None:
    """Both outputs from the places along the axis, in order."""
    axes = row.axes(Axis("r", count))
    place = row.load(index, "r")
    if ctx.wants(1):
        ctx.emit(axes, place, dtype="int64", into=1)
    if ctx.wants(0):
        dtype = ctx.out().dtype
        ctx.emit(axes, row.load(ctx.input(0), place, fill=0.0 if is_float(dtype) else 0), into=0)


@dataclass(frozen=True)
class _Row:
    """The axis ``dim`` of the input, and how tensors are written that have another one in its place."""

    ctx: Lowering
    dim: int

    @property
    def extent(self) -> int:
        """Elements along the axis."""
        return self.ctx.shape(self.ctx.input(0))[self.dim]

    @property
    def rows(self) -> int:
        """Elements of all other axes."""
        return self.ctx.type(self.ctx.input(0)).size // max(self.extent, 1)

    @property
    def bits(self) -> int:
        """Of a key: 32 of the number, and those of a place."""
        return 32 + self.place_bits

    @property
    def place_bits(self) -> int:
        """Of a place along the axis."""
        return max(self.extent - 1, 1).bit_length()

    def place(self, key: Expr) -> Expr:
        """The place that a key has in its lower bits."""
        return make_op("sub", ex.integer(self.extent - 1), make_op("and_", key, ex.integer((1 << self.place_bits) - 1)))

    @property
    def largest(self) -> bool:
        """Whether the largest come first."""
        return bool(self.ctx.attr("largest", 1))

    def axes(self, *own: Axis) -> tuple[Axis, ...]:
        """The input's axes with ``own`` in the place of ``dim``."""
        given = self.ctx.axes(self.ctx.input(0))
        return (*given[: self.dim], *own, *given[self.dim + 1 :])

    def load(self, tensor: str, *own: Expr | int | str, fill: ex.Number | None = None) -> Load:
        """``tensor`` with these indices in the place of ``dim``."""
        names: list[Expr | int | str] = [a.name for a in self.ctx.axes(self.ctx.input(0))]
        return self.ctx.load(tensor, *names[: self.dim], *own, *names[self.dim + 1 :], fill=fill)

    # --- keys ---------------------------------------------------------------------------------

    def keys(self) -> str:
        """Of numbers of at most 32 bits, int64: in the upper bits 32 that order as the number does, below the place, the first
        one largest. The largest key comes first."""
        ctx, dtype = self.ctx, self.ctx.type(self.ctx.input(0)).dtype
        x: Expr = self.load(ctx.input(0), "i")
        if is_float(dtype):
            wide = Cast("float32", x) if dtype == "float16" else x
            plain = make_op("where", make_op("eq", wide, make_literal(0, "float32")), make_literal(0, "float32"), wide)  # -0 is 0
            bits: Expr = Cast("int64", make_op("as_uint32", plain))
            mirrored = make_op("sub", ex.integer((1 << 32) - 1), bits)
            ordered = make_op("where", make_op("lt", bits, ex.integer(1 << 31)), ex.make_add(bits, 1 << 31), mirrored)
            ordered = make_op("where", make_op("isnan", x), ex.integer((1 << 32) - 1), ordered)
        else:
            ordered = make_op("add", Cast("int64", x), ex.integer(0 if dtype.startswith("u") else 1 << 31))
        if not self.largest:
            ordered = make_op("sub", ex.integer((1 << 32) - 1), ordered)
        last = make_op("sub", ex.integer(self.extent - 1), ex.as_index("i"))
        key = make_op("add", make_op("mul", ordered, ex.integer(1 << self.place_bits)), last)
        return ctx.emit(self.axes(Axis("i", self.extent)), key, dtype="int64", into="key")

    def wide_keys(self) -> str:
        """Of numbers of 64 bits, uint64; equal ones have the same."""
        ctx, dtype = self.ctx, self.ctx.type(self.ctx.input(0)).dtype
        x: Expr = self.load(ctx.input(0), "i")
        top, full = make_literal(1 << 63, "uint64"), make_literal((1 << 64) - 1, "uint64")
        if is_float(dtype):
            bits = make_op("as_uint64", make_op("where", make_op("eq", x, make_literal(0, dtype)), make_literal(0, dtype), x))
            ordered = make_op("where", make_op("lt", bits, top), make_op("xor", bits, top), make_op("xor", bits, full))
            ordered = make_op("where", make_op("isnan", x), full, ordered)
        else:
            ordered = make_op("xor", Cast("uint64", x), make_literal(0 if dtype.startswith("u") else 1 << 63, "uint64"))
        if not self.largest:
            ordered = make_op("xor", ordered, full)
        return ctx.emit(self.axes(Axis("i", self.extent)), ordered, dtype="uint64", into="key")

    def before(self, keys: str) -> Expr:
        """Whether ``j`` comes before ``i``."""
        return make_op("lt", self.load(keys, "i"), self.load(keys, "j"))

    def before_wide(self, keys: str) -> Expr:
        """Whether ``j`` comes before ``i``: of equal ones the first."""
        one, other = self.load(keys, "i"), self.load(keys, "j")
        same = make_op("and_", make_op("eq", one, other), make_op("lt", ex.as_index("j"), ex.as_index("i")))
        return make_op("or_", make_op("lt", one, other), same)

    # --- orders --------------------------------------------------------------------------------

    def emit_count(self, hit: Expr, extent: int, into: str) -> str:
        """``[i]``: for how many ``j`` of ``extent`` it holds."""
        return self.ctx.emit(self.axes(Axis("i", extent)), one_if(hit), (Axis("j", extent),), "sum", dtype="int32", into=into)

    def inverse(self, rank: str, extent: int, count: int, value: _Value) -> str:
        """``[r]``: ``value`` of the one whose rank is ``r``."""
        hit = make_op("eq", Cast("int64", self.load(rank, "i")), ex.as_index("r"))
        body = make_op("where", hit, value("i"), ex.integer(0))
        return self.ctx.emit(self.axes(Axis("r", count)), body, (Axis("i", extent),), "sum", dtype="int64", into="index")


def one_if(hit: Expr) -> Expr:
    """1 where it holds, else 0."""
    return make_op("where", hit, make_literal(1, "int32"), make_literal(0, "int32"))


def _of_long(row: _Row, count: int) -> str:
    """``[r]``: the places of the ``count`` largest keys of a long axis, in order."""
    chosen = _select_largest(row, row.keys(), row.extent, count)
    rank = row.emit_count(row.before(chosen), count, "rank")
    return row.inverse(rank, count, count, lambda name: row.place(row.load(chosen, name)))


def _select_largest(row: _Row, keys: str, extent: int, count: int) -> str:
    """``[j]``: the ``count`` largest of ``extent`` keys, in no order. Of many more than that only the blocks with the largest
    maxima matter, which are as many."""
    if extent < SPARSE * count:
        return _compact_keys(row, keys, extent, _emit_threshold(row, keys, extent, count), count)
    size = 1 << (extent // count).bit_length() // 2
    block, within, each = Axis("b", -(-extent // size)), Axis("w", size), Axis("i", count * size)
    place = make_op("add", ex.make_mul("b", size), ex.as_index("w"))
    largest = row.ctx.emit(row.axes(block), row.load(keys, place, fill=-1), (within,), "max", dtype="int64", into="most")
    best = row.load(
        _select_largest(row, _renumber_blocks(row, largest, block), block.extent, count), ex.make_floordiv(each.name, size)
    )
    kept = make_op("add", make_op("mul", row.place(best), ex.integer(size)), ex.make_mod(each.name, size))
    some = row.ctx.emit(row.axes(each), row.load(keys, kept, fill=-1), dtype="int64", into="some")
    return _compact_keys(row, some, each.extent, _emit_threshold(row, some, each.extent, count), count)


def _renumber_blocks(row: _Row, largest: str, block: Axis) -> str:
    """Keys of blocks: that of their largest element, without its place, and the block's."""
    high = make_op("shr", row.load(largest, block.name), ex.integer(row.place_bits))
    last = make_op("sub", ex.integer(row.extent - 1), ex.as_index(block.name))
    key = make_op("add", make_op("mul", high, ex.integer(1 << row.place_bits)), last)
    return row.ctx.emit(
        row.axes(Axis("i", block.extent)), ex.substitute(key, {block.name: ex.as_index("i")}), dtype="int64", into="key"
    )


def _emit_threshold(row: _Row, keys: str, extent: int, count: int) -> str:
    """The ``count``-th largest key: the bits that ``count`` keys reach, from the top."""
    bound = ""
    for shift in range((row.bits - 1) // DIGIT * DIGIT, -1, -DIGIT):
        low: Expr = row.load(bound) if bound else ex.integer(0)
        each = Axis("c", 1 << DIGIT)
        step = make_op("mul", ex.make_add(each.name, 1), ex.integer(1 << shift))
        reached = one_if(make_op("le", make_op("add", low, step), row.load(keys, "i")))
        counts = row.ctx.emit(row.axes(each), reached, (Axis("i", extent),), "sum", dtype="int32", into=f"reach{shift}")
        # The last bound is that of the digit before: what was found so far is added in its place.
        enough = make_op("le", make_literal(count, "int32"), row.load(counts, each.name))
        digit = make_op("where", enough, ex.integer(1 << shift), ex.integer(0))
        body = make_op("where", make_op("lt", ex.as_index(each.name), ex.integer(each.extent - 1)), digit, low)
        bound = row.ctx.emit(row.axes(), body, (each,), "sum", dtype="int64", into=f"bound{shift}")
    return bound


def _compact_keys(row: _Row, keys: str, extent: int, bound: str, count: int) -> str:
    """The ``count`` keys that reach ``bound``, as they come."""
    ctx, blocks = row.ctx, -(-extent // BLOCK)
    block, within, slot = Axis("b", blocks), Axis("w", BLOCK), Axis("r", count)

    def reaches(b: Expr | str, w: Expr | str) -> Expr:
        place = make_op("add", make_op("mul", ex.as_index(b), ex.integer(BLOCK)), ex.as_index(w))
        return make_op("le", row.load(bound), row.load(keys, place, fill=-1))

    held = ctx.emit(row.axes(block), one_if(reaches("b", "w")), (within,), "sum", dtype="int32", into="held")
    earlier = make_op("where", make_op("lt", ex.as_index("o"), ex.as_index("b")), row.load(held, "o"), make_literal(0, "int32"))
    start = ctx.emit(row.axes(block), earlier, (Axis("o", blocks),), "sum", dtype="int32", into="start")
    end = make_op("add", row.load(start, "b"), row.load(held, "b"))
    passed = one_if(make_op("le", Cast("int64", end), ex.as_index("r")))
    own = row.load(ctx.emit(row.axes(slot), passed, (block,), "sum", dtype="int32", into="block"), "r")
    # Of the slot's block: up to how many elements no more are held than slots of it come before.
    upto = one_if(make_op("and_", make_op("le", ex.as_index("o"), ex.as_index("w")), reaches("b", "o")))
    so_far = ctx.emit(row.axes(block, within), upto, (Axis("o", BLOCK),), "sum", dtype="int32", into="so_far")
    nth = make_op("sub", ex.as_index("r"), Cast("int64", row.load(start, own, fill=0)))
    skipped = one_if(make_op("le", Cast("int64", row.load(so_far, own, "w", fill=0)), nth))
    inside = row.load(ctx.emit(row.axes(slot), skipped, (within,), "sum", dtype="int32", into="inside"), "r")
    place = make_op("add", make_op("mul", Cast("int64", own), ex.integer(BLOCK)), Cast("int64", inside))
    key = row.load(keys, place, fill=-1)
    return ctx.emit(row.axes(Axis("j", count)), ex.substitute(key, {"r": ex.as_index("j")}), into="chosen")
