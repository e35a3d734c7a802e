"""What was worked out or measured for a program, kept in the cache folder for the next process. Best effort."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rammer.ir.program import RProgram
from rammer.profile.folder import cache_folder
from rammer.runtime.files import keep_text, kept_text
from rammer.version import __version__


class Remembered:
    """One JSON value about ``program``: ``what`` it is, and the ``versions`` of everything else that it depends on besides
    rammer's own. Its file begins with a checksum: a wrong wait would be worse than none."""

    def __init__(self, program: RProgram, what: str, *versions: str) -> None:
        version = hashlib.sha256("\0".join((__version__, *versions)).encode()).hexdigest()[:16]
        self.path: Path = cache_folder() / "binaries" / "cuda" / f"{program.digest}-{version}.{what}.json"

    def read(self) -> Any:
        """The value, None where there is none, or not as it was written."""
        text = kept_text(self.path)
        return json.loads(text) if text is not None else None

    def write(self, value: Any) -> None:
        """Keep ``value``, whole or not at all."""
        keep_text(self.path, json.dumps(value))
