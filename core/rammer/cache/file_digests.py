"""Cache of file digests. The digest of a large file is stored with the file's state in the file system. It is valid while that
state is unchanged. Hashing 0.4 GB needs a quarter of a second of a core, more than the rest of a warm start."""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Final

from rammer.cache.disk_cache import Cache
from rammer.cache.parallel_io import in_threads
from rammer.ir.constants.mapped_files import Content, Mapped, state_of
from rammer.ir.untrusted_json import load_json
from rammer.version import __version__

#: Bytes of a file that are hashed by one thread, and at a time. The digest of a file of more than one ``SHARE`` is cached.
SHARE, PIECE = 16 << 20, 1 << 20
#: Seconds since the last write before the digest of a file is cached. Clocks of file systems are coarse (2 s at most). Linux
#: records the first write through a mapping, and the next one only after write-back, after 35 s at most.
SETTLED: Final = 45.0
#: Entries: the state and the digest of a file, by its path.
_CACHE: Final = Cache("digests", __version__)


def content_digest(source: Mapped | bytes) -> str:
    """Return a hash of rammer's version and of the hashes of all slices of ``SHARE`` bytes. Returns "" if the source is empty or
    cannot be read. Sets the ``content`` of a file."""
    if isinstance(source, bytes):
        return _of_bytes(source)
    try:
        if source.content is None:
            source.content = _cached_digest(source) or _hashed_now(source)
        return source.content.digest
    except OSError:
        return ""  # the actual read reports the error


def _cached_digest(file: Mapped) -> Content | None:
    """Return the cached digest of a file in this state, or None."""
    seen, made = (_CACHE.get(_cache_key(file), _decode) if _is_cached(file) else None) or ([], "")
    return Content(made, True, _hashed_now) if seen == list(file.state) else None


def _decode(data: bytes) -> tuple[list[int], str]:
    """Return the state and the digest in an entry. Raises ValueError or TypeError if it is malformed."""
    seen, made = load_json(data)
    if not isinstance(seen, list) or not isinstance(made, str) or not made:
        raise ValueError("malformed digest")
    return seen, made


def _hashed_now(file: Mapped) -> Content:
    """Hash a file. Cache the digest if the file is large and a later write would be detected."""
    began = time.time_ns()
    if file.file is None:
        return Content(_of_bytes(bytes(file.data)), True, _hashed_now)
    before = state_of(os.fstat(file.file.fileno()))
    made = _combine_digests(in_threads(lambda at: share_hash(file, at), range(0, before[2], SHARE)))
    same = state_of(os.fstat(file.file.fileno())) == before
    settled = os.name == "posix" and same and began - max(before[3:]) >= SETTLED * 1e9
    if settled and before == file.state and _is_cached(file):
        _CACHE.put(_cache_key(file), json.dumps([before, made]).encode())
    return Content(made, settled, _hashed_now)


def _is_cached(file: Mapped) -> bool:
    return file.state[2] > SHARE and os.name == "posix"  # elsewhere the last time is not the time of the last change


def _cache_key(file: Mapped) -> str:
    return _CACHE.key(os.fsencode(os.path.realpath(file.path)).hex())


def _of_bytes(data: bytes) -> str:
    view = memoryview(data)
    return _combine_digests([hashlib.sha256(view[at : at + SHARE]).digest() for at in range(0, len(view), SHARE)])


def _combine_digests(shares: list[bytes]) -> str:
    return hashlib.sha256(b"".join((__version__.encode(), *shares))).hexdigest() if shares else ""


def share_hash(file: Mapped, start: int) -> bytes:
    """Return the hash of ``SHARE`` bytes of a file from ``start``. Reads in pieces instead of from mapped memory: truncation of
    the file would end a process that reads the mapping."""
    found, piece, left = hashlib.sha256(), memoryview(bytearray(PIECE)), SHARE
    assert file.file is not None
    while left and (count := os.preadv(file.file.fileno(), [piece[:left]], start)):
        found.update(piece[:count])
        start, left = start + count, left - count
    return found.digest()
