"""Fusion rules: groups that the core or a plugin proposes beyond those of connecting and stitching.

A rule sees the tile graph and proposes operators, each in place of several operators of the graph. The proposals are priced in
the device's schedule like all fusions, or measured with ``--tune``, and accepted if they are faster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rammer.errors import attribute_errors
from rammer.fusion.fall_back import LEAST_GAIN, fall_back
from rammer.fusion.fusion_legality import find_meeting_layer, join_connections
from rammer.fusion.group_prices import GroupPrices
from rammer.fusion.stitch_latency import Evaluator
from rammer.fusion.tile_graph import TileGraph, regroup
from rammer.fusion.topological_order import sort_topologically
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.device import Scope, VDevice
from rammer.ir.operator import ROperator

__all__ = ["FusionRule", "join_operators", "list_siblings"]


class FusionRule(Protocol):
    """A source of proposals, with a name for logs."""

    @property
    def name(self) -> str:
        """The name in logs and errors."""

    def __call__(self, tile: TileGraph, device: VDevice) -> Iterable[ROperator]:
        """Return operators without tiles, each of the Computes of several operators of ``tile`` (``join_operators``)."""


def join_operators(tile: TileGraph, members: Sequence[ROperator]) -> ROperator | None:
    """Return the operators ``members`` of ``tile`` as one operator, or None if they cannot be one task.

    Members that read each other meet in registers if they do so element by element, and else in the vEU's memory. The operator
    writes every value that others read. Its tasks cut all results alike, so these must have a common axis to cut."""
    position = {c.name: i for i, c in enumerate(tile.graph.computes)}
    computes = sorted((c for o in members for c in o.computes), key=lambda c: position[c.name])
    inside = {c.name for c in computes}

    def meeting(name: str, c: Compute) -> Scope | None:
        known = all(ex.affine_form(i) is not None for ld in c.loads if ld.tensor == name for i in ld.indices)
        return (find_meeting_layer(inside, c) or "veu") if known else None  # else data decide which elements it reads

    links = join_connections(members, computes, tile.roots, meeting)
    if links is None:
        return None
    escaping = {*tile.graph.outputs, *(r for roots in tile.aliases.values() for r in roots)}
    read = {n for c in tile.graph.computes if c.name not in inside for n in c.reads}
    outputs = tuple(c.name for c in computes if c.name in escaping or c.name in read)
    if computes[-1].name not in outputs:
        return None
    joined = ROperator(computes[-1].name, tuple(computes), links, outputs)
    cut = any(n > 1 for d, n in enumerate(joined.anchor.shape) if d not in joined.uncut)
    return joined if cut or joined.even else None


def list_siblings(tile: TileGraph) -> list[tuple[str, tuple[ROperator, ...]]]:
    """Return the tensors that several operators read, constants excepted, each with its readers in order."""
    readers = dict[str, list[ROperator]]()
    for operator in tile.operators:
        for name in operator.inputs:
            if name not in tile.graph.constants:
                readers.setdefault(name, []).append(operator)
    return [(name, tuple(found)) for name, found in readers.items() if len(found) > 1]


def apply_rule(rule: FusionRule, tile: TileGraph, device: VDevice, prices: GroupPrices, latency: Evaluator) -> TileGraph:
    """Return ``tile`` with the proposals of ``rule`` that are faster, alone and together. Raises DeviceFailure if a proposal is
    malformed."""
    with attribute_errors(rule):
        proposals = [_check_proposal(o, tile) for o in rule(tile, device)]
    before, position = tile, {c.name: i for i, c in enumerate(tile.graph.computes)}
    for proposed in proposals:
        inside = {c.name for c in proposed.computes}
        others = [o for o in tile.operators if inside.isdisjoint(c.name for c in o.computes)]
        whole = sum(len(o.computes) for o in others) + len(inside) == len(tile.graph.computes)
        operators = sort_topologically([*others, proposed], position, tile.roots)
        if not whole or len(operators) <= len(others):  # an accepted proposal overlaps it, or it would wait for itself
            continue
        wide = regroup(tile, operators, [proposed], rule.name)
        tile = fall_back(wide, tile, prices, latency, rule.name, -max(LEAST_GAIN, prices.doubt))
    # Operators that a proposal joins no longer run at the same time as those that another one joins.
    return tile if tile.operators == before.operators else fall_back(tile, before, prices, latency)


def _check_proposal(operator: ROperator, tile: TileGraph) -> ROperator:
    """Return ``operator``. Raises ValueError unless it consists of whole operators of ``tile`` and writes what others read."""
    inside = {c.name for c in operator.computes}
    parts = [o for o in tile.operators if not inside.isdisjoint(c.name for c in o.computes)]
    names = {c.name for o in parts for c in o.computes}
    if names != inside or len(parts) < 2:
        raise ValueError(f"operator {operator.name} does not consist of several whole operators")
    read = {n for c in tile.graph.computes if c.name not in inside for n in c.reads}
    if missing := {n for o in parts for n in o.outputs if n in read or n in tile.graph.outputs} - {*operator.outputs}:
        raise ValueError(f"operator {operator.name} does not write {', '.join(sorted(missing))}")
    return operator
