"""Stable topological orders of operators, ties broken by rank; an operator may write results long before its last Compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from rammer.ir.operator import ROperator


def sort_topologically(
    operators: Sequence[ROperator], position: Mapping[str, int], roots: Callable[[str], Iterable[str]]
) -> tuple[ROperator, ...]:
    """Sort operators by the ``position`` of the last Compute, as far as dependences allow.

    A group may write a result long before its last Compute; readers of that result still come after the group. ``roots`` returns
    the tensors whose memory a tensor reads."""
    by_name = {o.name: o for o in operators}
    owner = {c.name: o.name for o in operators for c in o.computes}
    place = {o.name: position[o.anchor.name] for o in operators}
    needs, readers = dict[str, int](), dict[str, list[str]]()
    for o in operators:
        before = {owner[r] for n in o.inputs for r in roots(n) if r in owner} - {o.name}
        needs[o.name] = len(before)
        for name in before:
            readers.setdefault(name, []).append(o.name)
    return tuple(by_name[name] for name in by_rank(needs, readers, place))


def by_rank(needs: dict[str, int], readers: Mapping[str, Iterable[str]], rank: Mapping[str, Any]) -> Iterator[str]:
    """Yield names by rank, each after all its producers. ``needs`` counts the pending producers of each name and is decremented.
    Readers absent from ``needs`` are skipped."""
    ready = [(rank[name], name) for name, count in needs.items() if not count]
    heapify(ready)
    while ready:
        _, name = heappop(ready)
        yield name
        for reader in readers.get(name, ()):
            if reader in needs:
                needs[reader] -= 1
                if not needs[reader]:
                    heappush(ready, (rank[reader], reader))
