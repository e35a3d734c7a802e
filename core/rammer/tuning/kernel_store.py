"""KernelStore: a cache of measurements in one SQLite file in the user's cache folder.

Keys hash the device's fingerprint, the operator's ``Binding.key`` and the tuning level. A corrupt or unwritable store is ignored
with a warning and never gives a wrong result: entries are checked on reading."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from rammer.cache.cache_keys import key_of
from rammer.cache.cache_location import cache_folder, why_untrusted
from rammer.ir.operator import Resources
from rammer.ir.untrusted_json import load_json

#: Exceptions of a damaged or unreachable store; sqlite even fails to decode its error message.
_DAMAGE = (OSError, sqlite3.Error, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """A stored candidate: tile, family, config, resources and task times (seconds)."""

    tile: tuple[int, ...]
    family: str
    config: tuple[tuple[str, int], ...]
    resources: Resources
    alone: float
    crowded: float
    origin: str


class KernelStore:
    """A thread-safe map of keys to tuned kernels. If ``path`` is None, everything is in memory."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.warning = ""
        self._memory: dict[str, str] = {}
        self._lock = Lock()
        self.connection = self._open_store(path) if path is not None else None
        self.hits = self.misses = 0

    @staticmethod
    def default() -> KernelStore:
        """Return the user's store in the cache folder."""
        return KernelStore(cache_folder() / "kernels.sqlite")

    def _open_store(self, path: Path) -> sqlite3.Connection | None:
        """Open the database. An untrusted or damaged one is replaced by a new one, with a warning."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.path.lexists(path) and (why := why_untrusted(path)):
                self._replace(path, why)
            try:
                return self._opened(path)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as problem:
                if isinstance(problem, sqlite3.OperationalError):  # for example locked, or the disk is full
                    raise
                self._replace(path, str(problem))
                return self._opened(path)
        except _DAMAGE as problem:
            self._disable_store(problem)
            return None

    def _opened(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
        try:
            db.execute("create table if not exists kernels (key text primary key, value text not null)")
            db.execute("select count(*) from kernels").fetchone()
            return db
        except BaseException:
            db.close()
            raise

    def _replace(self, path: Path, why: str) -> None:
        """Remove the file and SQLite's auxiliary files, to create a new one."""
        self.warning = f"kernel store {path} is ignored: {why}; a new store is created"
        print(f"rammer: warning: {self.warning}", file=sys.stderr)
        for end in ("", "-journal", "-wal", "-shm"):
            path.with_name(path.name + end).unlink(missing_ok=True)

    def _disable_store(self, problem: Exception) -> None:
        if not self.warning:
            self.warning = f"kernel store {self.path} is ignored: {problem}"
            print(f"rammer: warning: {self.warning}", file=sys.stderr)
        self.connection = None

    def get(self, key: str) -> tuple[TunedKernel, ...] | None:
        """Return the kernels stored under ``key``, or None."""
        text = self._read_text(key)
        kernels = _decode_kernels(key, text) if text is not None else None
        self.hits, self.misses = self.hits + (kernels is not None), self.misses + (kernels is None)
        return kernels

    def put(self, key: str, kernels: Sequence[TunedKernel]) -> None:
        """Store ``kernels`` in one transaction, so an interruption leaves the store intact."""
        self._write_entry(key, json.dumps([asdict(k) for k in kernels]))

    def seconds(self, key: str) -> float | None:
        """Return the time stored under ``key``, or None."""
        found = _check_entry(key, self._read_text(key))
        return found if isinstance(found, float) and 0 <= found < math.inf else None

    def put_seconds(self, key: str, seconds: float) -> None:
        """Store a measured time under ``key``."""
        self._write_entry(key, json.dumps(seconds))

    def _read_text(self, key: str) -> Any:
        text = self._memory.get(key)
        if text is None and self.connection is not None:
            try:
                with self._lock:
                    row = self.connection.execute("select value from kernels where key = ?", (key,)).fetchone()
                return row[0] if row else None
            except _DAMAGE as problem:
                self._disable_store(problem)
        return text

    def _write_entry(self, key: str, value: str) -> None:
        text = f"{key_of(key, value)} {value}"
        self._memory[key] = text
        if self.connection is not None:
            try:
                with self._lock:
                    self.connection.execute("insert or replace into kernels values (?, ?)", (key, text))
            except _DAMAGE as problem:
                self._disable_store(problem)

    def count(self) -> int:
        """Return the number of entries."""
        if self.connection is not None:
            try:
                return int(self.connection.execute("select count(*) from kernels").fetchone()[0])
            except _DAMAGE as problem:
                self._disable_store(problem)
        return len(self._memory)

    def clear(self) -> int:
        """Remove every entry, and an unreadable file; return the previous number of entries."""
        count = self.count()
        self._memory.clear()
        if self.connection is not None:
            try:
                self.connection.execute("delete from kernels")
            except _DAMAGE as problem:
                self._disable_store(problem)
        if self.connection is None and self.path is not None:
            with contextlib.suppress(OSError):  # opening it has printed a warning
                self.path.unlink(missing_ok=True)
        return count

    def forget(self) -> None:
        """Drop the entries that this process has read and written; the file stays."""
        self._memory.clear()

    def close(self) -> None:
        """Close the database connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def _check_entry(key: str, text: Any) -> Any:
    """Return the value of an entry, or None if it is corrupt."""
    try:
        checksum, _, value = text.partition(" ")
        return load_json(value) if checksum == key_of(key, value) else None
    except (ValueError, TypeError, AttributeError):
        return None


def _decode_kernels(key: str, text: Any) -> tuple[TunedKernel, ...] | None:
    """Return the entries as kernels, or None (a miss) if their format differs from that of ``put``."""
    try:
        return tuple(_decode_kernel(item) for item in _check_entry(key, text)) or None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _decode_kernel(item: dict[str, Any]) -> TunedKernel:
    kernel = TunedKernel(
        tile=tuple(map(_check_integer, item["tile"])),
        family=str(item["family"]),
        config=tuple((str(k), _check_integer(v)) for k, v in item["config"]),
        resources=Resources(**{k: _check_integer(v) for k, v in item["resources"].items()}),
        alone=float(item["alone"]),
        crowded=float(item["crowded"]),
        origin=str(item["origin"]),
    )
    if min(kernel.tile, default=1) < 1 or not all(0 <= t < math.inf for t in (kernel.alone, kernel.crowded)):
        raise ValueError("invalid tile or time")
    return kernel


def _check_integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value
