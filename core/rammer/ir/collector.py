"""Control of Python's garbage collector while programs are created or read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the search for unreachable cycles. A program is hundreds of thousands of live objects. Scanning them repeatedly took
    a quarter of the time of reading a program."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
