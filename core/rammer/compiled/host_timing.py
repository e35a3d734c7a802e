"""What operators on the host take, by type: a clock that a run is put under (``collect_host_times``), and that runs pay nothing
for else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final


@dataclass
class Spent:
    """Seconds and calls by type of operator. What an operator's bodies run on the host counts for what is in them, what they run
    on the device for the operator."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    inside: float = 0.0


_SPENT: Final[ContextVar[Spent | None]] = ContextVar("_SPENT", default=None)


@contextmanager
def collect_host_times() -> Iterator[Spent]:
    """The clock of this thread's runs meanwhile."""
    spent = Spent()
    token = _SPENT.set(spent)
    try:
        yield spent
    finally:
        _SPENT.reset(token)


@contextmanager
def time_operator(op: str) -> Iterator[None]:
    """One operator."""
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
