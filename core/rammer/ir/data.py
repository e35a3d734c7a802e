"""JSON that other processes wrote, or anybody: numbers are finite."""

from __future__ import annotations

import json
import math
from typing import Any


def loads(text: str | bytes) -> Any:
    """The value of a JSON text. ValueError for anything else, for NaN and infinities, which Python reads though JSON has none,
    and for nesting beyond what Python reads."""
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("a JSON text is nested too deeply") from error


def _refused(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)
