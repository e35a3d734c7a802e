"""Hashes of code: results that were tuned or compiled with other code of a plugin are not used."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

#: Suffixes of files that decide a plugin's behaviour: code, and stored text of kernels.
CODE = (".py", ".pyi", ".cuh", ".cu", ".cl", ".c", ".h", ".cpp", ".so")


@cache
def code_hash(*packages: str) -> str:
    """Return a content hash of the files of imported packages or modules; "" if none has a file."""
    digest, found = hashlib.sha256(), False
    for package in packages:
        for path in _source_files(package):
            digest.update(path.read_bytes())
            found = True
    return digest.hexdigest()[:16] if found else ""


def _source_files(package: str) -> list[Path]:
    module = sys.modules.get(package)
    folders = [Path(p) for p in getattr(module, "__path__", ())]
    if folders:
        return sorted(p for f in folders for p in f.rglob("*") if p.suffix in CODE and p.is_file())
    path = Path(getattr(module, "__file__", None) or "")
    return [path] if path.is_file() else []


def package_of(thing: object) -> str:
    """Return the top package of a plugin's code, or of an object's class."""
    module = thing.__name__ if isinstance(thing, ModuleType) else type(thing).__module__
    return module.partition(".")[0]
