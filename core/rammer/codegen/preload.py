"""Preloading: the stored elements of an expression are loaded before a kernel computes anything. Loads that are issued together
wait for memory together. Constants may even be loaded before a kernel may read the results of other kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rammer.codegen.scalar import Block
from rammer.codegen.symbolic_bounds import canonicalise_sum
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load


def stored_loads(e: Expr, inlined: Mapping[str, Compute]) -> list[Load]:
    """Return the distinct loads of stored tensors that evaluating ``e`` makes, including those of in-place producers. Loads of a
    reduction, loads that only a padded producer needs, and data-dependent addresses are left out."""
    found: dict[Load, None] = {}
    _collect_loads(e, inlined, found, set())
    return list(found)


def _collect_loads(e: Expr, inlined: Mapping[str, Compute], found: dict[Load, None], seen: set[Load]) -> None:
    for load in ex.loads(e):
        if load in seen or any(map(ex.has_loads, load.indices)):
            continue
        seen.add(load)
        producer = inlined.get(load.tensor)
        if producer is None:
            found[Load(load.tensor, tuple(canonicalise_sum(i) for i in load.indices), load.fill)] = None
        elif not producer.reduce and load.fill is None:
            axes = dict(zip((a.name for a in producer.axes), load.indices, strict=True))
            _collect_loads(ex.substitute(producer.body, axes), inlined, found, seen)


def preload_elements(block: Block, loads: Iterable[Load]) -> None:
    """Load each element into a variable of ``block``; later uses of the same load find it."""
    for load in loads:
        block.load(load)
