"""What kernel text depends on besides the program: the code that writes it."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path


@cache
def generator_hash(plugin: str) -> str:
    """Content hash of everything that writes kernel text: the package ``plugin`` and the core's emitter."""
    digest = hashlib.sha256()
    for package in (plugin, "rammer.codegen"):
        for path in sorted(Path(str(files(package))).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
