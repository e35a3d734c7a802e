"""Export and import of the disk cache as a tar file.

The file is data from others until an entry is read, which checks it as any cache file. The reader accepts plain files with the
names of entries only: links, folders, other names and extended headers are refused before anything is written."""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from rammer.cache.disk_cache import KEY, KIND, Cache, cache_lock, list_entries, size_bound
from rammer.cache.whole_files import is_trusted
from rammer.errors import BadInput

#: Kinds that are verified in full when they are read, so that entries of others cannot execute code. Entries of other kinds are
#: machine code, or decide what is executed.
VERIFIED: Final = frozenset({"programs", "constants", "heads", "tuned"})
#: Kinds that describe files of this machine.
LOCAL: Final = frozenset({"digests"})
_NAME: Final = re.compile(rf"({KIND.pattern})/([0-9a-f]{{2}})/({KEY.pattern})")
#: Bytes that are copied at a time.
_PIECE: Final = 1 << 20


@dataclass(frozen=True)
class _Member:
    kind: str
    key: str
    start: int
    size: int


def export_cache(root: Path, file: BinaryIO, kinds: Collection[str] = ()) -> Counter[str]:
    """Write the entries of these kinds (default: all that other machines can use) to a tar file. Returns their number by kind.
    Raises OSError."""
    counts = Counter[str]()
    with tarfile.TarFile(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry in sorted(list_entries(root), key=lambda e: e.path):
            wanted = entry.kind not in LOCAL and (not kinds or entry.kind in kinds)
            if not wanted or entry.path.is_dir() or not is_trusted(entry.path):
                continue
            try:
                content = entry.path.open("rb")
            except FileNotFoundError:  # another process has removed it
                continue
            with content:
                info = tarfile.TarInfo("/".join(entry.path.parts[-3:]))
                info.size, info.mode = os.fstat(content.fileno()).st_size, 0o600
                archive.addfile(info, content)
            counts[entry.kind] += 1
    return counts


def import_cache(root: Path, path: Path, trust_code: bool = False) -> tuple[Counter[str], Counter[str]]:
    """Read the entries of an exported file into a cache, except entries that it has. Kinds outside ``VERIFIED`` are skipped
    unless ``trust_code``. Returns the numbers of imported and of skipped entries by kind. Raises BadInput if any member is not
    an entry; then nothing is written. Raises OSError."""
    imported, skipped = Counter[str](), Counter[str]()
    with _open_ordinary(path) as file, cache_lock(root, wait=True):
        for member in _read_members(file, path):
            cache = Cache(member.kind, root=root)
            if member.kind in LOCAL or (member.kind not in VERIFIED and not trust_code):
                skipped[member.kind] += 1
            elif not is_trusted(cache.path(member.key)):
                file.seek(member.start)
                cache.write(member.key, lambda target, size=member.size: _copy(file, target, size))  # type: ignore[misc]
                imported[member.kind] += 1
    return imported, skipped


def _open_ordinary(path: Path) -> BinaryIO:
    """Open a file without waiting for the writer of a pipe. Raises BadInput if it is not an ordinary file."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BadInput(f"{path} is not an ordinary file")
    return file


def _read_members(file: BinaryIO, path: Path) -> list[_Member]:
    """Return the members of an exported file after all headers were checked. Raises BadInput."""
    members, length, at = list[_Member](), os.fstat(file.fileno()).st_size, 0
    while True:
        file.seek(at)
        header = file.read(tarfile.BLOCKSIZE)
        if header == bytes(tarfile.BLOCKSIZE):
            break
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as problem:
            raise _refusal(path, f"the header at byte {at} is invalid: {problem}") from problem
        name, start = _NAME.fullmatch(info.name), at + tarfile.BLOCKSIZE
        if info.type != tarfile.REGTYPE or name is None or name[2] != name[3][:2]:
            raise _refusal(path, f"member {info.name!r} is not a cache entry")
        if not 0 <= info.size <= length - start:
            raise _refusal(path, f"member {info.name!r} is longer than the file")
        members.append(_Member(name[1], name[3], start, info.size))
        at = start + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if sum(m.size for m in members) > (most := size_bound()):
        raise BadInput(f"{path} is larger than the cache may be ({most:.0f} bytes)", hint="set RAMMER_CACHE_SIZE")
    return members


def _refusal(path: Path, why: str) -> BadInput:
    return BadInput(f"{path} is not an exported cache: {why}", hint="write it with rammer cache export")


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        piece = source.read(min(_PIECE, size))
        if not piece:
            raise EOFError("the file became shorter while it was read")
        target.write(piece)
        size -= len(piece)
