"""Normalised kernel texts: words, without comments, spacing and names that are hashes of the text itself. A kernel with changed
layout or comments therefore stays equal. Its machine code confirms this (``golden_cubin``)."""

from __future__ import annotations

import hashlib
import re

#: A string, which is kept, or a comment, which is removed.
_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
#: A directive with its continuation lines. It ends with its line, unlike all other text.
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_WORD = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\w.]+|([-+&|<>=])\1?=?|\S')
#: A name that ends in the hash of its text (or table): 16 or 20 digits, with at least one letter and one digit.
_NAMED = re.compile(r"\b[A-Za-z_]\w*?(?<![0-9a-f])(?=[a-f]*\d)[0-9a-f]{16}(?:[0-9a-f]{4})?(?![0-9a-f])")


def normal(text: str) -> str:
    """Return ``text`` as words separated by one space: one line per directive and one for all text between two directives."""
    bare = _COMMENT.sub(lambda m: m[1] or " ", text)
    names: dict[str, str] = {}
    bare = _NAMED.sub(lambda m: names.setdefault(m[0], f"NAME{len(names)}"), bare)
    lines, end = [], 0
    for directive in _DIRECTIVE.finditer(bare):
        lines += [_words(bare[end : directive.start()]), _words(directive[0].replace("\\\n", " "))]
        end = directive.end()
    return "\n".join(line for line in (*lines, _words(bare[end:])) if line)


def _words(text: str) -> str:
    return " ".join(m[0] for m in _WORD.finditer(text))


def digest(value: str | bytes) -> str:
    """Return a hash that is short but unique enough."""
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:12]


def text_digest(text: str) -> str:
    """Return the hash of a kernel's text after ``normal``."""
    return digest(normal(text))


def digits(seconds: float) -> str:
    """Return microseconds to five digits: more than any model's accuracy, and fewer than machines may differ in."""
    return f"{seconds * 1e6:.5g}"
