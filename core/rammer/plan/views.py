"""Which produced tensors a view reads: the link between storage and the tile-graph."""

from __future__ import annotations

from collections.abc import Mapping

from rammer.ir.compute import ComputeGraph
from rammer.ir.program import Storage
from rammer.plan.overlap import Shared, overlap


def view_sources(graph: ComputeGraph, storages: Mapping[str, Storage]) -> dict[str, tuple[str, ...]]:
    """For every tensor that no Compute writes and that is neither input nor constant: the Computes'
    tensors that share elements with it (one for a view, several for a concatenation)."""
    written: dict[str, Shared] = {}
    for c in graph.computes:
        storage = storages[c.name]
        written.setdefault(storage.buffer, Shared()).add(c.name, storage)
    given = {*graph.inputs, *graph.constants, *(c.name for c in graph.computes)}
    used = dict.fromkeys([*(r for c in graph.computes for r in c.reads), *graph.outputs])
    result = {}
    for name in used:
        if name not in given:
            mine = storages[name]
            near = written[mine.buffer].near(mine) if mine.buffer in written else ()
            result[name] = tuple(tensor for tensor, s in near if overlap(mine, s))
    return result
