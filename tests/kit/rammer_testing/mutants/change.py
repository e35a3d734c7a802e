"""Random changes to bytes, protobufs, JSON, texts and zips. Each returns a new value."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from onnx import ModelProto

from rammer.compiled.artifact import is_text, seal_of

#: Whole numbers at the limits of types and formats.
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 31), -(1 << 63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
#: A name that a run must never execute; the campaign checks for the file.
CANARY = "PWNED"
_C = f'x; }} extern int system(const char*); int go(void) {{ return system("touch {CANARY}'
TEXTS = (
    "",
    "a",
    "x\ny",
    "\0",
    "é",
    "a b",
    "%s%n",
    "../../etc/passwd",
    "/etc/passwd",
    "x" * 5000,
    "$(touch PWNED)",
    "`touch PWNED`",
    f'*/ {_C}"); }} /*',
    f'\n{_C}"); }}\n//',
    "__import__('os').system('touch PWNED')",
    "(((((",
    "Infinity",
    "-1",
    "None",
    "x" * 300,
)


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """Return data with a few bytes flipped, set, cut, doubled, moved or inserted."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    at, size = rng.randrange(len(data)), rng.choice((1, 1, 2, 4, 8, 64))
    kind = rng.randrange(8)
    part = data[at : at + size]
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes([rng.choice((0, 1, 127, 128, 255))]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + data[at + size :]
    if kind == 3:
        return data[:at] + part * rng.choice((2, 3, 100)) + data[at + size :]
    if kind == 4:
        return data[:at]
    if kind == 5:
        return data[:at] + bytes(rng.randrange(256) for _ in range(size)) + data[at + size :]
    if kind == 6:
        return data[:at] + b"\xff" * rng.choice((1, 4, 9)) + b"\x7f" + data[at:]
    other = rng.randrange(len(data))
    return data[:at] + data[other : other + size] + data[at + size :]


# Protobufs ---------------------------------------------------------------------------------------------------


def proto_changed(rng: random.Random, data: bytes) -> bytes:
    """Return a model with one field replaced, removed, doubled, exchanged or repeated very often."""
    model = ModelProto.FromString(data)
    places = list(_places(model))
    message, field, index = rng.choice(places)
    value = getattr(message, field.name)
    if index is not None:
        _change_item(rng, message, field, value, index)
    elif field.message_type is not None or rng.random() < 0.15:
        message.ClearField(field.name)
    else:
        _set(lambda v: setattr(message, field.name, v), rng, field, value)
    return bytes(model.SerializeToString())


def _places(message: Any) -> Iterator[tuple[Any, Any, int | None]]:
    """Yield every field of a message and of nested messages; only a few of many entries."""
    for field, value in message.ListFields():
        if not field.is_repeated:
            yield message, field, None
            if field.message_type is not None:
                yield from _places(value)
            continue
        for index in range(len(value)) if len(value) < 12 else (0, len(value) // 2, len(value) - 1):
            yield message, field, index
            if field.message_type is not None:
                yield from _places(value[index])


def _change_item(rng: random.Random, message: Any, field: Any, values: Any, index: int) -> None:
    kind = rng.randrange(5)
    if kind == 0:
        del values[index]
    elif kind == 1:
        for _ in range(rng.choice((1, 1, 2, 50))):
            values.append(copy.deepcopy(values[index]))
    elif kind == 2:
        other = rng.randrange(len(values))
        first, second = copy.deepcopy(values[index]), copy.deepcopy(values[other])
        _store(values, field, index, second)
        _store(values, field, other, first)
    elif field.message_type is None:
        _set(lambda v: values.__setitem__(index, v), rng, field, values[index])
    else:
        values[index].Clear()


def _store(values: Any, field: Any, index: int, value: Any) -> None:
    if field.message_type is None:
        values[index] = value
    else:
        values[index].CopyFrom(value)


def _set(store: Callable[[Any], object], rng: random.Random, field: Any, value: Any) -> None:
    """Set another value of the field's kind; a value that the field cannot hold changes nothing."""
    if isinstance(value, bytes):
        new: Any = bytes_changed(rng, value) if rng.random() < 0.7 else rng.choice(TEXTS).encode()
    elif isinstance(value, str):
        new = rng.choice(TEXTS)
    elif isinstance(value, float):
        new = rng.choice(FLOATS)
    else:
        new = rng.choice((*NUMBERS, value + 1, value - 1, value * 2, -value))
    try:
        store(new)
    except (ValueError, TypeError, OverflowError):
        store(rng.randrange(20) if isinstance(value, int) else value)


# Texts, JSON and zips ----------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


def text_changed(rng: random.Random, text: str) -> str:
    """Return text with a token or a line removed, doubled, exchanged, or replaced by a number or a malicious string."""
    if rng.random() < 0.3:
        lines = text.split("\n")
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[at : at + 1] = rng.choice(([], [lines[at]] * rng.choice((2, 30)), [lines[other]], [text_changed(rng, lines[at])]))
        return "\n".join(lines)
    tokens = _TOKEN.findall(text) or [""]
    at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    old = tokens[at]
    new = [tokens[other], "", old + old, str(rng.choice(NUMBERS)), rng.choice(TEXTS), "(" * rng.choice((1, 5000)), "9" * 5000]
    if old.isdigit():
        new += [str(int(old) + 1), str(int(old) - 1), str(rng.choice(NUMBERS))] * 3 if len(old) < 30 else []
    tokens[at] = rng.choice(new)
    return "".join(tokens)


def json_changed(rng: random.Random, text: str) -> str:
    """Return JSON text with a value replaced, removed, doubled or nested deeply; rarely with changed text."""
    try:
        tree = json.loads(text)
    except ValueError:
        return text_changed(rng, text)
    places = list(_json_places(tree))
    if not places or rng.random() < 0.15:
        return text_changed(rng, text)
    holder, key = rng.choice(places)
    values: list[Any] = [None, True, [], {}, "", rng.choice(TEXTS), rng.choice(NUMBERS), rng.choice(FLOATS), [holder[key]] * 2]
    number = holder[key]
    if isinstance(number, int):
        values += [number + 1, number - 1, rng.choice(NUMBERS)] * 3
    kind = rng.random()
    if kind < 0.15:
        del holder[key]
    elif kind < 0.2:
        return json.dumps(tree).replace(json.dumps(number), "[" * 20_000, 1)
    else:
        other, place = rng.choice(places)
        holder[key] = rng.choice((*values, other[place])) if other is not holder[key] else None
    try:
        return json.dumps(tree)
    except ValueError:  # a value within itself
        return text


def _json_places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        yield tree, key
        yield from _json_places(value)


def sealed_changed(rng: random.Random, data: bytes) -> bytes:
    """Return the data of ``zip_changed`` with a valid digest, like an attacker."""
    return zip_changed(rng, data, seal=True)


def zip_changed(rng: random.Random, data: bytes, seal: bool = False) -> bytes:
    """Return a compiled file with a changed, removed, doubled, renamed, compressed or inflated member. The zip's checksums are
    valid. The digest of the whole is valid only with ``seal``."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members, comment = [(i.filename, archive.read(i)) for i in archive.infolist()], archive.comment
    at, packing, kind = rng.randrange(len(members)), zipfile.ZIP_STORED, rng.randrange(12)
    name, content = members[at]
    if kind == 0:
        del members[at]
    elif kind == 1:
        members.append((name, rng.choice(members)[1]))
    elif kind == 2:
        members[at] = (rng.choice((*TEXTS[4:8], "head.json", "0.node", "9.program")), content)
    elif kind == 3:
        packing = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    elif kind == 4:
        packing, members[at] = zipfile.ZIP_DEFLATED, (name, content + bytes(64 << 20))
    elif kind == 5:
        rng.shuffle(members)
    elif name.endswith("constants"):
        members[at] = (name, bytes_changed(rng, content))
    elif name.endswith(".program"):
        members[at] = (name, text_changed(rng, content.decode()).encode())
    else:
        members[at] = (name, json_changed(rng, content.decode()).encode("utf-8", "surrogatepass"))
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w", packing) as archive:
        warnings.simplefilter("ignore")  # about duplicate names
        for member, value in members:
            archive.writestr(member, value)
        archive.comment = seal_of({n: v for n, v in members if is_text(n)}) if seal else comment
    return made.getvalue()
