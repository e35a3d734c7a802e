"""A parser for Protobuf's wire format that cuts weights out of a model's bytes before they are copied.

https://protobuf.dev/programming-guides/encoding: a message is a sequence of fields, each a tag (number << 3 | type) and a value.
Strings, bytes and messages begin with their length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

Bytes: TypeAlias = "bytes | memoryview"

#: Wire types: a varint, 8 bytes, length-delimited bytes, 4 bytes.
VARINT, LONG, BYTES, SHORT = 0, 1, 2, 5
#: Field numbers (onnx.proto) in ModelProto, GraphProto and TensorProto.
_GRAPH, _INITIALIZER, _RAW_DATA, _DATA_LOCATION = 7, 5, 9, 14
#: Minimum bytes of a value that is cut out. Shapes, axes and scales, whose values are read, are far smaller.
LEAST: Final = 1 << 14


class Malformed(ValueError):
    """Error for bytes that violate protobuf's wire format."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message: the start of the field, and the bounds of its value."""

    number: int
    kind: int
    start: int
    begin: int
    end: int


def read_varint(data: Bytes, position: int) -> tuple[int | None, int]:
    """Return the number at ``position`` and its end; the number is None if the data end within it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            return None, position
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    return None, position


def iter_fields(data: Bytes, begin: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message from ``begin`` to ``end``. Raises Malformed for an invalid message."""
    position = begin
    while position < end:
        tag, at = read_varint(data, position)
        if tag is None:
            raise Malformed
        kind, length = tag & 7, {LONG: 8, SHORT: 4}.get(tag & 7, 0)
        if kind in (VARINT, BYTES):
            value, after = read_varint(data, at)
            if value is None:
                raise Malformed
            at, length = (after, value) if kind == BYTES else (at, after - at)
        elif not length:
            raise Malformed
        if at + length > end:
            raise Malformed
        yield Field(tag >> 3, kind, position, at, at + length)
        position = at + length


def without_weights(data: memoryview) -> tuple[bytes | memoryview, dict[int, memoryview]]:
    """Return a model's bytes without the raw data of large initialisers, and these data by initialiser index. Invalid or
    unusually encoded models stay whole; the parser reports their errors."""
    try:
        graphs = [f for f in iter_fields(data, 0, len(data)) if f.number == _GRAPH]
        if len(graphs) != 1 or graphs[0].kind != BYTES:
            return data, {}
        return _cut_initializers(data, graphs[0])
    except Malformed:
        return data, {}


def _cut_initializers(data: memoryview, graph: Field) -> tuple[bytes | memoryview, dict[int, memoryview]]:
    parts, cut = list[Bytes](), dict[int, memoryview]()
    done, place = graph.begin, 0
    for found in iter_fields(data, graph.begin, graph.end):
        if found.number != _INITIALIZER:
            continue
        if found.kind != BYTES:
            raise Malformed
        if found.end - found.begin >= LEAST and (raw := _raw_data(data, found)):
            kept = found.end - found.begin - (raw.end - raw.start)
            parts += [data[done : found.start], _encode_tag(_INITIALIZER), _encode_varint(kept)]
            parts += [data[found.begin : raw.start], data[raw.end : found.end]]
            cut[place], done = data[raw.begin : raw.end], found.end
        place += 1
    if not cut:
        return data, {}
    parts.append(data[done : graph.end])
    inner = _encode_varint(sum(map(len, parts)))
    return b"".join([data[: graph.start], _encode_tag(_GRAPH), inner, *parts, data[graph.end :]]), cut


def _raw_data(data: memoryview, tensor: Field) -> Field | None:
    """Return the raw data of a tensor if they are large, occur once and are not external, else None."""
    inside = [f for f in iter_fields(data, tensor.begin, tensor.end) if f.number in (_RAW_DATA, _DATA_LOCATION)]
    if (
        len(inside) == 1
        and inside[0].number == _RAW_DATA
        and inside[0].kind == BYTES
        and inside[0].end - inside[0].begin >= LEAST
    ):
        return inside[0]
    return None


def _encode_tag(number: int) -> bytes:
    return _encode_varint(number << 3 | BYTES)


def _encode_varint(value: int) -> bytes:
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes([*result, value])
