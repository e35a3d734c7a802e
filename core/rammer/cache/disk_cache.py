"""The disk cache: entries that outlive a process, in one folder with one layout, one size bound and one lock.

An entry is the file ``v2/KIND/XX/KEY`` below the cache folder; ``XX`` are the first two digits of its key. Entries are written
whole, and checked when they are read. Above the size bound, the least recently used entries of all kinds are removed. The access
time of an entry's file is the time of its last use. Entries that were used in the last ``IN_USE`` seconds are never removed: a
process that opens a program needs its constants next. Later removal is harmless, since a mapped file keeps its content."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from rammer.cache.cache_keys import key_of
from rammer.cache.cache_location import cache_folder
from rammer.cache.whole_files import PARTIAL, is_trusted, warn_of_cached, write_cached
from rammer.errors import BadInput, print_warning

Value = TypeVar("Value")
#: Folder of the current layout. Other layouts are not read; ``clear_cache`` removes them.
LAYOUT: Final = "v2"
#: Files and folders of the first layout.
_FIRST_LAYOUT: Final = ("programs", "constants", "heads", "digests", "binaries", "kernels.sqlite*")
#: The variable with the size bound, the bound without it (bytes), and the units of sizes.
SIZE_VARIABLE, DEFAULT_BOUND = "RAMMER_CACHE_SIZE", 16 << 30
_UNITS: Final = {"": 1, **{f"{p}B": 1000**i for i, p in enumerate(("", "K", "M", "G", "T"))}}
_UNITS.update({f"{p}iB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), 1)})
#: Seconds since its last use in which an entry is in use; seconds after which a use is recorded again; and the age of a partial
#: file that a killed process left.
IN_USE, RECORDED, ABANDONED = 600.0, 60.0, 3600.0
#: Fractions of the bound: the bytes that a process writes between two checks of the size, and the bytes that eviction leaves.
STEP, REMAINING = 1 / 16, 7 / 8
#: Disk space is allocated in blocks of this many bytes.
BLOCK: Final = 4096
#: Names of kinds and keys: together they fit into the name field of a tar header.
KIND: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,31}")
KEY: Final = re.compile(r"[0-9a-f]{16,64}")
#: Exceptions of parsers of invalid content.
_INVALID = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

#: Bytes that this process may write before the next check of the size, and the folders whose write errors were reported.
_left: dict[Path, float] = {}
_reported: set[Path] = set()


@dataclass(frozen=True)
class Cache:
    """The entries of one ``kind``. ``version`` is part of every key, so entries of other versions are never read, and are
    removed in time. ``root`` is the cache folder, by default that of this process."""

    kind: str
    version: str = ""
    root: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of all entries of this kind."""
        return (self.root or cache_folder()) / LAYOUT / self.kind

    def key(self, *parts: str) -> str:
        """Return the key of the entry that ``parts`` determine."""
        return key_of(self.kind, self.version, *parts)

    def path(self, key: str) -> Path:
        """Return the place of an entry, which may be missing. Raises ValueError for a malformed key."""
        if KEY.fullmatch(key) is None:
            raise ValueError("malformed key of a cache entry")
        return self.folder / key[:2] / key

    def find(self, key: str) -> Path | None:
        """Return the file of an entry, whose content the caller must check. Returns None if it is missing, or untrusted (with a
        warning)."""
        path = self.path(key)
        if not is_trusted(path):
            return None
        _record_use(path)
        return path

    def write(self, key: str, fill: Callable[[BinaryIO], object]) -> None:
        """Write the entry that ``fill`` produces in one step. Raises OSError if that fails."""
        path = self.path(key)
        write_cached(path, fill)
        with suppress(OSError):
            _note_written(path.parents[3], _disk_bytes(path.stat()))

    def get(self, key: str, check: Callable[[bytes], Value]) -> Value | None:
        """Return ``check(data)`` for the ``data`` that ``put`` stored. Returns None if the entry is missing. If it is damaged,
        untrusted or refused by ``check`` (by ValueError, TypeError, LookupError or AttributeError), also warns."""
        path = self.find(key)
        if path is None:
            return None
        why = "it is damaged"
        try:
            checksum, _, data = path.read_bytes().partition(b"\n")
            if checksum == self._checksum(key, data):
                return check(data)
        except FileNotFoundError:  # another process has removed it
            return None
        except OSError as problem:
            why = problem.strerror or str(problem)
        except _INVALID as problem:
            why = f"it is invalid ({problem!r})"
        warn_of_cached(path, why)
        return None

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` with a checksum of it and the key. Best effort: if writing fails, the process warns once."""
        try:
            self.write(key, lambda file: (file.write(self._checksum(key, data) + b"\n"), file.write(data)))
        except OSError as problem:
            self.report(problem)

    def report(self, problem: OSError) -> None:
        """Warn that entries cannot be written, once for each cache folder."""
        root = self.root or cache_folder()
        if root not in _reported:
            _reported.add(root)
            print_warning(f"cannot write to the cache {root}: {problem.strerror or problem}; later processes start slower")

    def _checksum(self, key: str, data: bytes) -> bytes:
        """Return a checksum of the data and of the entry's name, so that a renamed file is rejected."""
        digest = hashlib.sha256(f"{self.kind}\n{key}\n".encode())
        digest.update(data)
        return digest.hexdigest()[:32].encode()


@dataclass(frozen=True)
class Entry:
    """An entry: its kind, bytes on disk, and the times at which it was written and last used (seconds)."""

    path: Path
    kind: str
    nbytes: int
    written: float
    used: float


def list_entries(root: Path) -> Iterator[Entry]:
    """Return the entries of all kinds. A folder is one entry; eviction and export ignore it."""
    for path in _paths(root):
        with suppress(OSError):  # another process removes it
            found = path.lstat()
            if KEY.fullmatch(path.name):
                files = [p.lstat() for p in path.iterdir()] if stat.S_ISDIR(found.st_mode) else [found]
                kind = path.parts[-3]
                yield Entry(path, kind, sum(map(_disk_bytes, files)), found.st_mtime, found.st_atime)


def _paths(root: Path) -> Iterator[Path]:
    """Return all files and folders in the places of entries."""
    yield from (p for p in (root / LAYOUT).glob("*/??/*") if KIND.fullmatch(p.parts[-3]))


def size_bound() -> float:
    """Return the size bound of the cache (bytes), infinity if the user sets 0. Raises BadInput for an invalid setting."""
    text = os.environ.get(SIZE_VARIABLE, "")
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text)
    if not text:
        return DEFAULT_BOUND
    if found is None or found[2] not in _UNITS:
        raise BadInput(f"{SIZE_VARIABLE} is {text!r}, which is not a size", hint="give a size such as 4GiB, or 0 for no limit")
    return float(found[1]) * _UNITS[found[2]] or float("inf")


def evict(root: Path) -> None:
    """Remove files of killed processes and, if the cache exceeds its bound, the least recently used entries. Does nothing if
    another process evicts or imports."""
    bound, now = size_bound(), time.time()
    with cache_lock(root, wait=False) as held:
        if not held:
            return
        for path in _paths(root):
            with suppress(OSError):
                if path.suffix == PARTIAL and now - path.lstat().st_mtime > ABANDONED:
                    path.unlink()
        entries = sorted(list_entries(root), key=lambda e: e.used)
        total = sum(e.nbytes for e in entries)
        most = bound * REMAINING if total > bound else bound
        for entry in entries:
            if total <= most:
                break
            with suppress(OSError):  # it is a folder, or another process has removed it
                if now - entry.path.lstat().st_atime > IN_USE:  # examined again: it may have been used since
                    entry.path.unlink()
                    total -= entry.nbytes


def clear_cache(root: Path, kind: str = "") -> dict[str, int]:
    """Remove the entries of one kind, or of all kinds and of older layouts. Returns their number by kind. Raises OSError if a
    file cannot be removed."""
    counts = dict[str, int]()
    with cache_lock(root, wait=True):
        for folder in sorted((root / LAYOUT).glob(kind or "*")):
            if KIND.fullmatch(folder.name):
                counts[folder.name] = sum(p.suffix != PARTIAL for p in folder.glob("??/*"))
                _remove(folder)
        for path in old_files(root) if not kind else ():
            _remove(path)
    return counts


def old_files(root: Path) -> list[Path]:
    """Return the files and folders of older layouts."""
    return sorted(p for name in _FIRST_LAYOUT for p in root.glob(name))


@contextmanager
def cache_lock(root: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock of eviction, import and clearing. Yields False if another process holds it and ``wait`` is False. Without
    locks (Windows, a read-only folder), two processes may remove more entries than necessary, which is harmless."""
    if sys.platform == "win32" or not root.is_dir():
        yield True
        return
    import fcntl

    try:
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            yield wait  # a file system without locks fails also if it should wait
            return
        yield True
    finally:
        os.close(lock)


def _record_use(path: Path) -> None:
    """Set the access time of an entry, which file systems do not update reliably. The modification time stays."""
    with suppress(OSError):  # a read-only cache
        found, now = path.stat(), time.time()
        if abs(now - found.st_atime) > RECORDED:
            os.utime(path, ns=(int(now * 1e9), found.st_mtime_ns))


def _note_written(root: Path, nbytes: int) -> None:
    """Evict entries from time to time: at the first write of a process, and after each part ``STEP`` of the bound."""
    _left[root] = _left.get(root, 0.0) - nbytes
    if _left[root] < 0:
        _left[root] = size_bound() * STEP
        evict(root)


def _disk_bytes(found: os.stat_result) -> int:
    return -(-found.st_size // BLOCK) * BLOCK


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
