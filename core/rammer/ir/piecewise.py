"""Piecewise bodies: one Compute whose regions come from different tensors (Concat, recurrent outputs).

``concat_body`` and ``make_piecewise`` build, and ``piecewise_regions`` recognises, a binary tree of ``where(lt(axis, boundary),
left, right)`` over output axes whose leaves are loads. The tree is balanced: a thousand pieces nest ten deep (a chain would
overflow Python's parser and recursion limits). If storage allows it, a later pass lets each producer write its piece directly
into its slice.
"""

from __future__ import annotations

from collections.abc import Sequence

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Box, Compute
from rammer.ir.expr import Const, Expr, Load, Op, Ref


def concat_body(parts: Sequence[tuple[str, int]], axes: Sequence[Axis], dim: int, fill: ex.Number = 0.0) -> Expr:
    """Return the body of a concatenation along output axis ``dim``.

    ``parts`` are (tensor, extent along ``dim``) in order; each tensor has the rank of ``axes``. Loads carry ``fill`` because
    their index leaves the tensor outside their region; that value is never used."""
    leaves: list[Expr] = []
    start, sizes = 0, []
    for tensor, extent in parts:
        if extent == 0:
            continue
        indices: list[Expr] = [Ref(a.name) for a in axes]
        indices[dim] = ex.make_add(axes[dim].name, -start)
        single = extent == axes[dim].extent
        leaves.append(Load(tensor, tuple(indices), None if single else fill))
        sizes.append(extent)
        start += extent
    if not leaves:
        tensor = parts[0][0]
        return Load(tensor, tuple(Ref(a.name) for a in axes), fill)
    return make_piecewise(axes[dim].name, sizes, leaves)


def make_piecewise(axis: str, extents: Sequence[int], bodies: Sequence[Expr]) -> Expr:
    """Return ``bodies[i]`` on the i-th consecutive range of ``axis``; ``extents`` are the lengths of the ranges (> 0)."""

    def build(first: int, stop: int, start: int) -> Expr:
        if stop - first == 1:
            return bodies[first]
        middle = (first + stop) // 2
        boundary = start + sum(extents[first:middle])
        test = Op("lt", (Ref(axis), ex.integer(boundary)))
        return Op("where", (test, build(first, middle, start), build(middle, stop, boundary)))

    return build(0, len(bodies), 0)


def piecewise_regions(compute: Compute) -> list[tuple[Box, Load]] | None:
    """Return the regions of a piecewise Compute, or None for other Computes (or a single piece). Each entry is a half-open box of
    the output axes and the load that supplies it. The boxes partition the output; empty boxes are omitted."""
    if compute.combiner is not None or not isinstance(compute.body, Op):
        return None
    found: list[tuple[Box, Load]] = []
    whole = tuple((0, a.extent) for a in compute.axes)
    places = {a.name: d for d, a in enumerate(compute.axes)}
    return found if _collect_pieces(compute.body, whole, places, found) else None


def _collect_pieces(body: Expr, box: Box, places: dict[str, int], found: list[tuple[Box, Load]]) -> bool:
    if isinstance(body, Load):
        if all(low < high for low, high in box):
            found.append((box, body))
        return True
    split = _split_where(body)
    if split is None:
        return False
    axis, boundary, left, right = split
    dim = places[axis]
    low, high = box[dim]
    middle = min(max(boundary, low), high)
    before = (*box[:dim], (low, middle), *box[dim + 1 :])
    after = (*box[:dim], (middle, high), *box[dim + 1 :])
    return _collect_pieces(left, before, places, found) and _collect_pieces(right, after, places, found)


def _split_where(body: Expr) -> tuple[str, int, Expr, Expr] | None:
    """Split ``where(lt(axis, boundary), left, right)`` into ``(axis, boundary, left, right)``, or return None."""
    if not isinstance(body, Op) or body.fn != "where":
        return None
    test, left, right = body.args
    if not isinstance(test, Op) or test.fn != "lt":
        return None
    axis, boundary = test.args
    if not isinstance(axis, Ref) or not isinstance(boundary, Const):
        return None
    return axis.axis, int(boundary.value), left, right
