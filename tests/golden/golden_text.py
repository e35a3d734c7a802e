"""What of a text is frozen: its words, without comments, spacing and the names that are hashes of the text itself.

So a kernel that is only laid out or commented anew stays equal, and its machine code says so once more (``golden_cubin``).
"""

from __future__ import annotations

import hashlib
import re

#: A string, which stays as it is, or a comment, which goes.
_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
#: A directive with the lines that continue it: it ends with its line, unlike everything else.
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_WORD = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\w.]+|([-+&|<>=])\1?=?|\S')
#: A name that ends in the hash of the text (or of the table) that it names: 16 or 20 digits, with a letter and a digit at least.
_NAMED = re.compile(r"\b[A-Za-z_]\w*?(?<![0-9a-f])(?=[a-f]*\d)[0-9a-f]{16}(?:[0-9a-f]{4})?(?![0-9a-f])")


def normal(text: str) -> str:
    """``text`` as words with one space between them, a line for every directive and for all between two of them."""
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
    """A hash short enough to read and long enough to tell."""
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:12]


def text_digest(text: str) -> str:
    """The hash of a kernel's text as ``normal`` leaves it."""
    return digest(normal(text))


def digits(seconds: float) -> str:
    """Microseconds to five digits: more than any model is worth, and fewer than machines may differ in."""
    return f"{seconds * 1e6:.5g}"
