"""Parallel reading of large files: reading, hashing and checksums happen outside Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

#: Maximum number of threads. From about this number, memory is the limit, not cores.
READERS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply ``work`` to every item in a few threads, and return the results in order. Raises the first exception."""
    with reader_pool() as pool:
        return list(pool.map(work, items))


def reader_pool() -> ThreadPoolExecutor:
    """Return a pool of at most ``READERS`` threads."""
    return ThreadPoolExecutor(min(READERS, os.cpu_count() or 1))


def by_bytes(items: Iterable[Item], nbytes: Callable[[Item], int], share: int) -> list[list[Item]]:
    """Group ``items`` in order into lists of about ``share`` bytes, enough work for one thread."""
    result, left = list[list[Item]](), 0
    for item in items:
        if left <= 0:
            result.append([])
            left = share
        result[-1].append(item)
        left -= nbytes(item)
    return result


def read_into(path: Path, start: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes of a file from ``start``. Raises EOFError if the file is too short, OSError if it cannot be
    read."""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        at = 0
        while at < len(target):
            count = file.readinto(target[at:])
            if not count:
                raise EOFError(f"the file ends {len(target) - at} bytes early")
            at += count
