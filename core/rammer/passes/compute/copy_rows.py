"""Copies of normalised rows for each of the products that read them: each then computes the rows in its own tasks.

Queries, keys and values of one token are three products of few rows. Fusion gives a normalisation to one reader, and only if no
other value reads it. So each product gets a copy of the reductions and of the maps after them.
"""

from __future__ import annotations

from dataclasses import replace

from rammer.ir import expr as ex
from rammer.ir.compute import Compute, ComputeGraph, contraction_operands, weight_sharing
from rammer.ir.expr import Expr, Load


def copy_rows(graph: ComputeGraph, few: int) -> ComputeGraph:
    """Return ``graph`` with a copy of rows with reductions for each product of constant weights, if only such products read the
    rows, and each weight has at most ``few`` results."""
    readers, kept = graph.consumers(), set(graph.outputs)
    known, result, types = graph.producers, list[Compute](), dict(graph.types)
    copied = dict[tuple[str, str], str]()  #: The copy's name by product and original.
    before = dict[str, list[Compute]]()  #: Copies by the product that they precede.
    for c in graph.computes:
        products = readers[c.name]
        if len(products) < 2 or c.name in kept or not all(_takes_rows(p, c.name, graph, few) for p in products):
            continue
        chain = _row_chain(c, known, readers, kept)
        for number, product in enumerate(products[1:] if chain else (), 1):
            names = {r.name: f"{r.name}_copy{number}" for r in chain}
            if not types.keys().isdisjoint(names.values()):
                continue
            copied[product.name, c.name] = names[c.name]
            before.setdefault(product.name, []).extend(_renamed(r, names) for r in chain)
            types.update((new, types[old]) for old, new in names.items())
    if not copied:
        return graph
    for c in graph.computes:
        names = {old: new for (product, old), new in copied.items() if product == c.name}
        result += [*before.get(c.name, ()), _renamed(c, names) if names else c]
    return replace(graph, computes=tuple(result), types=types)


def _takes_rows(product: Compute, rows: str, graph: ComputeGraph, few: int) -> bool:
    """Return True if ``product`` multiplies ``rows`` by weights, each for at most ``few`` results."""
    operands = contraction_operands(product) if product.kind == "contraction" else None
    mine = [ld for ld in operands or () if ld.tensor == rows]
    shared = weight_sharing(product, graph.constants)
    return len(mine) == 1 and shared is not None and shared <= few


def _row_chain(rows: Compute, known: dict[str, Compute], readers: dict[str, list[Compute]], kept: set[str]) -> list[Compute]:
    """Return the reductions on which only ``rows`` depends, and the maps from these to ``rows``, in order; none without a
    reduction."""
    inside, found = {rows.name}, [rows]
    for c in found:
        producers = (known[n] for n in c.reads if n in known)
        for p in producers:
            alone = p.kind in ("map", "reduction") and p.name not in kept and all(r.name in inside for r in readers[p.name])
            if alone and p.name not in inside:
                inside.add(p.name)
                found.append(p)
    after, result = set[str](), list[Compute]()
    for c in (c for c in known.values() if c.name in inside):
        if c.kind == "reduction" or not after.isdisjoint(c.reads):
            after.add(c.name)
            result.append(c)
    return result if rows.name in after and rows.kind == "map" else []


def _renamed(c: Compute, names: dict[str, str]) -> Compute:
    """Return ``c`` with loads of renamed tensors, and its own name if that is renamed."""

    def rule(e: Expr) -> Expr | None:
        return replace(e, tensor=names[e.tensor]) if isinstance(e, Load) and e.tensor in names else None

    return replace(c, name=names.get(c.name, c.name), body=ex.transform(c.body, rule), used=None)
