"""What files hold, as digests. That of a large file is kept with what the file system said of the file, and holds as long as that
says the same: hashing 0.4 GB takes a quarter of a second of a core, more than all else of a warm start."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from rammer.compiled.files import cache_text, cached_text
from rammer.compiled.shares import in_threads
from rammer.ir.data import loads
from rammer.profile.folder import cache_folder
from rammer.version import __version__

#: Bytes of a file that are hashed by one thread, and at a time. The digest of a file of more than one share is kept.
SHARE, PIECE = 16 << 20, 1 << 20
#: Seconds that a file must have been left alone before its digest is kept. Clocks of file systems are coarse (2 s at most), and
#: Linux tells of the first write through a mapping, and again only when that has been written back, after 35 s at most.
SETTLED: Final = 45.0
#: Of a file: device, number, bytes, and when its content and what is known of it changed last (nanoseconds). Nobody can set back
#: the last, as copies that keep times and ``touch`` do the one before.
FileState: TypeAlias = "list[int]"


def content_digest(source: Path | bytes) -> str:
    """Hash of rammer's version and of the hashes of all shares; "" for a file that is empty or cannot be read."""
    if isinstance(source, bytes):
        view = memoryview(source)
        return _whole([hashlib.sha256(view[at : at + SHARE]).digest() for at in range(0, len(view), SHARE)])
    try:
        if not source.is_file():
            return ""
        state = _state(source)
        if state[2] <= SHARE or os.name != "posix":  # elsewhere the last of its times is another
            return _hashed(source)
        kept = cache_folder() / "digests" / f"{hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:32]}.json"
        found = _known(kept, state)
        if found:
            return found
        made, began = _hashed(source), time.time_ns()
        if _state(source) == state and began - max(state[3:]) >= SETTLED * 1e9:
            cache_text(kept, json.dumps([__version__, state, made]))
        return made
    except OSError:
        return ""  # reading it properly says what is wrong


def _known(kept: Path, state: FileState) -> str:
    """The digest that was kept of a file in this state, "" if none was."""
    text = cached_text(kept)
    with suppress(ValueError, TypeError):
        version, seen, made = loads(text) if text is not None else ("", None, None)
        if version == __version__ and seen == state and isinstance(made, str):
            return made
    return ""


def _state(path: Path) -> FileState:
    """Of a file as it is opened: file systems of other machines are asked then."""
    with path.open("rb", buffering=0) as file:
        found = os.fstat(file.fileno())
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _hashed(path: Path) -> str:
    """Shares of a file are read and hashed at the same time, outside Python's lock."""
    return _whole(in_threads(lambda at: share_hash(path, at), range(0, path.stat().st_size, SHARE)))


def _whole(shares: list[bytes]) -> str:
    return hashlib.sha256(b"".join((__version__.encode(), *shares))).hexdigest() if shares else ""


def share_hash(path: Path, start: int) -> bytes:
    """Hash of ``SHARE`` bytes of a file from ``start``, read in pieces."""
    found, piece, left = hashlib.sha256(), memoryview(bytearray(PIECE)), SHARE
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(piece[:left])):
            found.update(piece[:count])
            left -= count
    return found.digest()
