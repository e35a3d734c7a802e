"""The plugins that are installed, found again only where a folder of Python's path has changed."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points


def installed(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of ``group``, by name: a look through all that is installed takes longer than most calls of a registry."""
    return _found(group, tuple((folder, _changed(folder)) for folder in sys.path))


@lru_cache(8)
def _found(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group), key=lambda point: point.name))


def _changed(folder: str) -> int:
    """When the names in a folder (or an archive) last changed, in nanoseconds: installing a package changes them."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
