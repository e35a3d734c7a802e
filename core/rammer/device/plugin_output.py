"""Redirection of plugin output to stderr, so that stdout holds only the command's output."""

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
    """The single redirection of this process, shared by threads that redirect at the same time."""

    users: int = 0
    stdout: TextIO | Any = None
    descriptor: int | None = None

    def begin(self) -> None:
        """Redirect ``sys.stdout`` and file descriptor 1 to stderr."""
        self.stdout, sys.stdout = sys.stdout, sys.stderr
        _flush_streams(self.stdout, sys.__stdout__)
        with suppress(OSError):  # a process without these descriptors
            self.descriptor = os.dup(1)
            os.dup2(2, 1)

    def end(self) -> None:
        """Restore the original targets of both."""
        _flush_streams(sys.stderr, sys.__stdout__)
        if self.descriptor is not None:
            os.dup2(self.descriptor, 1)
            os.close(self.descriptor)
        sys.stdout, self.stdout, self.descriptor = self.stdout, None, None


_LOCK, _SHARED = threading.Lock(), _Redirection()


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect ``sys.stdout`` and file descriptor 1 to stderr, including output of C libraries."""
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
    """Flush the buffers of Python and C, which belong to the current target of file descriptor 1."""
    for file in files:
        with suppress(OSError, ValueError, AttributeError):  # None, or closed
            file.flush()
    with suppress(OSError, AttributeError, TypeError):  # C library under another name
        ctypes.CDLL(None).fflush(None)
