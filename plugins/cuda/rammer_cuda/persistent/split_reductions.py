"""Split reductions: a deep product as partial sums, of more tasks, and their sum.

A launch may split a sum over a cluster of blocks. A row's block has only itself, so an operator of few tasks and many terms would
leave rows idle. Here its sum becomes an operator over parts of the terms, with ordinary tasks. The rest of the operator adds up
the parts in order. The policy places both operators, and counters order them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

from rammer.device.manifest import Binding
from rammer.ir.expr import Expr, Load, Op, Ref, integer
from rammer.ir.operator import ROperator
from rammer.ir.program import Storage, dense
from rammer.passes.compute.rfactor import rfactor

#: Numbers of parts that are tried, and the minimum extent of a part along the cut axis.
PARTS, LEAST = (2, 4, 8), 8


@dataclass(frozen=True)
class SplitSum:
    """A sum in parts: ``partial`` computes the parts, a tensor in ``storage``; ``rest`` adds them and continues the operator.

    ``rest`` has the operator's name. Neither has a kernel yet; ``partial`` has the operator's family, whose operand rounding it
    keeps."""

    partial: ROperator
    rest: ROperator
    storage: Storage

    def binding(self, known: Binding) -> Binding:
        """Return the binding for kernels of both operators, from that of the original operator."""
        name = self.partial.name
        types, storages = {**known.types, name: self.partial.anchor.type}, {**known.storages, name: self.storage}
        return replace(known, types=types, storages=storages)


def split_sums(operator: ROperator, binding: Binding) -> Iterator[SplitSum]:
    """Yield the operator's product in parts along its longest reduction. Yields nothing if the product is not first, ends at a
    length of the run, or would be rounded more in parts. Also yields nothing if no number of parts divides the reduction."""
    product = operator.computes[0]
    splittable = product.kind == "contraction" and product.dtype == "float32" and len(product.axes) > 1
    if not splittable or operator.skips or operator.reduce_bounds:
        return
    longest = max(product.reduce, key=lambda r: r.extent)
    name = next(n for i in range(len(binding.types) + 1) if (n := f"{product.name}_parts{i or ''}") not in binding.types)
    for parts in PARTS:
        if longest.extent % parts or longest.extent < LEAST * parts:
            continue
        partial, _ = rfactor(product, longest.name, parts, name)
        batch, *others, part = partial.axes
        partial = replace(partial, axes=(batch, part, *others))
        places: list[tuple[Expr, ...]] = [(Ref(batch.name), integer(i), *(Ref(a.name) for a in others)) for i in range(parts)]
        loads: list[Expr] = [Load(name, place) for place in places]
        whole = replace(product, body=reduce(lambda a, b: Op("add", (a, b)), loads), reduce=(), combiner=None)
        first = ROperator(name, (partial,), (), (name,), (1,) * len(partial.axes), operator.family)
        computes, tile = (whole, *operator.computes[1:]), (1,) * len(operator.anchor.axes)
        yield SplitSum(
            first, replace(operator, computes=computes, tile=tile, family="", config=()), dense(name, name, partial.shape)
        )
