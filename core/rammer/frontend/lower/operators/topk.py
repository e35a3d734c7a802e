"""TopK: the largest or smallest elements along an axis, in order, by counting the elements before each.

Every element gets a unique integer key of equal order (``keys``), which includes its index to break ties. On a short axis, the
elements before each element are counted directly. On a long axis the k-th key is determined four bits at a time. Each step counts
the keys that reach each of 15 bounds. Keys that reach the k-th are gathered by block counts, and only these are ordered. NaN is
the largest number, as in NumPy and torch; among equal elements the first one comes first.
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
from rammer.ir.graph import Graph, Node
from rammer.ir.types import is_float, itemsize

#: Limit of the steps of all counts together; the host sorts longer axes.
MOST_STEPS: Final = 1 << 29
#: Longest axis that is ordered as a whole.
SHORT_AXIS: Final = 512
#: Block size for counting chosen elements, and bits of a key that one step determines.
BLOCK: Final = 64
DIGIT: Final = 4
#: Ratio of axis length to chosen elements from which blocks are searched first.
SPARSE: Final = 16
#: Function from an axis name to an expression at that axis.
_Value: TypeAlias = Callable[[str], Expr]


@lowering("TopK")
def top_k(ctx: Lowering) -> None:
    """Lower TopK: values and indices of the ``k`` largest (``largest=0``: smallest) elements along ``axis``, in order."""
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
    steps = _count_steps(row, count, wide)
    if steps > MOST_STEPS:
        raise CannotLower(f"TopK of {count} among {row.extent} would take {steps} steps, more than {MOST_STEPS}")


def count_sort_steps(graph: Graph, node: Node) -> int:
    """Return the steps of all counts of a TopK with known ``k``, and 0 for other operators."""
    known = graph.constants.get(node.inputs[1]) if node.op == "TopK" and not node.domain and len(node.inputs) > 1 else None
    if known is None:
        return 0
    ctx = Lowering(graph, node)
    row = _Row(ctx, axis_of(ctx, int(ctx.attr("axis", -1)), len(ctx.shape(node.inputs[0]))))
    return _count_steps(row, int(known.item()), itemsize(ctx.type(node.inputs[0]).dtype) == 8)


def _count_steps(row: _Row, count: int, wide: bool) -> int:
    n = row.extent
    steps = n * n + count * n
    if n > SHORT_AXIS and not wide:
        few = n if n < SPARSE * count else 4 * int(math.sqrt(n * count))  # after the block search, over the chosen blocks
        digits, blocks = -(-row.bits // DIGIT), -(-few // BLOCK)
        steps = n + digits * few * (1 << DIGIT) + few * BLOCK + blocks * blocks + count * (blocks + BLOCK) + 2 * count * count
    return steps * row.rows


def _emit_chosen(ctx: Lowering, row: _Row, index: str, count: int) -> None:
    """Emit both outputs from the ordered indices along the axis."""
    axes = row.axes(Axis("r", count))
    place = row.load(index, "r")
    if ctx.wants(1):
        ctx.emit(axes, place, dtype="int64", into=1)
    if ctx.wants(0):
        dtype = ctx.out().dtype
        ctx.emit(axes, row.load(ctx.input(0), place, fill=0.0 if is_float(dtype) else 0), into=0)


@dataclass(frozen=True)
class _Row:
    """The axis ``dim`` of the input, and the axes and loads of tensors that replace it by other axes."""

    ctx: Lowering
    dim: int

    @property
    def extent(self) -> int:
        """The number of elements along the axis."""
        return self.ctx.shape(self.ctx.input(0))[self.dim]

    @property
    def rows(self) -> int:
        """The number of elements of all other axes."""
        return self.ctx.type(self.ctx.input(0)).size // max(self.extent, 1)

    @property
    def bits(self) -> int:
        """The bits of a key: 32 of the number, and those of an index."""
        return 32 + self.place_bits

    @property
    def place_bits(self) -> int:
        """The bits of an index along the axis."""
        return max(self.extent - 1, 1).bit_length()

    def place(self, key: Expr) -> Expr:
        """Return the index in a key's lower bits."""
        return make_op("sub", ex.integer(self.extent - 1), make_op("and_", key, ex.integer((1 << self.place_bits) - 1)))

    @property
    def largest(self) -> bool:
        """True if the largest elements come first."""
        return bool(self.ctx.attr("largest", 1))

    def axes(self, *own: Axis) -> tuple[Axis, ...]:
        """Return the input's axes with ``own`` in place of ``dim``."""
        given = self.ctx.axes(self.ctx.input(0))
        return (*given[: self.dim], *own, *given[self.dim + 1 :])

    def load(self, tensor: str, *own: Expr | int | str, fill: ex.Number | None = None) -> Load:
        """Return a load of ``tensor`` with these indices in place of ``dim``."""
        names: list[Expr | int | str] = [a.name for a in self.ctx.axes(self.ctx.input(0))]
        return self.ctx.load(tensor, *names[: self.dim], *own, *names[self.dim + 1 :], fill=fill)

    # --- keys ---------------------------------------------------------------------------------

    def keys(self) -> str:
        """Emit int64 keys of numbers of at most 32 bits; the largest key comes first. The upper 32 bits order like the number.
        The lower bits hold the reversed index, so the first element has the largest key."""
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
        """Emit uint64 keys of 64-bit numbers; equal numbers have equal keys."""
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
        """Return True where ``j`` comes before ``i``."""
        return make_op("lt", self.load(keys, "i"), self.load(keys, "j"))

    def before_wide(self, keys: str) -> Expr:
        """Return True where ``j`` comes before ``i``; among equal keys the first one does."""
        one, other = self.load(keys, "i"), self.load(keys, "j")
        same = make_op("and_", make_op("eq", one, other), make_op("lt", ex.as_index("j"), ex.as_index("i")))
        return make_op("or_", make_op("lt", one, other), same)

    # --- ranks ---------------------------------------------------------------------------------

    def emit_count(self, hit: Expr, extent: int, into: str) -> str:
        """Emit ``[i]``: the number of ``j`` below ``extent`` for which ``hit`` holds."""
        return self.ctx.emit(self.axes(Axis("i", extent)), one_if(hit), (Axis("j", extent),), "sum", dtype="int32", into=into)

    def inverse(self, rank: str, extent: int, count: int, value: _Value) -> str:
        """Emit ``[r]``: ``value`` of the element with rank ``r``."""
        hit = make_op("eq", Cast("int64", self.load(rank, "i")), ex.as_index("r"))
        body = make_op("where", hit, value("i"), ex.integer(0))
        return self.ctx.emit(self.axes(Axis("r", count)), body, (Axis("i", extent),), "sum", dtype="int64", into="index")


