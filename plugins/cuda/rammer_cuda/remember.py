"""What was worked out or measured for a program, kept in the cache folder for the next process. Best effort."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rammer.ir.program import RProgram
from rammer.profile.store import cache_folder


class Remembered:
    """One JSON value about ``program``: ``what`` it is, and the ``versions`` of everything else that it depends on."""

    def __init__(self, program: RProgram, what: str, *versions: str) -> None:
        version = hashlib.sha256("\0".join(versions).encode()).hexdigest()[:16]
        self.path: Path = cache_folder() / "binaries" / "cuda" / f"{program.digest}-{version}.{what}.json"

    def read(self) -> Any:
        """The value, None where there is none that can be read."""
        try:
            return json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None

    def write(self, value: Any) -> None:
        """Keep ``value``, whole or not at all."""
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(value))
            partial.replace(self.path)
        except OSError:
            partial.unlink(missing_ok=True)
