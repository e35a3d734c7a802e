"""The vectorisation of a stage: along an output axis (rows) or along a reduction axis (columns), and blocked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rammer.codegen.context import Column, FunctionContext, Place
from rammer.codegen.stage_layout import Stage
from rammer.codegen.stage_reads import StageLoad, access_cost, collect_loads, load_step, vector_cost
from rammer.codegen.symbolic_bounds import Span, canonicalise_sum, fold, index_span
from rammer.codegen.vector_text import STORED
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Interval, Load, Op, Ref, integer
from rammer.ir.types import itemsize

#: Cost of combining the lanes of one column accumulator, in scalar operations relative to a vector access.
FOLDED = 8.0
#: Points of the largest window that is written out, and maximum statements of a block of windows.
_UNROLLED, _STATEMENTS = 64, 200
#: Maximum loads of a map that is written out for a square of vectors.
_TURNED = 4
#: Vector accesses per vector of a square: its load, and its fraction of the shuffles.
_SQUARE = 5.0
#: Maximum vectors of sums that walk down columns together, and bytes of a cache line, the least step between their rows.
_DOWN, LINE = 24, 64


@dataclass(frozen=True, slots=True)
class LaneAxis:
    """The axis number ``axis``, which is computed ``width`` elements at a time.

    ``interior`` is the half-open range where no padding test along it fails (None: no tests). ``certain``: every task's box is at
    least ``width`` wide; ``exact``: it is also a multiple of ``width``. ``open``: a box may be narrower, but may be computed up
    to ``width``."""

    axis: int
    width: int
    interior: tuple[Expr, Expr] | None
    certain: bool
    exact: bool
    open: bool


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The vectorisation and blocking of a stage.

    ``row``: the lane axis, None for scalars. ``columns``: reductions whose own axis is vectorised. ``blocking``: elements
    computed together, by axis number. ``unrolled``: reductions written out. ``turned``: loads of maps that are contiguous along
    the blocked axis; a square of vectors is read and transposed."""

    row: LaneAxis | None
    columns: dict[str, Column]
    blocking: dict[int, int]
    unrolled: frozenset[str] = frozenset()
    turned: tuple[Load, ...] = ()


def choose_row_plan(
    unit: FunctionContext, stage: Stage, heads: Sequence[Compute], stores: Sequence[Place], limit: int, axes: int
) -> RowPlan:
    """Return the vectorisation of a stage with the fewest memory accesses per element, and its blocking. ``heads`` are the
    reductions that elements start with. Blocking takes at most ``limit`` elements along up to ``axes`` axes."""
    found = collect_loads(unit, stage.computes)
    scalar = float(sum(r.weight for r in found) + len(stores))
    row_cost, row = _choose_row(unit, stage, found, stores)
    column_cost, columns = _choose_columns(unit, heads, found, stores)
    if columns and column_cost < min(row_cost, scalar):
        lanes = tuple(f"{name}.{c.axis}" for name, c in columns.items())
        return RowPlan(None, columns, _choose_blocking(unit, stage, found, lanes, limit, axes))
    if row is not None and row_cost < scalar:
        blocking = _choose_blocking(unit, stage, found, (f"x{row.axis}",), limit, axes)
        if not _shares_rows(found, row, blocking):
            windows = _block_windows(stage, heads, found, row)
            if windows is not None:
                return RowPlan(row, {}, windows, frozenset(c.name for c in heads))
        turned = _transposed_loads(unit, stage, found, row.axis)
        if turned is not None:
            return RowPlan(row, {}, {turned[0]: row.width}, frozenset(), turned[1])
        wide = _block_shared_loads(stage, found, row) or _block_columns(unit, stage, found, row)
        return RowPlan(row, {}, blocking or wide or _block_cache_lines(unit, stage, found, row))
    return RowPlan(None, {}, _choose_blocking(unit, stage, found, (), limit, axes))


