"""Legality of stitching: supported operators, and the layers at which their Computes meet on chip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, identity_load
from rammer.ir.device import Scope
from rammer.ir.expr import Const, Load, Ref
from rammer.ir.operator import Connection, ROperator

#: Maximum operations of a map that is as cheap to recompute as to read: an exponential exceeds it.
CHEAP: Final = 4


def memory_bound(operator: ROperator) -> bool:
    """Return True if an operator has only maps and reductions, no endings and a non-empty result."""
    kinds = {c.kind for c in operator.computes}
    return kinds <= {"map", "reduction"} and not operator.skips and 0 not in operator.anchor.shape


def move_tiles(operator: ROperator, scope: Scope) -> ROperator:
    """Return the operator with every tile of a task held at the layer ``scope``."""
    return replace(operator, connections=tuple(replace(e, layer=scope) if e.holds_tile else e for e in operator.connections))


def recompute_maps(operator: ROperator) -> ROperator:
    """Return the operator with maps recomputed by their readers instead of held on chip, so rows may have any length. Maps
    computed in place of a sum are held like the sum. They have one value per row, or would cost a sum per use."""
    sums = _reduction_names(operator)
    placed = {e.consumer for e in operator.connections if e.layer == "thread" and e.producer in sums}
    maps = {c.name for c in operator.computes if not c.reduce} - placed
    links = tuple(replace(e, layer="thread") if e.producer in maps else e for e in operator.connections)
    return replace(operator, connections=links)


def read_in_place(operator: ROperator) -> ROperator:
    """Return the operator with cheap maps computed where they are read, if one reduction reads each element once. If rows of
    tasks are in memory, these maps would otherwise be written for a single read."""
    links, placed = list(operator.connections), _reduction_names(operator)
    readers = Counter(e.producer for e in links)
    for c in operator.computes:
        for place, e in enumerate(links):
            loads = [ld for ld in c.loads if ld.tensor == e.producer]
            once = len(loads) == 1 == readers[e.producer] and e.producer not in {*placed, *operator.outputs}
            if e.consumer == c.name and c.reduce and e.holds_tile and once and _each_once(c, loads[0]):
                producer = next(p for p in operator.computes if p.name == e.producer)
                links[place] = replace(e, layer="thread") if ex.count_flops(producer.body) <= CHEAP else e
    return replace(operator, connections=tuple(links))


def _each_once(c: Compute, load: Load) -> bool:
    """Return True if a load reads a different element at every point of a reduction."""
    live = [i for i in load.indices if not isinstance(i, Const)]
    own = {a.name for a in (*c.axes, *c.reduce) if a.extent > 1}
    return load.fill is None and all(isinstance(i, Ref) for i in live) and own <= {str(i) for i in live}


def _reduction_names(operator: ROperator) -> set[str]:
    """Return the names of reductions, and of maps computed from them in place."""
    found = {c.name for c in operator.computes if c.reduce}
    places = {c.name: i for i, c in enumerate(operator.computes)}
    for e in sorted(operator.connections, key=lambda e: places[e.producer]):
        found |= {e.consumer} if e.layer == "thread" and e.producer in found else set()
    return found


def join_connections(
    members: Sequence[ROperator],
    computes: Sequence[Compute],
    roots: Callable[[str], tuple[str, ...]],
    meeting: Callable[[str, Compute], Scope | None],
) -> tuple[Connection, ...] | None:
    """Return the connections of one operator of all ``computes`` of ``members``. Those of members keep their layers; ``meeting``
    returns the layer of a new one, by producer and consumer. Return None if it has none, or if a Compute reads a view of another
    result, which is in memory only after that finishes."""
    inside = {c.name for c in computes}
    layers = {(e.producer, e.consumer): e.layer for o in members for e in o.connections}
    held = {name: layer for o in members for name, layer in o.held.items()}
    links = list[Connection]()
    for c in computes:
        if any(r in inside for n in c.reads if n not in inside for r in roots(n)):
            return None
        for name in (n for n in c.reads if n in inside):
            layer = layers.get((name, c.name)) or meeting(name, c)
            if layer is None:
                return None
            links.append(Connection(name, c.name, layer if layer == "thread" else held.get(name, layer)))
    return tuple(links)


def find_meeting_layer(inside: Collection[str], c: Compute) -> Scope | None:
    """Return the layer at which ``c`` can meet maps and reductions ``inside``, or None. Element-wise Computes meet in registers
    ("thread"), row-wise ones on chip ("veu")."""
    loads = [ld for ld in c.loads if ld.tensor in inside]
    if c.combiner is None and all(identity_load(ld, c) for ld in loads):
        return "thread"
    aligned = all(ld.fill is None and all(isinstance(i, Ref | Const) for i in ld.indices) for ld in loads)
    return "veu" if aligned else None
