"""How much memory this process may have, for limits that are stated before anything is allocated."""

from __future__ import annotations

import os
import resource


def room() -> int:
    """Bytes: the machine's memory, or the process's limit of address space where that is smaller."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory if limit == resource.RLIM_INFINITY else min(memory, limit)
