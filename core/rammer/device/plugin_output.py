"""Output of plugins: what they print goes to stderr, so that stdout holds only what a command prints."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass
class _Redirection:
    """The one redirection of this process. Threads that redirect at the same time share it."""

    users: int = 0
    stdout: TextIO | Any = None
    descriptor: int | None = None

    def begin(self) -> None:
        """Send ``sys.stdout`` and the descriptor 1 to stderr."""
        self.stdout, sys.stdout = sys.stdout, sys.stderr
        _flush_streams(self.stdout, sys.__stdout__)
        with suppress(OSError):  # a process without these descriptors
            self.descriptor = os.dup(1)
            os.dup2(2, 1)

    def end(self) -> None:
        """Send both to where they went before."""
        _flush_streams(sys.stderr, sys.__stdout__)
        if self.descriptor is not None:
            os.dup2(self.descriptor, 1)
            os.close(self.descriptor)
        sys.stdout, self.stdout, self.descriptor = self.stdout, None, None


_LOCK, _SHARED = threading.Lock(), _Redirection()


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is written to ``sys.stdout`` and to the file descriptor 1 to stderr, also by C libraries."""
    with _LOCK:
        _SHARED.users += 1
        if _SHARED.users == 1:
            _SHARED.begin()
    try:
        yield
    finally:
        with _LOCK:
            _SHARED.users -= 1
            if not _SHARED.users:
                _SHARED.end()


def _flush_streams(*files: Any) -> None:
    """Write out what Python and C hold back: it belongs to where the descriptor 1 points now."""
    for file in files:
        with suppress(OSError, ValueError, AttributeError):  # none, or closed
            file.flush()
    with suppress(OSError, AttributeError, TypeError):  # no C library under that name
        ctypes.CDLL(None).fflush(None)
