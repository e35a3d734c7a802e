"""Names of our own, and foreign strings in lines of text.

Whatever is called by a name inside the compiler (tensors, axes, operators, buffers, counters, programs) has an identifier:
letters, digits and ``_`` of ASCII. What a model calls things is data: it is kept for messages and ports, and where it
stands in a text it is quoted, so that it can neither end its line nor be taken for anything else. Kernel text is made of
identifiers and numbers alone.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import re
from collections.abc import Container, Iterable

#: Letters of an identifier that is made from a foreign name. What later steps derive from it (``x_copy``) is longer.
LONGEST = 120
#: Letters of any identifier, in a file as well.
LIMIT = 1000
#: Letters of a foreign name that texts and messages show.
SHOWN = 200
#: Words of C, C++ and OpenCL C, and what expressions print for numbers.
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
#: What kernel texts call their own functions by.
_OURS = "rm_"


def is_identifier(name: str) -> bool:
    """Whether ``name`` may be the name of anything in the compiler."""
    return name.isascii() and name.isidentifier() and len(name) <= LIMIT


def check_identifier(what: str, name: str) -> str:
    """``name``; ValueError unless it is an identifier."""
    if not is_identifier(name):
        raise ValueError(f"{what} has the name {shorten_name(name)!r}, which is no identifier")
    return name


class Names(set[str]):
    """Identifiers that are taken, with the last number given to each. Those of ``outer`` are taken, too, and not copied."""

    def __init__(self, names: Iterable[str] = (), outer: Container[str] = ()) -> None:
        super().__init__(names)
        self.last: dict[str, int] = {}
        self.outer = outer

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.outer


def make_identifier(name: str, taken: set[str] | None = None) -> str:
    """An identifier for an arbitrary name, unique among ``taken``, to which it is added. One that is good already stays."""
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
    """At most ``SHOWN`` letters of a foreign name, begin and end, with a hash for what is left out."""
    if len(name) <= SHOWN:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{name[: SHOWN - 50]}...{digest}...{name[-30:]}"


def quote_text(text: str) -> str:
    """A foreign string as it stands in a line: itself where nothing in it can be misread, else in JSON's quotes."""
    plain = text.isprintable() and text == text.strip() and text and text[0] != '"'
    return text if plain else json.dumps(text)


def unquote_text(text: str) -> str:
    """Inverse of ``quote_text``. ValueError for what it does not print."""
    value = json.loads(text) if text.startswith('"') else text
    if not isinstance(value, str) or quote_text(value) != text:
        raise ValueError(f"not a name as it is written: {shorten_name(text)!r}")
    return value
