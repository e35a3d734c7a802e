"""What was worked out or measured for a program, kept in the cache folder for the next process. Best effort."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rammer.compiled.debug import DECISIONS, debug
from rammer.compiled.files import cache_text, cached_text
from rammer.ir.data import loads
from rammer.ir.program import RProgram
from rammer.profile.folder import cache_folder
from rammer.version import __version__

Value = TypeVar("Value")


class Remembered:
    """One JSON value about ``program``: ``what`` it is, and the ``versions`` of everything else that it depends on besides
    rammer's own. Its file begins with a checksum: a wrong wait would be worse than none."""

    def __init__(self, program: RProgram, what: str, *versions: str) -> None:
        version = hashlib.sha256("\0".join((__version__, *versions)).encode()).hexdigest()[:16]
        self.path: Path = cache_folder() / "binaries" / "cuda" / f"{program.digest}-{version}.{what}.json"

    def read(self) -> Any:
        """The value, None where there is none, or not as it was written."""
        text = cached_text(self.path)
        try:
            return loads(text) if text is not None else None
        except ValueError:
            return None

    def get(self, restored: Callable[[Any], Value], made: Callable[[], Value], record: Callable[[Value], Any]) -> Value:
        """What an earlier process kept, where ``restored`` can make use of it; else what is ``made`` now, kept as its record."""
        kept = self.read()
        if kept is not None:
            try:
                return restored(kept)
            except (LookupError, TypeError, ValueError, AttributeError) as problem:
                said = f"{self.path} does not hold ({problem!r}) and is made again"
                debug(DECISIONS, lambda: said)
        value = made()
        self.write(record(value))
        return value

    def write(self, value: Any) -> None:
        """Keep ``value``, whole or not at all."""
        cache_text(self.path, json.dumps(value))
