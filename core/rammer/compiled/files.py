"""Writing files whole: a reader sees the old file or all of the new one, whoever else writes it, whatever interrupts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from rammer.errors import warn
from rammer.profile.folder import make_private, why_untrusted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

#: The end of the names of files that are being written; nobody reads them, and ``rammer cache clear`` removes what a killed
#: process left.
PARTIAL = ".partial"


def write_whole(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """The file that ``fill`` writes, in one step. OSError where that is impossible; then nothing has changed.

    A symbolic link stays one, and a file keeps its permissions; one that may not be written is not replaced. What is no
    ordinary file (/dev/null, a pipe) is written in place, as other compilers do: it cannot be replaced without harm.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():  # a circle of links ends nowhere
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if target.exists() and not target.is_file():
        with target.open("wb", buffering=0) as device:
            fill(cast(BinaryIO, _InOrder(device)))
        return
    mode = target.stat().st_mode & 0o777 if target.exists() else None
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    _replace(target, fill, 0o666, mode)


def write_cached(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """The file of the cache that ``fill`` writes, in one step, for this user alone. OSError if that is impossible.

    Whatever has the name is replaced, as far as that is possible: a link or a pipe is not followed.
    """
    make_private(path.parent)
    _replace(path, fill, 0o600)


def _replace(target: Path, fill: Callable[[BinaryIO], object], created: int, mode: int | None = None) -> None:
    """Write a file with the permissions ``created``, less the process's mask, or exactly ``mode``, and rename it."""
    # A name of its own: two threads may write one file at the same time, and the last one wins.
    partial = target.with_name(os.urandom(8).hex() + PARTIAL)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), created), "wb") as file:
            fill(file)
        if mode is not None:
            partial.chmod(mode)
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):  # left over only where something failed or Ctrl-C came
            partial.unlink(missing_ok=True)


class _InOrder(io.RawIOBase):
    """A device that is only written to, in order: /dev/null lets one seek, but is always at 0."""

    def __init__(self, device: io.FileIO) -> None:
        self._device = device

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while left:  # a pipe takes what it has room for
            left = left[self._device.write(left) :]
        return size


def cache_text(path: Path, text: str) -> None:
    """``text`` in a file of the cache, under a checksum. Best effort: a read-only cache only makes the next start slower."""
    data = f"{_checksum(path, text)}\n{text}".encode()
    with contextlib.suppress(OSError):
        write_cached(path, lambda file: file.write(data))


def cached_text(path: Path) -> str | None:
    """Return what ``cache_text`` wrote there, or None: nothing is there, or a file that is damaged or untrusted, of which a
    warning tells."""
    data = cached_bytes(path)
    if data is None:
        return None
    with contextlib.suppress(ValueError):
        checksum, _, text = data.decode().partition("\n")
        if checksum == _checksum(path, text):
            return text
    warn_of_cached(path, "it is damaged")
    return None


def cached_bytes(path: Path) -> bytes | None:
    """Return the content of a file of the cache, or None: there is none, or it is untrusted, of which a warning tells."""
    return path.read_bytes() if is_trusted(path) else None


def is_trusted(path: Path) -> bool:
    """Return True if a file of the cache is there and may be read. A warning tells of one that may not."""
    try:
        why = why_untrusted(path)
        if not why and not os.access(path, os.R_OK):
            why = os.strerror(errno.EACCES)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as problem:
        why = problem.strerror or str(problem)
    if why:
        warn_of_cached(path, why)
    return not why


def warn_of_cached(path: Path, why: str) -> None:
    """Warn of a file of the cache that is not used."""
    warn(f"cached file {path} is not used: {why}; it is made again")


def _checksum(path: Path, text: str) -> str:
    """Of the name, too: a file under another's name is not what it says."""
    return hashlib.sha256(f"{path.name}\n{text}".encode()).hexdigest()[:16]
