"""TileGraph: the graph of operators, in which each edge between Computes carries the memory layer where they meet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import Final, Literal, TypeAlias

from rammer.fusion.tile_traffic import task_cost
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.device import VDevice
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import RProgram

__all__ = ["BatchTrial", "ConnectionTrial", "CutTrial", "TileGraph"]

#: Layout of batched products of one tensor: stacked if their shapes are equal, or joined along the weights' columns.
Way: TypeAlias = Literal["stacked", "joined"]
#: Maximum time of split products relative to the whole: prices are not more exact.
CLEARLY: Final = 0.99


def _format_prices(together: float, separate: float) -> str:
    return f"{together * 1e6:.3g} us together, {separate * 1e6:.3g} us separately"


@dataclass(frozen=True, slots=True)
class BatchTrial:
    """Products that were tried as one: seconds of both variants, and their layout (None if they stay separate)."""

    subject: str
    way: Way | None
    separate: float
    together: float
    why: str

    def __str__(self) -> str:
        verdict = "batched" if self.way else "separate"
        figures = _format_prices(self.together, self.separate)
        known = f"{figures}  ({self.why})" if math.isfinite(self.separate) else f"({self.why})"
        return f"{verdict:<8}{self.subject}  {known}"


@dataclass(frozen=True, slots=True)
class CutTrial:
    """Products that were tried in pieces: seconds of the original, and of the pieces, separate or batched again."""

    subject: str
    whole: float
    separate: float

    @property
    def kept(self) -> bool:
        """True if the products are cut."""
        return self.separate < self.whole * CLEARLY

    def __str__(self) -> str:
        why = "in blocks of columns, or of the reduction" if self.kept else "in pieces they are not faster"
        figures = f"{self.separate * 1e6:.3g} us in pieces, {self.whole * 1e6:.3g} us whole"
        return f"{'cut' if self.kept else 'whole':<8}{self.subject}  {figures}  ({why})"


@dataclass(frozen=True, slots=True)
class ConnectionTrial:
    """A connection that was tried: its predicted seconds (NaN: not priced), and True if it was accepted."""

    subject: str
    layer: str
    separate: float
    together: float
    kept: bool
    why: str

    def __str__(self) -> str:
        verdict = "kept" if self.kept else "dropped"
        if math.isnan(self.together):
            return f"{verdict:<8}{self.subject} <{self.layer}>  ({self.why})"
        figures = _format_prices(self.together, self.separate)
        return f"{verdict:<8}{self.subject} <{self.layer}>  {figures}  ({self.why})"


@dataclass(frozen=True)
class TileGraph:
    """Operators without tiles in topological order, the edges between them, and the decisions. Edges inside an operator carry the
    layer at which they are connected. All others meet at ``device``, the lowest layer that tasks share. ``outcomes`` has the
    attempts for every edge, by producer and consumer, from the highest layer down. ``aliases`` maps views and concatenations to
    the tensors whose memory they share."""

    graph: ComputeGraph
    operators: tuple[ROperator, ...]
    decisions: tuple[ConnectionTrial | BatchTrial | CutTrial, ...] = ()
    edges: tuple[Connection, ...] = field(default=())
    outcomes: Mapping[tuple[str, str], tuple[ConnectionTrial, ...]] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def roots(self, tensor: str) -> tuple[str, ...]:
        """Return the tensors whose memory ``tensor`` reads: itself unless it is a view."""
        return self.aliases.get(tensor, (tensor,))

    def owner(self) -> Mapping[str, str]:
        """Return the operator name of each Compute."""
        return {c.name: o.name for o in self.operators for c in o.computes}

    def describe(self, device: VDevice, program: RProgram | None = None) -> str:
        """Return the tile graph as text, with the device's layer names and the log of decisions. With ``program``, which has its
        operators with tiles, it includes the bytes that one task of each operator reads, writes and holds at every layer."""
        lines = [f"tilegraph {self.graph.name} on {device.name}"]
        for layer in device.layers:
            sharers = f", shared by {layer.sharers} vEUs" if layer.sharers else ""
            lines.append(f"  layer {layer.name} <{layer.scope}> {layer.capacity} B {layer.bandwidth / 1e9:.4g} GB/s{sharers}")
        for operator in self.operators:
            lines.append(f"  operator {operator.name} = {format_chain(operator, device)}")
            tiled = program.operator.get(operator.name) if program is not None else None
            if tiled is not None and program is not None and tiled.task_count:
                cost = task_cost(tiled, self.graph.types, device, program.storage)
                uses = (f"{u.name} {u.read} B read {u.written} B written {u.footprint} B held" for u in cost.layers)
                lines.append(f"    task of {tiled.task_count}: {', '.join(uses)}")
        for e in self.edges:
            failed = [f"{t.layer}: {t.why}" for t in self.outcomes.get((e.producer, e.consumer), ()) if not t.kept]
            why = f"  ({'; '.join(failed)})" if failed else ""
            lines.append(f"  edge {e.producer} <{device.layer(e.layer).name}> {e.consumer}{why}")
        lines += [f"  {d}" for d in self.decisions]
        return "\n".join(lines)


def format_chain(operator: ROperator, device: VDevice) -> str:
    """Return ``a <register> b <register> c``: the operator's Computes with the layers between them."""
    layer_into: dict[str, str] = {}
    for connection in operator.connections:
        layer_into[connection.consumer] = device.layer(connection.layer).name
    parts = [operator.computes[0].name]
    for c in operator.computes[1:]:
        parts.append(f"<{layer_into.get(c.name, '-')}> {c.name}")
    return " ".join(parts)


def regroup(tile: TileGraph, operators: tuple[ROperator, ...], joined: Sequence[ROperator], why: str) -> TileGraph:
    """Return ``tile`` with other ``operators`` in topological order. The edges inside the ``joined`` ones are kept for the
    reason ``why``."""
    kept = {
        (e.producer, e.consumer): ConnectionTrial(e.consumer, e.layer, nan, nan, True, why) for o in joined for e in o.connections
    }
    outcomes = {e: (*tried, kept[e]) if e in kept and not tried[-1].kept else tried for e, tried in tile.outcomes.items()}
    return replace(tile, operators=operators, edges=edges_of(tile.graph, operators), outcomes=outcomes)


def edges_of(graph: ComputeGraph, operators: Sequence[ROperator]) -> tuple[Connection, ...]:
    """Return the edges inside ``operators``, and those between them, which meet at the device layer."""
    produced: dict[str, Compute] = graph.producers
    owner = {c.name: o.name for o in operators for c in o.computes}
    between = (
        Connection(name, c.name, "device")
        for c in graph.computes
        for name in c.reads
        if name in produced and owner[name] != owner[c.name]
    )
    return (*(e for o in operators for e in o.connections), *between)
