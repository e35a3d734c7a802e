"""Blocked running sums: an element's sum is the sum of its block up to it, plus the sum of all blocks before.

As one tensor expression, a running sum of ``n`` elements reads ``n * n / 2`` elements. In blocks of ``B``, it becomes running
sums within blocks (``n * B`` reads), the blocks' totals, and running sums of these. Many totals are split again (Blelloch,
"Prefix sums and their applications", 1990). The pass matches a form, not an operator: a reduction over the elements on one side
of a position. It emits ordinary Computes, for any combiner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Combiner, Compute, ComputeGraph, combiner_identity
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref
from rammer.ir.names import Names, make_identifier

#: The longest row that is not split into blocks, and the target maximum of a block.
SHORT: Final = 16
BLOCK: Final = 32
#: The binary operation of each combiner.
JOINED: Final[dict[Combiner, str]] = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}


@dataclass(frozen=True)
class _Running:
    """A running sum: ``compute`` combines the elements of ``load`` on one side of a position along axis ``along``.

    The element at the position is included, unless ``skipped`` is 1. ``dim`` is the position of that axis in the load. The side
    is before (``sign`` -1) or after the position."""

    compute: Compute
    load: Load
    combiner: Combiner
    along: int
    dim: int
    sign: int
    skipped: int
    end: Expr | None = None  #: Dynamic end of the row; None: that of its tensor.

    @property
    def extent(self) -> int:
        """The number of elements of a row."""
        return self.compute.axes[self.along].extent


def scan_in_blocks(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` with long running sums in blocks."""
    computes, types, taken = list[Compute](), dict(graph.types), Names(graph.types)
    for c in graph.computes:
        source = _reduction_source(c)[0] if len(c.reduce) == 1 else None
        made = [c] if source is None else list(_split_running_sum(c, types[source.tensor].shape, taken))
        types |= {m.name: m.type for m in made}
        computes += made
    return replace(graph, computes=tuple(computes), types=types) if len(types) > len(graph.types) else graph


def _split_running_sum(c: Compute, shape: tuple[int, ...], taken: Names) -> Iterator[Compute]:
    """Yield Computes that replace ``c`` with fewer reads, or ``c`` itself if it is not a long running sum. ``shape`` is that of
    its operand."""
    found = _match_running_sum(c, shape)
    if found is None or found.extent <= SHORT:
        yield c
        return
    block = _block_length(found.extent)
    count = -(-found.extent // block)
    # Values between the blocks are rounded no more often than the sum of a whole row.
    dtype = "float32" if c.dtype == "float16" else c.dtype
    blocks, totals, before, within, whole = (
        make_identifier(f"{c.name}_{part}", taken) for part in ("blocks", "totals", "before", "within", "whole")
    )
    outer, inner = (_fresh_axis_name(c, name) for name in ("p", "j"))
    many, few = Axis(outer, count), Axis(inner, block)

    def axes(*own: Axis) -> tuple[Axis, ...]:
        return (*c.axes[: found.along], *own, *c.axes[found.along + 1 :])

    def at(name: str, *own: Expr | str, fill: ex.Number | None = None) -> Load:
        places: list[Expr | str] = [a.name for a in c.axes]
        places[found.along : found.along + 1] = own
        return Load(name, tuple(ex.as_index(i) for i in places), fill)

    (k,) = c.reduce
    step, fill = found.sign, combiner_identity(found.combiner, dtype).value
    place = ex.make_add(ex.make_mul(outer, block), inner)
    indices = (*found.load.indices[: found.dim], place, *found.load.indices[found.dim + 1 :])
    read = Load(found.load.tensor, indices, found.load.fill if found.extent % block else None)
    value: Expr = Cast(dtype, read) if dtype != c.dtype else read
    if found.end is not None:
        value = Op("where", (Op("lt", (place, found.end)), value, Const(fill, dtype)))

    def made(name: str, own: tuple[Axis, ...], body: Expr, reduce: int = 0) -> Compute:
        over = (Axis(k.name, reduce),) if reduce else ()
        return Compute(name, dtype, axes(*own), body, over, found.combiner if reduce else None, c.origin)

    near = ex.make_add(ex.make_add(inner, ex.make_mul(k.name, step)), step * found.skipped)
    far = ex.make_add(ex.make_add(outer, ex.make_mul(k.name, step)), step)
    yield made(blocks, (many, few), value)
    total = made(totals, (many,), at(blocks, outer, k.name), block)
    yield total
    yield from _split_running_sum(made(before, (many,), at(totals, far, fill=fill), count), total.shape, taken)
    yield made(within, (many, few), at(blocks, outer, near, fill=fill), block)
    yield made(whole, (many, few), Op(JOINED[found.combiner], (at(within, outer, inner), at(before, outer))))
    axis = c.axes[found.along].name
    result: Expr = at(whole, ex.make_floordiv(axis, block), ex.make_mod(axis, block))
    yield Compute(c.name, c.dtype, c.axes, Cast(c.dtype, result) if dtype != c.dtype else result, (), None, c.origin)


def _match_running_sum(c: Compute, shape: tuple[int, ...]) -> _Running | None:
    """Return ``c`` as a running sum of rows of a tensor of this ``shape``, or None."""
    load, test = _reduction_source(c)
    if load is None or c.combiner not in JOINED or load.fill != combiner_identity(c.combiner, c.dtype).value:
        return None
    (k,) = c.reduce
    dims = [d for d, i in enumerate(load.indices) if k.name in ex.axes_of(i)]
    form = ex.affine_form(load.indices[dims[0]]) if len(dims) == 1 else None
    if test is not None and (len(dims) != 1 or test.args[0] != load.indices[dims[0]] or ex.axes_of(test.args[1])):
        return None
    if form is None or len(form[0]) != 2 or any(ex.has_loads(i) for i in load.indices):
        return None
    factors, offset = form
    axis = next((a for a in c.axes if factors.get(a.name) == 1), None)
    sign = factors[k.name]
    if axis is None or sign not in (-1, 1) or offset * sign not in (0, 1) or k.extent < axis.extent:
        return None
    extents = {a.name: a.extent for a in c.axes if a is not axis}  # extents of axes in other indices, which stay inside
    others = [(i, n) for d, (i, n) in enumerate(zip(load.indices, shape, strict=True)) if d != dims[0]]
    inside = all(
        extents.get(i.axis, n + 1) <= n if isinstance(i, Ref) else isinstance(i, Const) and 0 <= i.value < n for i, n in others
    )
    if not inside or shape[dims[0]] != axis.extent:
        return None
    end = None if test is None else test.args[1]
    return _Running(c, load, c.combiner, c.axes.index(axis), dims[0], sign, offset * sign, end)


def _reduction_source(c: Compute) -> tuple[Load | None, Op | None]:
    """Return the load that a reduction combines, and the test for the end of its row, or None for each missing part."""
    match c.body:
        case Load():
            return c.body, None
        case Op("where", (Op("lt") as test, Load() as load, Const(fill))) if fill == load.fill:
            return load, test
    return None, None


def _block_length(extent: int) -> int:
    """Return the block length: about the root of the row's, preferably a divisor of it, so that blocks are views."""
    wanted = min(math.isqrt(extent), BLOCK)
    near = [b for b in range(max(2, wanted // 2), min(2 * wanted, 2 * BLOCK) + 1) if extent % b == 0]
    return min(near, key=lambda b: (abs(math.log(b / wanted)), b), default=wanted)


def _fresh_axis_name(c: Compute, name: str) -> str:
    """Return an axis name that ``c`` does not use."""
    return make_identifier(name, Names(a.name for a in (*c.axes, *c.reduce)))
