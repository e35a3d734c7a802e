"""Readers of untrusted data: finite JSON, whole numbers, file names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

#: The largest whole number in texts (64 bits, signed).
LARGEST: Final = (1 << 63) - 1


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for invalid JSON and for nesting deeper than Python reads. NaN and
    infinities are invalid, although Python accepts them."""
    try:
        return json.loads(text, parse_constant=_refuse_number, parse_float=_parse_finite)
    except RecursionError as error:
        raise ValueError("a JSON text is nested too deeply") from error


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _parse_finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def whole_number(text: str, most: int = LARGEST) -> int | None:
    """Return the number that ``text`` spells in decimal digits of ASCII, or None for other text and numbers above ``most``."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST))):
        return None
    number = int(text)
    return number if number <= most else None


def place_in(folder: Path, name: str) -> Path | None:
    """Return the path of file ``name`` in ``folder``; None if it is outside, also by a symbolic link."""
    root = folder.resolve()
    path = (root / name).resolve()
    return None if Path(name).is_absolute() or not path.is_relative_to(root) else path
