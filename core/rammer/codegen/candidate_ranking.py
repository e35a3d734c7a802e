"""The order in which candidates of several families are offered. A kernel is written only when its candidate is next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rammer.codegen.kernel_family import Choice
from rammer.ir.operator import ROperator

#: Limits on a family's best prediction to be measured among the first: factor over the best of all, and seconds.
LEADING, NEAR = 1.3, 2e-6


@dataclass
class Option:
    """A candidate whose kernel is written and checked on demand."""

    choice: Choice
    possible: Callable[[ROperator], bool]

    @cached_property
    def fits(self) -> bool:
        """Return True if the kernel can be written and fits. The first call writes it."""
        return self.possible(self.choice.operator)

    @property
    def refused(self) -> bool:
        """Return True if ``fits`` was evaluated and is False."""
        return self.__dict__.get("fits") is False


class Queue:
    """A queue of candidates, best predicted first: at most ``most`` that are not refused."""

    def __init__(self, choices: Iterable[Choice], possible: Callable[[ROperator], bool], most: int) -> None:
        self._rest, self._possible, self._most = iter(choices), possible, most
        self._out, self._head = list[Option](), list[Option]()

    def head(self) -> Option | None:
        """Return the next candidate, or None if the queue is empty or ``most`` were taken."""
        if sum(not o.refused for o in self._out) >= self._most:
            return None
        if not self._head:
            self._head += [Option(c, self._possible) for c in [next(self._rest, None)] if c is not None]
        return self._head[0] if self._head else None

    def take(self) -> Option:
        """Remove and return the candidate at the head."""
        self._out.append(self._head.pop())
        return self._out[-1]


def leaders_first(queues: Sequence[Queue]) -> Iterator[Choice]:
    """Yield the candidates that fit by predicted seconds, but each family's best before every second best.

    Tuning measures only the first few, and predictions of different families are less comparable than those of one family. The
    best of a much slower family keeps its rank."""
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
    """Remove and return the best predicted of ``later`` and the heads of ``queues``, or None if it exceeds ``limit``."""
    heads = [(q, head) for q in queues if (head := q.head()) is not None]
    found = min(heads, key=lambda h: h[1].choice.seconds, default=None)
    if later and (found is None or later[0].choice.seconds <= found[1].choice.seconds):
        return later.pop(0)
    return found[0].take() if found is not None and found[1].choice.seconds <= limit else None
