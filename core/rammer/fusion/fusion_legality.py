"""Which operators may be stitched, and where what they compute meets on chip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, identity_load
from rammer.ir.device import Scope
from rammer.ir.expr import Const, Load, Ref
from rammer.ir.operator import ROperator

#: Operations of a map that is as well computed again as read: an exponential is not.
CHEAP: Final = 4


def memory_bound(operator: ROperator) -> bool:
    """Whether an operator is maps and reductions alone, and has something to compute."""
    kinds = {c.kind for c in operator.computes}
    return kinds <= {"map", "reduction"} and not operator.endings and 0 not in operator.anchor.shape


def recompute_maps(operator: ROperator) -> ROperator:
    """The same operator that keeps no rows of maps on chip: who reads them computes them again. So rows may be of any length.
    What is computed of a sum in its place is kept, as the sum would be: it has a value for each row, or costs a sum each time."""
    sums = _reduction_names(operator)
    placed = {e.consumer for e in operator.connections if e.layer == "thread" and e.producer in sums}
    maps = {c.name for c in operator.computes if not c.reduce} - placed
    links = tuple(replace(e, layer="thread") if e.producer in maps else e for e in operator.connections)
    return replace(operator, connections=links)


def read_in_place(operator: ROperator) -> ROperator:
    """The same operator whose maps of few operations are computed where they are read, if that is one reduction which reads every
    element once: where rows that tasks keep lie in memory, they would be written there for one look."""
    links, placed = list(operator.connections), _reduction_names(operator)
    readers = Counter(e.producer for e in links)
    for c in operator.computes:
        for place, e in enumerate(links):
            loads = [ld for ld in c.loads if ld.tensor == e.producer]
            once = len(loads) == 1 == readers[e.producer] and e.producer not in {*placed, *operator.outputs}
            if e.consumer == c.name and c.reduce and e.layer == "veu" and once and _each_once(c, loads[0]):
                producer = next(p for p in operator.computes if p.name == e.producer)
                links[place] = replace(e, layer="thread") if ex.count_flops(producer.body) <= CHEAP else e
    return replace(operator, connections=tuple(links))


def _each_once(c: Compute, load: Load) -> bool:
    """Whether a load reads another element at every point of a reduction."""
    live = [i for i in load.indices if not isinstance(i, Const)]
    own = {a.name for a in (*c.axes, *c.reduce) if a.extent > 1}
    return load.fill is None and all(isinstance(i, Ref) for i in live) and own <= {str(i) for i in live}


def _reduction_names(operator: ROperator) -> set[str]:
    """The reductions, and what is computed of them where it is read."""
    found = {c.name for c in operator.computes if c.reduce}
    places = {c.name: i for i, c in enumerate(operator.computes)}
    for e in sorted(operator.connections, key=lambda e: places[e.producer]):
        found |= {e.consumer} if e.layer == "thread" and e.producer in found else set()
    return found


def find_meeting_layer(inside: Collection[str], c: Compute) -> Scope | None:
    """Where ``c`` can meet maps and reductions of these names: in registers element by element, else on chip, row by row."""
    loads = [ld for ld in c.loads if ld.tensor in inside]
    if c.combiner is None and all(identity_load(ld, c) for ld in loads):
        return "thread"
    aligned = all(ld.fill is None and all(isinstance(i, Ref | Const) for i in ld.indices) for ld in loads)
    return "veu" if aligned else None
