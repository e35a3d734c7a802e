"""Coalescing of transfers: tensors of one shape between the same devices cross as one write with one flag.

The producer writes each tensor directly into its slice and the reader reads slices: storage makes both views. Tensors without
elements do not cross: every device computes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rammer.distributed.partition.cut_graph import Spot
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph
from rammer.ir.expr import Const, Expr, Load, Ref, integer
from rammer.ir.names import Names, make_identifier
from rammer.ir.piecewise import make_piecewise

__all__ = ["pack_transfers"]


def pack_transfers(
    graph: ComputeGraph, spots: Mapping[str, Spot], host_nodes: Collection[str] = ()
) -> tuple[ComputeGraph, Mapping[str, Spot]]:
    """Return ``graph`` and ``spots`` with one tensor in place of several of one type, one producer spot and equal reader spots.

    Tensors that computes in ``host_nodes`` read or write stay unchanged, except those without elements. So do masked tensors in
    ``host_nodes``, which cross at their current length. The ``spots`` passed must be in order (``host_steps.order_spots``)."""
    graph, spots = _drop_empty_reads(graph, spots)
    bare = {n for c in graph.computes if c.name in host_nodes for n in (c.name, *c.reads)}
    groups = [g for g in _group_transfers(graph, spots, bare) if len(g) > 1 and g[0].type.size]
    packing = _Packing(graph, dict(spots), Names(graph.types))
    for group in groups:
        packing.add(group)
    return packing.graph_of_packs(), packing.spots


def _drop_empty_reads(graph: ComputeGraph, spots: Mapping[str, Spot]) -> tuple[ComputeGraph, Mapping[str, Spot]]:
    """Replace the bodies of tensors without elements by constants, and move output ones to device 0."""
    empty = {c.name for c in graph.computes if not c.type.size}
    computes = tuple(
        Compute(c.name, c.dtype, c.axes, Const(0, c.dtype), origin=c.origin) if c.name in empty else c for c in graph.computes
    )
    moved = {n: Spot(s.stage, 0) if n in empty and n in graph.outputs else s for n, s in spots.items()}
    return replace(graph, computes=computes), moved


def _group_transfers(graph: ComputeGraph, spots: Mapping[str, Spot], bare: Collection[str]) -> list[list[Compute]]:
    """Return the tensors that cross to other devices, grouped by type, producer spot and reader spots."""
    readers: dict[str, set[Spot]] = {c.name: set() for c in graph.computes}
    for c in graph.computes:
        for name in c.reads:
            if name in readers:
                readers[name].add(spots[c.name])
    groups: dict[object, list[Compute]] = {}
    for c in graph.computes:
        there = {s for s in readers[c.name] if s.device != spots[c.name].device}
        if there and c.name not in graph.outputs and c.name not in bare:
            groups.setdefault((spots[c.name], c.type, tuple(sorted(there))), []).append(c)
    return list(groups.values())


class _Packing:
    """A graph under construction. Readers on other devices read slices, which are computed there as views."""

    def __init__(self, graph: ComputeGraph, spots: dict[str, Spot], taken: Names) -> None:
        self.graph, self.spots, self.taken = graph, spots, taken
        self.packs: dict[str, Compute] = {}  # by the last tensor packed
        self.slot: dict[str, tuple[Compute, int]] = {}
        self.slices: dict[tuple[str, Spot], Compute] = {}

    def add(self, group: Sequence[Compute]) -> None:
        """Add one tensor that packs all of ``group``."""
        one = group[0]
        axes = (Axis("pack", len(group)), *(Axis(f"p{d}", n) for d, n in enumerate(one.shape)))
        inner = tuple(Ref(a.name) for a in axes[1:])
        body = make_piecewise("pack", [1] * len(group), [Load(c.name, inner) for c in group])
        pack = Compute(make_identifier(f"{one.name}_to_{len(group)}", self.taken), one.dtype, axes, body, origin=one.origin)
        self.spots[pack.name] = self.spots[one.name]
        self.packs[group[-1].name] = pack
        self.slot |= {c.name: (pack, k) for k, c in enumerate(group)}

    def graph_of_packs(self) -> ComputeGraph:
        """Return the whole graph in the order of spots: a slice of a pack may come before members of it in the given order."""
        computes = list[Compute]()
        for c in self.graph.computes:
            names = dict[str, str]()
            for name in c.reads:
                if self._is_repacked(name) and self.spots[c.name].device != self.spots[name].device:
                    names[name], new = self._slice(name, self.spots[c.name])
                    computes += new
            computes.append(replace(c, body=ex.rename_tensors(c.body, names)) if names else c)
            computes += [self.packs[c.name]] if c.name in self.packs else []
        types = {**self.graph.types, **{c.name: c.type for c in computes}}
        computes.sort(key=lambda c: self.spots[c.name])
        return replace(self.graph, computes=tuple(computes), types=types)

    def _is_repacked(self, name: str) -> bool:
        """Return True if other devices read a replacement of ``name``."""
        return name in self.slot or (name in self.spots and not self.graph.types[name].size)

    def _slice(self, name: str, spot: Spot) -> tuple[str, list[Compute]]:
        """Return the name of a tensor as ``spot`` reads it, and its computes unless they exist already."""
        known = self.slices.get((name, spot))
        if known is not None:
            return known.name, []
        known_type = self.graph.types[name]
        axes = tuple(Axis(f"p{d}", n) for d, n in enumerate(known_type.shape))
        body: Expr = Const(0, known_type.dtype)
        if name in self.slot:
            pack, k = self.slot[name]
            body = Load(pack.name, (integer(k), *(Ref(a.name) for a in axes)))
        made = Compute(make_identifier(f"{name}_at_{spot.device}_{spot.stage}", self.taken), known_type.dtype, axes, body)
        self.slices[name, spot], self.spots[made.name] = made, spot
        return made.name, [made]
