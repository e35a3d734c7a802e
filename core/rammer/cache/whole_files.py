"""Atomic file writes: a reader finds the old file or all of the new one, even if writers race or are interrupted."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from rammer.cache.cache_location import make_private, why_untrusted
from rammer.errors import print_warning

#: Suffix of files that are being written. Readers ignore them, and ``rammer cache clear`` removes those of killed processes.
PARTIAL = ".partial"
#: Kinds of files that cannot be replaced without harm.
_SPECIAL: Final = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def write_whole(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write the file that ``fill`` produces in one step. Raises OSError if that fails; then nothing has changed. A symbolic link
    stays a link, and a file keeps its permissions. A read-only file, a folder, a device and a pipe are refused."""
    target = output_target(path)
    with _partial_file(target, fill, 0o666, _file_mode(target)) as partial:
        partial.replace(target)


def write_folder(folder: Path, texts: Mapping[str, str]) -> None:
    """Write all ``texts``, by file name, into ``folder``, or none. Raises OSError if that fails. A new folder appears in one
    step. In an existing one, files are replaced only after all of them have been written."""
    if not folder.exists() and not folder.is_symlink():
        with _partial_folder(folder) as partial:
            for name, text in texts.items():
                file = partial / name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("xb") as opened:
                    opened.write(text.encode())
            partial.rename(folder)
        return
    targets = {output_target(folder / name): text.encode() for name, text in texts.items()}
    with contextlib.ExitStack() as stack:
        made = [
            (stack.enter_context(_partial_file(t, lambda f, d=d: f.write(d), 0o666, _file_mode(t))), t)  # type: ignore[misc]
            for t, d in targets.items()
        ]
        for partial, target in made:
            partial.replace(target)


def output_target(path: Path) -> Path:
    """Return the file that ``path`` names after symbolic links. Raises OSError unless it can be created or replaced."""
    try:
        mode = path.stat().st_mode  # OSError for a cycle of links
    except FileNotFoundError:
        mode = 0
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if (kind := _SPECIAL.get(stat.S_IFMT(mode))) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not an ordinary file", str(path))
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist", str(path))
    if not os.access(target if mode else target.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return target


def write_cached(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write the cache file that ``fill`` produces in one step, for this user alone. Raises OSError if that fails. An existing
    file, link or pipe of that name is replaced if possible; a link is not followed."""
    make_private(path.parent)
    with _partial_file(path, fill, 0o600, None) as partial:
        partial.replace(path)


def _file_mode(path: Path) -> int | None:
    return path.stat().st_mode & 0o777 if path.exists() else None


@contextlib.contextmanager
def _partial_file(target: Path, fill: Callable[[BinaryIO], object], created: int, mode: int | None) -> Iterator[Path]:
    """Write a file next to ``target`` with the permissions ``created``, less the process's mask, or exactly ``mode``. The file is
    removed at the end unless it was renamed."""
    # The name is unique: two threads may write one file at the same time, and the last one wins.
    partial = target.with_name(os.urandom(8).hex() + PARTIAL)
    try:
        with open(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), created), "w+b") as file:
            fill(file)
        if mode is not None:
            partial.chmod(mode)
        yield partial
    finally:
        with contextlib.suppress(OSError):  # left over only after a failure or Ctrl-C
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """Make a folder next to ``target``, and the folders above it. It is removed at the end unless it was renamed."""
    above = [p for p in target.parents if not p.exists()]
    partial = target.with_name(os.urandom(8).hex() + PARTIAL)
    try:
        partial.mkdir(parents=True)
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # other processes may have put files there meanwhile
            for folder in above:
                folder.rmdir()
        raise


def is_trusted(path: Path) -> bool:
    """Return True if a cache file exists and may be read. Warns if it may not be read."""
    try:
        why = why_untrusted(path)
        if not why and not os.access(path, os.R_OK):
            path.lstat()  # another process may have removed it meanwhile
            why = os.strerror(errno.EACCES)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as problem:
        why = problem.strerror or str(problem)
    if why:
        warn_of_cached(path, why)
    return not why


def warn_of_cached(path: Path, why: str) -> None:
    """Warn that a cache file is not used."""
    print_warning(f"cached file {path} is not used: {why}; it is written again")
