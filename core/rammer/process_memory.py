"""Memory that is available to this process, for limits that are checked before allocation."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def available_bytes() -> int:
    """Return the bytes of the machine's memory, or of the process's remaining address space if that is less."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory if limit == resource.RLIM_INFINITY else min(memory, max(0, limit - mapped_bytes()))


def mapped_bytes() -> int:
    """Return the bytes of address space that this process uses, or 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
