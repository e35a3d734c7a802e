"""Hashes of code: results that were tuned or compiled with other code of a plugin are not used."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

#: Suffixes of files that decide a plugin's behaviour: code, and stored text of kernels.
CODE = (".py", ".pyi", ".cuh", ".cu", ".cl", ".c", ".h", ".cpp", ".so")


@cache
def code_hash(package: str) -> str:
    """Return a content hash of the files of an imported package or module; "" if it has no file."""
    digest, found = hashlib.sha256(), False
    for path in _source_files(package):
        digest.update(Path(path).read_bytes())
        found = True
    return digest.hexdigest()[:16] if found else ""


def _source_files(package: str) -> list[str]:
    module = sys.modules.get(package)
    folders = list(getattr(module, "__path__", ()))
    if folders:  # every start hashes a plugin's files, and os.walk takes half the time of Path.rglob
        found = (os.path.join(folder, name) for root in folders for folder, _, names in os.walk(root) for name in names)
        return sorted(path for path in found if path.endswith(CODE))
    path = getattr(module, "__file__", None) or ""
    return [path] if os.path.isfile(path) else []


def package_of(thing: object) -> str:
    """Return the top package of a plugin's code, or of an object's class."""
    module = thing.__name__ if isinstance(thing, ModuleType) else type(thing).__module__
    return module.partition(".")[0]
