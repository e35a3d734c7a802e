"""Large files, read by several threads: reading, hashing and checksums happen outside Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

#: Most threads. Memory, not cores, is the limit from about here on.
READERS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """``work`` of every item, in order, by a few threads. The first exception is raised."""
    with reader_pool() as pool:
        return list(pool.map(work, items))


def reader_pool() -> ThreadPoolExecutor:
    """A few threads."""
    return ThreadPoolExecutor(min(READERS, os.cpu_count() or 1))


def by_bytes(items: Iterable[Item], nbytes: Callable[[Item], int], share: int) -> list[list[Item]]:
    """``items`` in their order, in lists of about ``share`` bytes: work for a thread that is worth handing over."""
    result, left = list[list[Item]](), 0
    for item in items:
        if left <= 0:
            result.append([])
            left = share
        result[-1].append(item)
        left -= nbytes(item)
    return result


def read_into(path: Path, start: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes of a file from ``start``. EOFError where it ends before, OSError where it cannot be
    read."""
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        at = 0
        while at < len(target):
            count = file.readinto(target[at:])
            if not count:
                raise EOFError(f"the file ends {len(target) - at} bytes early")
            at += count
