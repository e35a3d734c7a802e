"""How much memory this process may have, for limits that are stated before anything is allocated."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def available_bytes() -> int:
    """Bytes: the machine's memory, or what the process's limit of address space leaves it where that is less."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory if limit == resource.RLIM_INFINITY else min(memory, max(0, limit - mapped_bytes()))


def mapped_bytes() -> int:
    """Bytes of address space that this process has; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
