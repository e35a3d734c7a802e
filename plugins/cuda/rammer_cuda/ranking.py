"""The order in which choices of several families are offered; a kernel is written only when its turn has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from rammer.ir.operator import ROperator

from rammer_cuda.family import Choice

#: How far behind the best prediction a family's best may be and still be measured among the first: so many times, and seconds.
LEADING, NEAR = 1.3, 2e-6


def seconds_of(choice: Choice | Option) -> float:
    """What choices are ranked by."""
    return choice.seconds


@dataclass
class Option:
    """A choice, of which somebody may ask whether it can be written and fits."""

    choice: Choice
    possible: Callable[[ROperator], bool]

    @property
    def seconds(self) -> float:
        """As predicted."""
        return self.choice.seconds

    @cached_property
    def fits(self) -> bool:
        """Whether there is a kernel: it is written now."""
        return self.possible(self.choice.operator)

    @property
    def refused(self) -> bool:
        """Whether somebody asked, and there is none."""
        return self.__dict__.get("fits") is False


def some(choices: Iterable[Choice], possible: Callable[[ROperator], bool], count: int) -> Iterator[Option]:
    """Options until ``count`` of them are there that nobody found to be impossible."""
    for choice in choices:
        option = Option(choice, possible)
        yield option
        count -= not option.refused
        if count <= 0:
            return


def leaders_first(ranked: Iterable[Option]) -> Iterator[Choice]:
    """What fits of ``ranked`` (by predicted seconds), but each family's best before every second best: tuning measures only
    the first few, and models of different families are less comparable than one family's. A family far behind has no such
    place."""
    later, seen, limit = list[Option](), set[str](), float("inf")
    rest = iter(ranked)
    for option in rest:
        family = option.choice.operator.family
        if option.seconds > limit:
            later.append(option)
            break
        if family in seen:
            later.append(option)
        elif option.fits:
            limit = min(limit, LEADING * option.seconds + NEAR)
            seen.add(family)
            yield option.choice
    yield from (o.choice for o in chain(later, rest) if o.fits)
