"""Which producers computed in place an expression needs, whichever way its conditions go.

What both sides of a condition need is computed once before it. Else it stands in the text once for each side, and a chain of
conditions, each of which reads the one before on both sides, doubles with every one of them: a loop's state that is kept, or
made anew from itself, turn after turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rammer.codegen.symbolic_bounds import canonicalise_sum
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load, Op

#: Loads in the order in which they are met, so that what one needs stands behind it.
Needed: TypeAlias = "dict[Load, None]"


@dataclass
class Needs:
    """Of expressions of one function, whose ``inlined`` producers are computed where they are read."""

    inlined: Mapping[str, Compute]
    known: dict[Expr, Needed] = field(default_factory=dict)

    def both(self, one: Expr, other: Expr) -> Iterator[Load]:
        """The loads of producers that evaluating either makes, but for those that another of them makes: in order."""
        first, second = self.of(one), self.of(other)
        left = {load: None for load in first if load in second}
        while left:
            load = next(iter(left))
            for needed in self.of(load):
                left.pop(needed, None)
            yield load

    def of(self, e: Expr) -> Needed:
        """The loads of producers that evaluating ``e`` surely makes, as a function's text spells them: its own and, where a
        producer is no reduction and read inside its bounds at places that are sums of axes, what that one needs."""
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