def one_if(hit: Expr) -> Expr:
    """Return 1 where ``hit`` holds, else 0."""
    return make_op("where", hit, make_literal(1, "int32"), make_literal(0, "int32"))


def _of_long(row: _Row, count: int) -> str:
    """Return ``[r]``: the indices of the ``count`` largest keys of a long axis, in order."""
    chosen = _select_largest(row, row.keys(), row.extent, count)
    rank = row.emit_count(row.before(chosen), count, "rank")
    return row.inverse(rank, count, count, lambda name: row.place(row.load(chosen, name)))


def _select_largest(row: _Row, keys: str, extent: int, count: int) -> str:
    """Return ``[j]``: the ``count`` largest of ``extent`` keys, unordered. If ``extent`` is much larger, only the ``count``
    blocks with the largest maxima are searched."""
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
    """Return keys of blocks: the number bits of their largest element, with the block's index."""
    high = make_op("shr", row.load(largest, block.name), ex.integer(row.place_bits))
    last = make_op("sub", ex.integer(row.extent - 1), ex.as_index(block.name))
    key = make_op("add", make_op("mul", high, ex.integer(1 << row.place_bits)), last)
    return row.ctx.emit(
        row.axes(Axis("i", block.extent)), ex.substitute(key, {block.name: ex.as_index("i")}), dtype="int64", into="key"
    )


def _emit_threshold(row: _Row, keys: str, extent: int, count: int) -> str:
    """Return the ``count``-th largest key: from the top, the bits that ``count`` keys reach."""
    bound = ""
    for shift in range((row.bits - 1) // DIGIT * DIGIT, -1, -DIGIT):
        low: Expr = row.load(bound) if bound else ex.integer(0)
        each = Axis("c", 1 << DIGIT)
        step = make_op("mul", ex.make_add(each.name, 1), ex.integer(1 << shift))
        reached = one_if(make_op("le", make_op("add", low, step), row.load(keys, "i")))
        counts = row.ctx.emit(row.axes(each), reached, (Axis("i", extent),), "sum", dtype="int32", into=f"reach{shift}")
        # The last bound equals the previous digits, so they are added in its position.
        enough = make_op("le", make_literal(count, "int32"), row.load(counts, each.name))
        digit = make_op("where", enough, ex.integer(1 << shift), ex.integer(0))
        body = make_op("where", make_op("lt", ex.as_index(each.name), ex.integer(each.extent - 1)), digit, low)
        bound = row.ctx.emit(row.axes(), body, (each,), "sum", dtype="int64", into=f"bound{shift}")
    return bound


def _compact_keys(row: _Row, keys: str, extent: int, bound: str, count: int) -> str:
    """Return the ``count`` keys that reach ``bound``, in index order."""
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
    # In the slot's block, count the elements up to which at most ``nth`` keys reach the bound.
    upto = one_if(make_op("and_", make_op("le", ex.as_index("o"), ex.as_index("w")), reaches("b", "o")))
    so_far = ctx.emit(row.axes(block, within), upto, (Axis("o", BLOCK),), "sum", dtype="int32", into="so_far")
    nth = make_op("sub", ex.as_index("r"), Cast("int64", row.load(start, own, fill=0)))
    skipped = one_if(make_op("le", Cast("int64", row.load(so_far, own, "w", fill=0)), nth))
    inside = row.load(ctx.emit(row.axes(slot), skipped, (within,), "sum", dtype="int32", into="inside"), "r")
    place = make_op("add", make_op("mul", Cast("int64", own), ex.integer(BLOCK)), Cast("int64", inside))
    key = row.load(keys, place, fill=-1)
    return ctx.emit(row.axes(Axis("j", count)), ex.substitute(key, {"r": ex.as_index("j")}), into="chosen")
