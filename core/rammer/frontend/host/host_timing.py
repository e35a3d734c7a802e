"""The clock of host operators by type, active in ``collect_host_times``; other runs have no overhead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final


@dataclass
class Spent:
    """Seconds and calls by type of operator. Time of an operator's bodies counts for their operators on the host, and for the
    operator itself on the device."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    inside: float = 0.0


_SPENT: Final[ContextVar[Spent | None]] = ContextVar("_SPENT", default=None)


@contextmanager
def collect_host_times() -> Iterator[Spent]:
    """Yield the clock of this thread's runs in the block."""
    spent = Spent()
    token = _SPENT.set(spent)
    try:
        yield spent
    finally:
        _SPENT.reset(token)


@contextmanager
def time_operator(op: str) -> Iterator[None]:
    """Time one operator of type ``op``."""
    spent = _SPENT.get()
    if spent is None:
        yield
        return
    begin, before, spent.inside = time.perf_counter(), spent.inside, 0.0
    try:
        yield
    finally:
        whole = time.perf_counter() - begin
        spent.seconds[op] = spent.seconds.get(op, 0.0) + whole - spent.inside
        spent.calls[op] = spent.calls.get(op, 0) + 1
        spent.inside = before + whole
