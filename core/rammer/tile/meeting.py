"""Which operators may be stitched, and where what they compute meets on chip."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rammer.ir.compute import Compute, identity_load
from rammer.ir.device import Scope
from rammer.ir.expr import Const, Ref
from rammer.ir.operator import ROperator


def memory_bound(operator: ROperator) -> bool:
    """Whether an operator is maps and reductions alone, and has something to compute."""
    kinds = {c.kind for c in operator.computes}
    return kinds <= {"map", "reduction"} and not operator.endings and 0 not in operator.anchor.shape


def recomputing(operator: ROperator) -> ROperator:
    """The same operator that keeps no rows of maps on chip: who reads them computes them again. So rows may be of any length."""
    maps = {c.name for c in operator.computes if not c.reduce}
    links = tuple(replace(e, layer="thread") if e.producer in maps else e for e in operator.connections)
    return replace(operator, connections=links)


def meeting(inside: Collection[str], c: Compute) -> Scope | None:
    """Where ``c`` can meet maps and reductions of these names: in registers element by element, else on chip, row by row."""
    loads = [ld for ld in c.loads if ld.tensor in inside]
    if c.combiner is None and all(identity_load(ld, c) for ld in loads):
        return "thread"
    aligned = all(ld.fill is None and all(isinstance(i, Ref | Const) for i in ld.indices) for ld in loads)
    return "veu" if aligned else None
