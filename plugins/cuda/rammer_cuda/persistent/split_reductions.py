"""Sums in parts: a deep product as partial sums, of more tasks, and their sum.

A launch may split a sum over a cluster of blocks. A row's block has no cluster, so an operator of few tasks and many terms would
leave rows idle. Here its sum becomes an operator of its own over parts of the terms, which are tasks like all others, and what is
left of it adds up the parts in order: both are ordinary operators, placed by the policy and ordered by counters.
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

#: Into how many parts a sum is cut, and the least places along the cut axis that a part is to have.
PARTS, LEAST = (2, 4, 8), 8


@dataclass(frozen=True)
class SplitSum:
    """``partial`` computes the parts of a sum, a tensor in ``storage``; ``rest``, which has the operator's name, adds them up and
    goes on as that did. Neither has a kernel yet; ``partial`` has the operator's family, whose operand rounding it keeps."""

    partial: ROperator
    rest: ROperator
    storage: Storage

    def binding(self, known: Binding) -> Binding:
        """What kernels of the two may know of the tensors, where ``known`` is that of the operator."""
        name = self.partial.name
        types, storages = {**known.types, name: self.partial.anchor.type}, {**known.storages, name: self.storage}
        return replace(known, types=types, storages=storages)


def split_sums(operator: ROperator, binding: Binding) -> Iterator[SplitSum]:
    """The operator's product in parts along its longest reduction; nothing where something comes before that product, where a
    length of the run ends it, where parts would be rounded more than the sum is, or where no number of parts divides it."""
    product = operator.computes[0]
    apart = product.kind == "contraction" and product.dtype == "float32" and len(product.axes) > 1
    if not apart or operator.endings or operator.stops:
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
