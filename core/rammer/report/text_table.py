"""Tables: aligned plain text on a terminal, Markdown for files."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from rammer.errors import bound_text, to_printable


def plain_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Return an aligned table; numbers keep their original text."""
    rows = [[bound_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    return to_printable(str(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)))


def markdown_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Return a GitHub-flavoured Markdown table."""
    return str(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


def format_duration(seconds: float) -> str:
    """Return a duration such as ``12.3 ms``: three significant digits with a fitting unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def format_size(count: float) -> str:
    """Return a byte count with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    return ""