def _choose_row(
    unit: FunctionContext, stage: Stage, found: Sequence[StageLoad], stores: Sequence[Place]
) -> tuple[float, LaneAxis | None]:
    best, axis = float("inf"), -1
    if any(c.dtype not in unit.lanes or _is_narrow_modulo(c) for c in stage.computes):
        return best, None
    for d in reversed(range(len(stage.extents))):
        count = stage.extents[d]
        width = _vector_width(unit, count)
        if not width:
            continue
        turned = _transposed_loads(unit, stage, found, d)
        squares = turned[1] if turned is not None else ()
        cost = sum(_SQUARE if r.load in squares else r.weight * access_cost(unit, r.load, f"x{d}", width) for r in found)
        cost += sum(vector_cost(p.strides[d], width) for p in stores)
        cost *= -(-count // width) / count
        if cost < best:
            best, axis = cost, d
    return best, _make_lane_axis(unit, stage, found, axis) if axis >= 0 else None


def _is_narrow_modulo(c: Compute) -> bool:
    """Return True if a reduction wraps below 32 bits, which integer vectors do not support."""
    return c.combiner in ("sum", "prod") and c.dtype in ("uint8", "int8")


def _choose_columns(
    unit: FunctionContext, heads: Sequence[Compute], found: Sequence[StageLoad], stores: Sequence[Place]
) -> tuple[float, dict[str, Column]]:
    """Return the cost and, for every head, the reduction axis with the cheapest accesses; {} unless all heads have one."""
    columns: dict[str, Column] = {}
    total = float(len(stores)) + sum(r.weight for r in found if not r.reducer)
    for c in heads:
        options = []
        for r in c.reduce:
            width = _vector_width(unit, r.extent)
            if width and c.dtype in STORED:
                lane = f"{c.name}.{r.name}"
                own = [f for f in found if f.reducer == c.name]
                cost = sum(f.weight * (access_cost(unit, f.load, lane, width) or 0.5) for f in own) / width
                options.append((cost * (-(-r.extent // width) * width / r.extent) + FOLDED, r.name, width))
        if not options:
            return float("inf"), {}
        cost, name, width = min(options)
        total += cost
        columns[c.name] = Column(name, width)
    return total, columns


def _make_lane_axis(unit: FunctionContext, stage: Stage, found: Sequence[StageLoad], d: int) -> LaneAxis:
    bound, count = stage.box[d], stage.extents[d]
    ranges = [ends for r in found for ends in _interior_ranges(unit, r, f"x{d}")]
    low, high = ranges[0] if ranges else bound.span
    for start, end in ranges[1:]:
        low, high = fold("max", low, start), fold("min", high, end)
    width = _vector_width(unit, count)
    certain = fold("sub", bound.high, bound.low) == integer(count)
    ends = bound.high in unit.open_ends
    return LaneAxis(d, width, (low, high) if ranges else None, certain or ends, certain and count % width == 0, ends)


def _choose_blocking(
    unit: FunctionContext, stage: Stage, found: Sequence[StageLoad], lanes: tuple[str, ...], limit: int, axes: int
) -> dict[int, int]:
    """Return the number of elements computed together, along axes other than those of ``lanes``.

    An axis qualifies if every task's box has the same size along it, or may be computed up to it, and loads of reductions repeat
    along it. The axis whose loads repeat most comes first; loads of vectors (over ``lanes``) count double."""
    inside = [(r, ex.axes_of(r.load)) for r in found if r.reducer]
    gains = []
    for d, (bound, count) in enumerate(zip(stage.box, stage.extents, strict=True)):
        shared = sum(1.0 + bool(used & {*lanes}) for _, used in inside if f"x{d}" not in used)
        moved = any(f"x{d}" in used for _, used in inside)
        even = bound.high in unit.open_ends or fold("sub", bound.high, bound.low) == integer(count)
        if f"x{d}" not in lanes and shared and moved and even:
            gains.append((-shared, -d))
    result: dict[int, int] = {}
    for _, negative in sorted(gains)[:axes]:
        count = stage.extents[-negative]
        block = next((b for b in (4, 3, 2) if count % b == 0 and b <= limit), 1)
        if block > 1:
            result[-negative] = block
            limit //= block
    return result


def _shares_rows(found: Sequence[StageLoad], row: LaneAxis, blocking: Mapping[int, int]) -> bool:
    """Return True if the elements of a block share vectors, not just scalars, for example weights."""
    used = [ex.axes_of(r.load) for r in found if r.reducer]
    return any(f"x{row.axis}" in u and f"x{d}" not in u for d in blocking for u in used)


def _block_windows(stage: Stage, heads: Sequence[Compute], found: Sequence[StageLoad], row: LaneAxis) -> dict[int, int] | None:
    """Block neighbouring windows: written out, they share loads where they overlap. Returns None without a window."""
    points = max((math.prod(r.extent for r in c.reduce) for c in heads), default=0)
    if not 1 < points <= _UNROLLED:
        return None
    sliding: set[str] = set()
    for r in found:
        for index in r.load.indices if r.reducer else ():
            used = (ex.affine_form(index) or ({}, 0))[0]
            if any("." in name for name in used):
                sliding |= {name for name, factor in used.items() if "." not in name and factor == 1}
    for d, (bound, count) in enumerate(zip(stage.box, stage.extents, strict=True)):
        even = fold("sub", bound.high, bound.low) == integer(count)
        if d != row.axis and even and f"x{d}" in sliding:
            fitting = [b for b in range(2, 9) if count % b == 0 and b * points <= _STATEMENTS]
            return {d: fitting[-1]} if fitting else {}
    return {} if sliding else None


def whole_rows(
    unit: FunctionContext, stage: Stage, row: LaneAxis, blocking: Mapping[int, int], shift: Sequence[int]
) -> list[tuple[Expr, Expr, int]]:
    """Return the lowest and highest address of a vector, and the tensor's reach, for every load padded along the lane. Returns []
    if they are unknown."""
    lane = f"x{row.axis}"
    result = []
    for r in collect_loads(unit, stage.computes):
        if r.load.tensor in unit.inlined or not any(True for _ in _interior_ranges(unit, r, lane)):
            continue
        place, lane_stride = unit.places[r.load.tensor], load_step(unit, r.load, lane)
        ends = index_span(_load_address(place, r.load), _block_spans(r.ranges, blocking, shift))
        if place.reach is None or lane_stride is None or ends is None:
            return []
        last = fold("add", ends[1], integer((row.width - 1) * lane_stride))
        if (ends[0], last, place.reach) not in result:
            result.append((ends[0], last, place.reach))
    return result


def _load_address(place: Place, load: Load) -> Expr:
    at: Expr = integer(0)
    for index, stride, origin in zip(load.indices, place.strides, place.origin, strict=True):
        at = fold("add", at, fold("mul", fold("sub", index, origin), integer(stride)))
    return at


def _block_spans(ranges: Mapping[str, Interval], blocking: Mapping[int, int], shift: Sequence[int]) -> dict[str, Span]:
    """Return the spans of the variables inside a block: reduction axes range freely, blocked axes over the block."""
    result: dict[str, Span] = {}
    for name, (low, high) in ranges.items():
        result[name] = (integer(low), integer(high)) if "." in name else (Ref(name), Ref(name))
    for d, block in blocking.items():
        result[f"x{d}"] = (Ref(f"x{d}"), ex.make_add(f"x{d}", (block - 1) * shift[d]))
    return result


def _block_shared_loads(stage: Stage, found: Sequence[StageLoad], row: LaneAxis) -> dict[int, int]:
    """Block several vectors along the lane axis, if they share a reduction's scalar loads."""
    shared = any(r.reducer and f"x{row.axis}" not in ex.axes_of(r.load) for r in found)
    if not shared or not row.exact or row.interior is not None:
        return {}
    fitting = (b for b in (8, 4, 2) if stage.extents[row.axis] % (b * row.width) == 0)
    block = next(fitting, 1)
    return {row.axis: block} if block > 1 else {}


def _block_columns(unit: FunctionContext, stage: Stage, found: Sequence[StageLoad], row: LaneAxis) -> dict[int, int]:
    """Block several vectors along the lane axis, if a reduction walks down columns. Each row is then in another page or cache
    line, of which one vector would use only a little."""
    sums = {r.reducer for r in found if r.reducer}
    if not sums or not row.exact or row.interior is not None or not any(map(partial(_is_column_read, unit, row), found)):
        return {}
    block = side_by_side(stage.extents[row.axis], row.width, len(sums))
    return {row.axis: block} if block > 1 else {}


def side_by_side(count: int, width: int, sums: int) -> int:
    """Return the number of vectors along ``count`` elements that are summed down columns together, with ``sums`` each."""
    return next((b for b in (8, 4, 2) if count % (b * width) == 0 and b * sums <= _DOWN), 1)


def _is_column_read(unit: FunctionContext, row: LaneAxis, read: StageLoad) -> bool:
    """Return True if a reduction's load is contiguous along the lanes, and its steps cover at least a cache line."""
    if not read.reducer or read.load.tensor in unit.inlined or load_step(unit, read.load, f"x{row.axis}") != 1:
        return False
    own = [a for a in ex.axes_of(read.load) if a.startswith(f"{read.reducer}.")]
    size = itemsize(unit.dtypes[read.load.tensor])
    return bool(own) and all(abs(load_step(unit, read.load, a) or 0) * size >= LINE for a in own)


def _block_cache_lines(unit: FunctionContext, stage: Stage, found: Sequence[StageLoad], row: LaneAxis) -> dict[int, int]:
    """Block neighbouring rows if a load has distant lanes but adjacent rows (transposition). Each cache line is then used while
    it is cached."""
    lane = f"x{row.axis}"
    for r in found:
        if r.load.tensor in unit.inlined or load_step(unit, r.load, lane) in (0, 1, 2):
            continue
        for d, (bound, count) in enumerate(zip(stage.box, stage.extents, strict=True)):
            block = next((b for b in (8, 4, 2) if count % b == 0), 1)
            even = fold("sub", bound.high, bound.low) == integer(count)
            if d != row.axis and block > 1 and even and load_step(unit, r.load, f"x{d}") == 1:
                return {d: block}
    return {}


def _transposed_loads(
    unit: FunctionContext, stage: Stage, found: Sequence[StageLoad], lane: int
) -> tuple[int, tuple[Load, ...]] | None:
    """Return the axis along which loads of a map with distant lanes (along axis ``lane``) are contiguous, and those loads."""
    width = _vector_width(unit, stage.extents[lane])
    padded = any(r.load.fill is not None for r in found)
    if not width or padded or len(found) > _TURNED or any(r.reducer for r in found) or not _has_constant_width(stage, lane):
        return None
    name = f"x{lane}"
    far = [r.load for r in found if r.load.tensor not in unit.inlined and load_step(unit, r.load, name) not in (None, 0, 1, 2)]
    for d, count in enumerate(stage.extents):
        if d == lane or count < width or not _has_constant_width(stage, d):
            continue
        near = [e for e in far if unit.dtypes[e.tensor] in STORED and load_step(unit, e, f"x{d}") == 1]
        if near:
            return d, tuple(dict.fromkeys(near))
    return None


def _has_constant_width(stage: Stage, d: int) -> bool:
    """Return True if every task's box has the same width along an axis."""
    return fold("sub", stage.box[d].high, stage.box[d].low) == integer(stage.extents[d])


def _vector_width(unit: FunctionContext, count: int) -> int:
    """Return the vector width that covers ``count`` elements with the fewest vectors; 0 if none fits."""
    fitting = [w for w in unit.target.vectors if w <= count] if unit.target.single else []
    return min(fitting, key=lambda w: (-(-count // w), w), default=0)


def _interior_ranges(unit: FunctionContext, read: StageLoad, lane: str) -> Iterator[tuple[Expr, Expr]]:
    """Yield the lane ranges (half-open) where the padding tests of a load along the lane hold."""
    if read.load.fill is None:
        return
    for index, extent in zip(read.load.indices, unit.shapes[read.load.tensor], strict=True):
        form, reach = ex.affine_form(index), ex.interval(index, read.ranges)
        lane_stride = form[0].get(lane, 0) if form is not None else 0
        if lane_stride <= 0 or (reach is not None and reach[0] >= 0 and reach[1] < extent):
            continue
        rest = canonicalise_sum(Op("sub", (index, ex.make_mul(lane, lane_stride))))
        free = {n: (integer(r[0]), integer(r[1])) if "." in n else (Ref(n), Ref(n)) for n, r in read.ranges.items()}
        ends = index_span(rest, free)
        if ends is None:
            continue
        low = canonicalise_sum(ex.make_mul(fold("floordiv", ends[0], integer(lane_stride)), -1))
        room = fold("sub", integer(extent - 1), ends[1])
        yield low, fold("add", fold("floordiv", room, integer(lane_stride)), integer(1))
