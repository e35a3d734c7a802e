"""The choice between two groupings of one graph, region by region, so that no fusion is slower than less of it.

A *region* is a smallest set of Computes that both groupings cover with whole operators. Its operators are timed in the device's
schedule, where independent ones are concurrent and small ones share a launch; prices of single operators leave that out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rammer.fusion.group_prices import GroupPrices
from rammer.fusion.stitch_latency import Evaluator
from rammer.fusion.tile_graph import ConnectionTrial, TileGraph, edges_of
from rammer.fusion.topological_order import sort_topologically
from rammer.ir.operator import ROperator

#: Minimum fraction of a region's time that less fusion must save: less is within the noise of runs, or a tie of predictions.
LEAST_GAIN: Final = 0.01
#: Maximum number of operators of a graph that is also compared as a whole.
MOST_WHOLE: Final = 64


def fall_back(
    full: TileGraph, plain: TileGraph, prices: GroupPrices, latency: Evaluator, rule: str = "", least: float = LEAST_GAIN
) -> TileGraph:
    """Return ``full`` with the operators of ``plain``, a grouping with less fusion, in every region that is faster so, by its
    measured time if plans are run, and else by its predicted time. ``least`` is the minimum fraction saved. Negative ones favour
    ``plain``; they are for proposals of a ``rule``, and no whole graph is compared."""
    position = {c.name: i for i, c in enumerate(full.graph.computes)}

    def seconds(operators: Sequence[ROperator]) -> float:
        ordered = sort_topologically(operators, position, full.roots)
        measured = latency.together(ordered) if latency.together else None
        return _predicted(ordered, prices, latency, full) if measured is None else measured

    operators, tried = list(full.operators), list[ConnectionTrial]()

    def settle(fused: Sequence[ROperator], parts: Sequence[ROperator], subject: str, least: float) -> None:
        nonlocal operators
        together, separate = seconds(fused), _longest_path(sort_topologically(parts, position, full.roots), prices, full)
        if latency.together or together > separate:
            separate = seconds(parts)  # the device is asked for the parts only if the traffic model leaves it open
        others = [o for o in operators if o not in fused]
        faster = separate < together * (1 - least)
        faster = faster and len(sort_topologically([*others, *parts], position, full.roots)) == len(others) + len(parts)
        why = "less fusion is faster" if faster else "it is faster" if rule else "less fusion is not faster"
        tried.append(ConnectionTrial(subject, f"rule {rule}" if rule else "region", separate, together, not faster, why))
        operators = [*others, *parts] if faster else operators

    for fused, parts in _regions(full, plain):
        settle(fused, parts, " | ".join(o.name for o in fused), least)
    if least > 0 and latency.together is None and 1 < len(operators) <= MOST_WHOLE and operators != list(plain.operators):
        # A region's neighbours may fill its waves, so the sum of regions is not the whole.
        settle(operators, plain.operators, "the whole graph", 0.0)
    ordered = sort_topologically(operators, position, full.roots)
    edges = edges_of(full.graph, ordered)
    undone = {(e.producer, e.consumer) for e in edges if e.layer == "device"}
    end = ConnectionTrial("", "veu", math.nan, math.nan, False, "less fusion is faster in this region")
    outcomes = {e: (*t, end) if e in undone and t[-1].kept else t for e, t in full.outcomes.items()}
    return replace(full, operators=ordered, decisions=(*full.decisions, *tried), edges=edges, outcomes=outcomes)


def _regions(full: TileGraph, plain: TileGraph) -> list[tuple[list[ROperator], list[ROperator]]]:
    """Return the operators of each region in which the groupings differ, of both."""
    of = {c.name: {c.name} for c in full.graph.computes}
    for operator in (*full.operators, *plain.operators):
        whole = max((of[c.name] for c in operator.computes), key=len)
        for c in operator.computes:
            if of[c.name] is not whole:
                whole |= of[c.name]
                of |= dict.fromkeys(of[c.name], whole)
    found: dict[int, tuple[list[ROperator], list[ROperator]]] = {}
    for side, tile in enumerate((full, plain)):
        for operator in tile.operators:
            found.setdefault(id(of[operator.name]), ([], []))[side].append(operator)
    return [(fused, parts) for fused, parts in found.values() if fused != parts]


def _waits(operators: Sequence[ROperator], tile: TileGraph) -> dict[str, tuple[str, ...]]:
    """Return, by operator in topological order, the names of those that it waits for."""
    owner, waits = dict[str, str](), dict[str, tuple[str, ...]]()
    for o in operators:
        waits[o.name] = tuple({owner[r]: None for n in o.inputs for r in tile.roots(n) if r in owner})
        owner |= {c.name: o.name for c in o.computes}
    return waits


def _longest_path(operators: Sequence[ROperator], prices: GroupPrices, tile: TileGraph) -> float:
    """Return a lower bound of the seconds of operators in topological order, by the traffic model."""
    path, waits = dict[str, float](), _waits(operators, tile)
    for o in operators:
        path[o.name] = prices.modelled(o) + max((path[w] for w in waits[o.name]), default=0.0)
    return max(path.values())


def _predicted(operators: Sequence[ROperator], prices: GroupPrices, latency: Evaluator, tile: TileGraph) -> float:
    """Return the predicted seconds of operators in topological order, infinite if one has no kernel."""
    kernels = {o.name: prices.kernel(o) for o in operators}
    found = {name: (kernel,) for name, kernel in kernels.items() if kernel is not None}
    return latency.seconds(found, _waits(operators, tile)) if len(found) == len(kernels) else math.inf
