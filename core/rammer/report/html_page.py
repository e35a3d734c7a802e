"""A self-contained HTML page: data, style and scripts in one file, without a network.

Names from a model are data. They are written as JSON in which no character can end the element, and the scripts insert them as
text only. A content security policy allows exactly the scripts and the style of this page."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from typing import Any, Final

from rammer.errors import to_printable

#: The scripts of the page, in order.
SCRIPTS: Final = ("core.js", "flow.js", "timeline.js", "tables.js", "page.js")


def render_page(title: str, data: dict[str, Any]) -> str:
    """Return the page as text. ``data`` must consist of JSON values with finite numbers."""
    folder = files("rammer.report") / "page"
    style = (folder / "page.css").read_text("utf-8")
    script = "\n".join((folder / name).read_text("utf-8") for name in SCRIPTS)
    parts = {
        "TITLE": escape(to_printable(title)),
        "POLICY": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'",
        "STYLE": style,
        "DATA": embed_json(data),
        "SCRIPT": script,
    }
    pieces = (folder / "page.html").read_text("utf-8").split("@@")
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def embed_json(data: dict[str, Any]) -> str:
    """Return compact JSON in ASCII without ``<``, ``>`` and ``&``, so that HTML cannot be embedded in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(text: str) -> str:
    """Return the hash of an inline element for a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
