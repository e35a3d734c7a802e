"""Producers computed in place that an expression needs on every path of its conditions.

A load that both branches of a condition need is computed once before it. Otherwise each branch repeats its text. In a chain of
conditions, each of which reads the previous one in both branches, the text doubles with every condition. Loop states that are
retained or recomputed from themselves at every iteration are an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rammer.codegen.symbolic_bounds import canonicalise_sum
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load, Op

#: Loads in order of discovery, so that the loads that a load needs follow it.
Needed: TypeAlias = "dict[Load, None]"


@dataclass
class Needs:
    """The loads that expressions of one function need; its ``inlined`` producers are computed where they are read."""

    inlined: Mapping[str, Compute]
    known: dict[Expr, Needed] = field(default_factory=dict)

    def both(self, one: Expr, other: Expr) -> Iterator[Load]:
        """Yield, in order, the producer loads that both expressions make, except those that another of them makes."""
        first, second = self.of(one), self.of(other)
        left = {load: None for load in first if load in second}
        while left:
            load = next(iter(left))
            for needed in self.of(load):
                left.pop(needed, None)
            yield load

    def of(self, e: Expr) -> Needed:
        """Return the producer loads that evaluating ``e`` always makes, as a function's text spells them. They include the loads
        of a producer that does not reduce, if it is read inside its bounds at sums of axes."""
        found = self.known.get(e)
        if found is None:
            found = self.known[e] = self._collect_needs(e)
        return found

    def _collect_needs(self, e: Expr) -> Needed:
        if isinstance(e, Op) and e.fn == "where":
            test, one, other = e.args
            return self.of(test) | {load: None for load in self.of(one) if load in self.of(other)}
        if not isinstance(e, Load) or e.tensor not in self.inlined:
            return self._all(ex.children(e))
        load, c = Load(e.tensor, tuple(canonicalise_sum(i) for i in e.indices), e.fill), self.inlined[e.tensor]
        if c.reduce or e.fill is not None or any(ex.affine_form(i) is None for i in load.indices):
            return {load: None}
        axes = dict(zip((a.name for a in c.axes), load.indices, strict=True))
        return {load: None} | self.of(ex.substitute(c.body, axes))

    def _all(self, several: tuple[Expr, ...]) -> Needed:
        found: Needed = {}
        for e in several:
            found |= self.of(e)
        return found
