"""Internal identifiers, and quoting of foreign strings in text.

All named objects in the compiler (tensors, axes, operators, buffers, counters, programs) have identifiers: letters, digits and
``_`` of ASCII. Names from a model are data: they are stored for messages and ports. In texts they are quoted, so that they can
neither end a line nor be misread. Kernel text consists only of identifiers and numbers.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import re
from collections.abc import Container, Iterable

#: Maximum letters of an identifier derived from a foreign name. Later suffixes (``x_copy``) may exceed it.
LONGEST = 120
#: Maximum letters of any identifier, also in files.
LIMIT = 1000
#: Maximum letters of a foreign name in texts and messages.
SHOWN = 200
#: Words of C, C++ and OpenCL C, and words that expressions print for numbers.
_RESERVED = frozenset(
    (
        "alignas",
        "alignof",
        "and_eq",
        "asm",
        "auto",
        "bitand",
        "bitor",
        "bool",
        "case",
        "catch",
        "char",
        "class",
        "compl",
        "concept",
        "const",
        "consteval",
        "constexpr",
        "constinit",
        "const_cast",
        "co_await",
        "co_return",
        "co_yield",
        "decltype",
        "default",
        "delete",
        "do",
        "double",
        "dynamic_cast",
        "enum",
        "explicit",
        "export",
        "extern",
        "float",
        "friend",
        "goto",
        "half",
        "inf",
        "inline",
        "int",
        "long",
        "mutable",
        "namespace",
        "nan",
        "new",
        "noexcept",
        "not_eq",
        "nullptr",
        "operator",
        "or_eq",
        "private",
        "protected",
        "public",
        "register",
        "reinterpret_cast",
        "requires",
        "restrict",
        "short",
        "signed",
        "sizeof",
        "static",
        "static_assert",
        "static_cast",
        "struct",
        "switch",
        "template",
        "this",
        "thread_local",
        "throw",
        "typedef",
        "typeid",
        "typename",
        "uchar",
        "uint",
        "ulong",
        "union",
        "unsigned",
        "ushort",
        "using",
        "virtual",
        "void",
        "volatile",
        "wchar_t",
        "xor_eq",
    )
)
#: Prefix of the functions that kernel texts define.
_OURS = "rm_"


def is_identifier(name: str) -> bool:
    """Return True if ``name`` is a valid identifier in the compiler."""
    return name.isascii() and name.isidentifier() and len(name) <= LIMIT


def check_identifier(what: str, name: str) -> str:
    """Return ``name``, or raise ValueError if it is not an identifier."""
    if not is_identifier(name):
        raise ValueError(f"{what} has the name {shorten_name(name)!r}, which is not an identifier")
    return name


class Names(set[str]):
    """A set of used identifiers, with the last number appended to each. The names of ``outer`` count as used, without a copy."""

    def __init__(self, names: Iterable[str] = (), outer: Container[str] = ()) -> None:
        super().__init__(names)
        self.last: dict[str, int] = {}
        self.outer = outer

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.outer


def make_identifier(name: str, taken: set[str] | None = None) -> str:
    """Return an identifier for an arbitrary name, unique among ``taken``, to which it is added. A valid and unused name stays
    unchanged."""
    base = re.sub(r"\W", "_", name, flags=re.ASCII) or "t"
    if len(base) > LONGEST:
        base = f"{base[: LONGEST - 9]}_{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"
    if base[0].isdigit() or keyword.iskeyword(base) or base in _RESERVED or base.startswith(_OURS):
        base = f"t{base}"
    if taken is None:
        return base
    result, number = base, taken.last.get(base, 1) if isinstance(taken, Names) else 1
    while result in taken:
        number += 1
        result = f"{base}_{number}"
    if isinstance(taken, Names):
        taken.last[base] = number
    taken.add(result)
    return result


def shorten_name(name: str) -> str:
    """Shorten a foreign name to at most ``SHOWN`` letters: its start, a hash and its end."""
    if len(name) <= SHOWN:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{name[: SHOWN - 50]}...{digest}...{name[-30:]}"


def quote_text(text: str) -> str:
    """Quote a foreign string in JSON's quotes, unless it cannot be misread in a line."""
    plain = text.isprintable() and text == text.strip() and text and text[0] != '"'
    return text if plain else json.dumps(text)


def unquote_text(text: str) -> str:
    """Reverse ``quote_text``. Raises ValueError for text that it does not print."""
    value = json.loads(text) if text.startswith('"') else text
    if not isinstance(value, str) or quote_text(value) != text:
        raise ValueError(f"not a name as it is written: {shorten_name(text)!r}")
    return value
