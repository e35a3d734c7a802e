"""Epilogue maps of a grouped normalisation, computed in the axes of the normalisation.

A grouped normalisation has an axis for groups of channels, and its consumers do not. An activation over channels would therefore
be a separate operator, because its tasks are not rows of groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph, identity_load
from rammer.ir.expr import Expr, Load, Ref
from rammer.ir.names import Names, make_identifier
from rammer.passes.compute.batch_candidates import is_rearrangement


def in_rows(graph: ComputeGraph) -> ComputeGraph:
    """Return ``graph`` with maps after a reshaped normalisation in its axes, each with a view under the old name."""
    state = _Rows(graph)
    for c in graph.computes:
        state.visit(c)
    return replace(graph, computes=tuple(state.computes), types=state.types) if state.rewritten else graph


class _Rows:
    """The graph under construction. ``rows`` maps names of views to Computes with finer axes."""

    def __init__(self, graph: ComputeGraph) -> None:
        self.types, self.taken = dict(graph.types), Names(graph.types)
        self.computes = list[Compute]()
        self.made: dict[str, Compute] = {}
        self.rows: dict[str, Compute] = {}
        self.rewritten = False

    def put(self, c: Compute) -> None:
        """Append a Compute to the graph."""
        self.computes.append(c)
        self.made[c.name], self.types[c.name] = c, c.type

    def visit(self, c: Compute) -> None:
        """Append ``c`` or its replacement."""
        source = self._find_view_source(c)
        if source is None:
            self.put(c)
            if is_rearrangement(c) and (found := self._find_normalised_map(c)) is not None:
                self.rows[c.name] = found
            return
        places = split_indices(c.axes, source.axes)
        assert places is not None  # views of the source have these axes
        own = dict(_join_indices(c.axes, source.axes))
        rows = tuple(Ref(a.name) for a in source.axes)

        def rule(e: Expr) -> Expr | None:
            if isinstance(e, Ref):
                return own[e.axis]
            if not isinstance(e, Load):
                return None
            if e.tensor in self.rows and identity_load(e, c) and self.rows[e.tensor].shape == source.shape:
                return Load(self.rows[e.tensor].name, rows)
            return Load(e.tensor, tuple(ex.substitute(i, own) for i in e.indices), e.fill)

        name = make_identifier(f"{c.name}_rows", self.taken)
        made = Compute(name, c.dtype, source.axes, ex.transform(c.body, rule), origin=c.origin)
        self.put(made)
        self.put(Compute(c.name, c.dtype, c.axes, Load(name, places), origin=c.origin))
        self.rows[c.name], self.rewritten = made, True

    def _find_view_source(self, c: Compute) -> Compute | None:
        """Return the map that ``c`` reads element by element through a view. Returns None if another load does not follow the
        axes of ``c``."""
        if c.combiner is not None or is_rearrangement(c):
            return None
        mine = [ld for ld in c.loads if ld.tensor in self.rows and identity_load(ld, c)]
        plain = all(isinstance(i, (Ref, ex.Const)) for ld in c.loads for i in ld.indices)
        return self.rows[mine[0].tensor] if mine and plain else None

    def _find_normalised_map(self, view: Compute) -> Compute | None:
        """Return the map that ``view`` reshapes by joining axes, if that map broadcasts an operand over some of its axes."""
        assert isinstance(view.body, Load)
        source = self.made.get(view.body.tensor)
        if source is None or source.combiner is not None or is_rearrangement(source):
            return None
        rowwise = any(ld.tensor in self.made and len(ld.indices) < len(source.axes) for ld in source.loads)
        places = split_indices(view.axes, source.axes) if len(source.axes) > len(view.axes) else None
        return source if rowwise and places is not None and _is_same_index(view.body.indices, places, source.axes) else None


def _group_axes(coarse: Sequence[Axis], fine: Sequence[Axis]) -> list[list[Axis]] | None:
    """Return for each coarse axis the consecutive fine axes that form it, or None if the axes do not match."""
    found, rest = list[list[Axis]](), list(fine)
    for number, axis in enumerate(coarse):
        group = list[Axis]()
        while rest and math.prod(a.extent for a in group) < axis.extent:
            group.append(rest.pop(0))
        last = number + 1 == len(coarse)
        while rest and rest[0].extent == 1 and (not group or last):
            group.append(rest.pop(0))
        if math.prod(a.extent for a in group) != axis.extent or not group:
            return None
        found.append(group)
    return None if rest else found


def split_indices(coarse: Sequence[Axis], fine: Sequence[Axis]) -> tuple[Expr, ...] | None:
    """Return the indices along ``fine`` axes of an element at ``coarse`` axes, or None if ``fine`` does not split ``coarse``."""
    groups = _group_axes(coarse, fine)
    if groups is None:
        return None
    places = list[Expr]()
    for axis, group in zip(coarse, groups, strict=True):
        for i, part in enumerate(group):
            before, inner = (math.prod(a.extent for a in some) for some in (group[:i], group[i + 1 :]))
            place = ex.make_floordiv(axis.name, inner)
            places.append(ex.integer(0) if part.extent == 1 else place if before == 1 else ex.make_mod(place, part.extent))
    return tuple(places)


def _join_indices(coarse: Sequence[Axis], fine: Sequence[Axis]) -> list[tuple[str, Expr]]:
    """Return the name of each coarse axis and its index in terms of the fine axes."""
    result = list[tuple[str, Expr]]()
    for axis, group in zip(coarse, _group_axes(coarse, fine) or (), strict=True):
        place: Expr = ex.integer(0)
        for i, part in enumerate(group):
            if part.extent > 1:
                place = ex.make_add(place, ex.make_mul(part.name, math.prod(a.extent for a in group[i + 1 :])))
        result.append((axis.name, place))
    return result


def _is_same_index(have: Sequence[Expr], want: Sequence[Expr], fine: Sequence[Axis]) -> bool:
    return all(h == w or a.extent == 1 for h, w, a in zip(have, want, fine, strict=True))
