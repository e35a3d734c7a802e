"""Conditions are computed where they are asked: a comparison that one map reads element by element is part of that map.

As a tensor of its own it would be one more result to keep, of a type that kernel families for products do not hold: the
guard that exporters put behind an attention's softmax (``where(isnan(p), 0, p)``) would cut the attention in two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, identity_load
from rammer.ir.expr import Expr, Load, Ref

#: Most maps that become one: bodies are walked by recursion, and kernels gain nothing from longer ones.
MOST_CONDITIONS: Final = 24


def inline_conditions(graph: ComputeGraph) -> ComputeGraph:
    """``graph`` with every map of truth values that is read by one other map only, element by element, inside that map."""
    readers, outputs = graph.consumers(), set(graph.outputs)
    inside: dict[str, Compute] = {}
    result, made_of = list[Compute](), dict[str, int]()
    for c in graph.computes:
        made = _with(c, inside)
        made_of[c.name] = 1 + sum(made_of[r] for r in c.reads if r in inside)
        few = made_of[c.name] < MOST_CONDITIONS
        if few and c.name not in outputs and _condition(c) and _asked_once(c, readers[c.name]):
            inside[c.name] = made
        else:
            result.append(made)
    return replace(graph, computes=tuple(result)) if inside else graph


def _condition(c: Compute) -> bool:
    """A map to truth values that computes something; what only rearranges may be a view."""
    return c.dtype == "bool" and c.combiner is None and not isinstance(c.body, Load)


def _asked_once(c: Compute, readers: list[Compute]) -> bool:
    """Whether one map alone reads ``c``, element by element."""
    if len(readers) != 1 or readers[0].combiner is not None or readers[0].shape != c.shape:
        return False
    return all(identity_load(ld, readers[0]) for ld in readers[0].loads if ld.tensor == c.name)


def _with(c: Compute, inside: dict[str, Compute]) -> Compute:
    """``c`` with the conditions that it reads computed in place."""
    if not any(r in inside for r in c.reads):
        return c

    def rule(e: Expr) -> Expr | None:
        if not isinstance(e, Load) or e.tensor not in inside:
            return None
        asked = inside[e.tensor]
        places: dict[str, Expr] = {old.name: Ref(new.name) for old, new in zip(asked.axes, c.axes, strict=True)}
        return ex.substitute(asked.body, places)

    return replace(c, body=ex.transform(c.body, rule), used=None)
