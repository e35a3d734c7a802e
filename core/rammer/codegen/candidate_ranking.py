"""The order in which choices of several families are offered; a kernel is written only when its turn has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rammer.codegen.kernel_family import Choice
from rammer.ir.operator import ROperator

#: How far behind the best prediction a family's best may be and still be measured among the first: so many times, and seconds.
LEADING, NEAR = 1.3, 2e-6


@dataclass
class Option:
    """A choice, of which somebody may ask whether it can be written and fits."""

    choice: Choice
    possible: Callable[[ROperator], bool]

    @cached_property
    def fits(self) -> bool:
        """Whether there is a kernel: it is written now."""
        return self.possible(self.choice.operator)

    @property
    def refused(self) -> bool:
        """Whether somebody asked, and there is none."""
        return self.__dict__.get("fits") is False


class Queue:
    """Choices, best predicted first: ``most`` of those that nobody found to be impossible."""

    def __init__(self, choices: Iterable[Choice], possible: Callable[[ROperator], bool], most: int) -> None:
        self._rest, self._possible, self._most = iter(choices), possible, most
        self._out, self._head = list[Option](), list[Option]()

    def head(self) -> Option | None:
        """The next one; None where there is none, or enough are out."""
        if sum(not o.refused for o in self._out) >= self._most:
            return None
        if not self._head:
            self._head += [Option(c, self._possible) for c in [next(self._rest, None)] if c is not None]
        return self._head[0] if self._head else None

    def take(self) -> Option:
        """``head``, which is out from now on."""
        self._out.append(self._head.pop())
        return self._out[-1]


def leaders_first(queues: Sequence[Queue]) -> Iterator[Choice]:
    """What fits, by predicted seconds, but each family's best before every second best: tuning measures only the first few, and
    models of different families are less comparable than one family's. A family far behind has no such place."""
    later, seen, limit = list[Option](), set[str](), float("inf")
    while (option := _pop_best(queues, [], limit)) is not None:
        family = option.choice.operator.family
        if family in seen:
            later.append(option)
        elif option.fits:
            limit = min(limit, LEADING * option.choice.seconds + NEAR)
            seen.add(family)
            yield option.choice
    while (option := _pop_best(queues, later)) is not None:
        if option.fits:
            yield option.choice


def _pop_best(queues: Sequence[Queue], later: list[Option], limit: float = float("inf")) -> Option | None:
    """Take the best predicted of ``later`` and the heads of ``queues``; None where it is beyond ``limit``."""
    heads = [(q, head) for q in queues if (head := q.head()) is not None]
    found = min(heads, key=lambda h: h[1].choice.seconds, default=None)
    if later and (found is None or later[0].choice.seconds <= found[1].choice.seconds):
        return later.pop(0)
    return found[0].take() if found is not None and found[1].choice.seconds <= limit else None
