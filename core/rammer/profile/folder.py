"""The cache folder. What is kept there runs: programs, and machine code of GPUs. So nobody else may write there."""

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
    """``$RAMMER_CACHE`` or the platform's user cache folder for rammer, made for this user alone.

    One that others own or may write is not used: a warning says so, and what is kept lasts as long as this process.
    """
    path = Path(os.environ.get("RAMMER_CACHE") or platformdirs.user_cache_dir("rammer"))
    with suppress(OSError):  # whoever wants to write there says what is wrong
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    why = _shared(path)
    return path if not why else own_folder(path, why)


def _shared(path: Path) -> str:
    """Why others could have put something into a folder, "" if they could not."""
    if not hasattr(os, "geteuid"):  # Windows keeps a user's folders private by inherited rules
        return ""
    try:
        found = path.stat()
    except OSError:
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    return "other users may write there" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


@cache
def own_folder(path: Path, why: str) -> Path:
    """A folder of this process in the place of ``path``."""
    import tempfile  # rarely needed, and it takes long to import

    sys.stderr.write(f"rammer: warning: cache folder {path} is not used: {why} (chmod 700, or set RAMMER_CACHE)\n")
    own = Path(tempfile.mkdtemp(prefix="rammer-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own
