"""The cache folder, and the checks of its files.

Cached programs and the machine code of GPUs are executed. A file is therefore used only if its user alone could have written it:
the folders, the owner and the mode of every file are checked before it is read."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Return ``$RAMMER_CACHE`` or the platform's user cache folder for rammer, created for this user alone. A folder that other
    users own or may write is not used: a warning reports it, and cached files last as long as this process."""
    path = Path(os.environ.get("RAMMER_CACHE") or platformdirs.user_cache_dir("rammer"))
    with suppress(OSError):  # the later write reports the error
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    why = why_shared(path)
    return path if not why else own_folder(path, why)


def why_untrusted(path: Path) -> str:
    """Return the reason against reading a file below the cache folder, or "" if it may be read.

    It must be an ordinary file with one name, owned by this user or root and writable by its owner alone. The same applies to its
    folder. A file that another user could have put there stays untrusted when the modes of its folders change. Raises
    FileNotFoundError if the file is missing, OSError if it cannot be examined.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        return "it is not an ordinary file"
    if found.st_nlink > 1:
        return "it has another hard link"
    return _foreign_write_reason(found) or (f"in its folder, {why}" if (why := why_shared(path.parent)) else "")


def make_private(folder: Path) -> None:
    """Make a folder below the cache folder that its user alone may write. Raises OSError if that fails."""
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
    found = folder.stat()
    # A folder with the sticky bit, for example /tmp, is shared by all users: its mode is left unchanged.
    if hasattr(os, "geteuid") and found.st_uid == os.geteuid() and found.st_mode & _OTHERS and not found.st_mode & stat.S_ISVTX:
        folder.chmod(0o700)  # files that other users put there still belong to them


#: Write permission for other users than the owner.
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def why_shared(path: Path) -> str:
    """Return the reason why other users could have written into a folder, or "" if they could not."""
    try:
        return _foreign_write_reason(path.stat())
    except OSError:
        return ""


def _foreign_write_reason(found: os.stat_result) -> str:
    """Return the reason why other users could have written a file or a folder, or "" if they could not."""
    if not hasattr(os, "geteuid"):  # Windows keeps a user's folders private by inherited rules
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    return "other users may write there" if found.st_mode & _OTHERS else ""


@cache
def own_folder(path: Path, why: str) -> Path:
    """Return a new folder of this process that replaces ``path``. Warns with the reason ``why``."""
    import tempfile  # rarely needed, and it takes long to import

    sys.stderr.write(
        f"rammer: warning: cache folder {path} is not used: {why} (remove it and its content, or set RAMMER_CACHE)\n"
    )
    own = Path(tempfile.mkdtemp(prefix="rammer-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own
