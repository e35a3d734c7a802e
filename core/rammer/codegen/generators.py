"""What kernel text depends on besides the program: the code that writes it."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path

#: Files that decide what a kernel's text is: code, and text that is kept as it is.
GENERATORS = (".py", ".cuh")


@cache
def generator_hash(plugin: str) -> str:
    """Content hash of everything that writes kernel text: the package ``plugin`` and the core's emitter."""
    digest = hashlib.sha256()
    for package in (plugin, "rammer.codegen"):
        for path in sorted(p for p in Path(str(files(package))).rglob("*") if p.suffix in GENERATORS):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
