"""Weights removed from a model's bytes: put back, they give protobuf's message, or both readers refuse the bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from rammer.frontend.read import wire_format
from rammer.frontend.read.wire_format import BYTES, LONG, SHORT, VARINT, Malformed, iter_fields, read_varint, without_weights
from rammer_testing.nonempty import some

RAW, LOCATION, INITIALIZER, GRAPH = 9, 14, 5, 7


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit so that tensors of a few bytes are removed."""
    monkeypatch.setattr(wire_format, "LEAST", 16)


def number(value: int, longer: int = 0) -> bytes:
    """Return an encoded varint, with ``longer`` redundant bytes."""
    made = bytearray()
    while value > 127 or longer:
        made.append(value & 127 | 128)
        value, longer = value >> 7, max(longer - 1, 0) if value < 128 else longer
    return bytes([*made, value])


def held(field: int, value: bytes, kind: int = BYTES) -> bytes:
    """Return a field of bytes."""
    return number(field << 3 | kind) + number(len(value)) + value


def tensor(rng: np.random.Generator, name: str) -> bytes:
    return numpy_helper.from_array(rng.standard_normal(int(rng.integers(1, 12))).astype(np.float32), name).SerializeToString()


def spoiled(rng: np.random.Generator, data: bytes) -> bytes:
    """Return a tensor with one unusual feature.

    Fields are repeated or unknown, or lengths are too long or have redundant bytes."""
    twice = held(RAW, rng.bytes(int(rng.integers(0, 40))))
    local = number(LOCATION << 3 | VARINT) + number(int(rng.integers(0, 3)))
    cuts: list[Callable[[], bytes]] = [
        lambda: data + twice,
        lambda: twice + data,
        lambda: data + local,
        lambda: local + data,
        lambda: data + local + local,
        lambda: data + number(RAW << 3 | SHORT) + bytes(4),
        lambda: data + number(RAW << 3 | LONG) + bytes(8),
        lambda: data + number(LOCATION << 3 | BYTES) + number(2) + b"\0\1",
        lambda: data + number(500 << 3 | BYTES) + number(20) + bytes(20),
        lambda: data + number(RAW << 3 | BYTES) + number(1 << 40) + bytes(9),
        lambda: data + number(RAW << 3 | BYTES, longer=3) + number(24, longer=2) + bytes(24),
        lambda: data + number(77 << 3 | 3) + local + number(77 << 3 | 4),
        lambda: data + number(0) + b"x",
        lambda: data[: int(rng.integers(len(data)))],
        lambda: data,
    ]
    return cuts[int(rng.integers(len(cuts)))]()


def model(rng: np.random.Generator) -> bytes:
    """Return a model of some tensors, of which at most one is unusual.

    Sometimes its graph is in two parts, or bytes follow it."""
    tensors = [tensor(rng, f"w{i}") for i in range(int(rng.integers(1, 4)))]
    place = int(rng.integers(len(tensors)))
    tensors[place] = spoiled(rng, tensors[place])
    ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [2])] for n in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", *ports).SerializeToString()
    inner = [held(INITIALIZER, t) for t in tensors]
    if rng.random() < 0.2:  # a field of another kind is not a tensor
        inner.insert(int(rng.integers(len(inner))), number(INITIALIZER << 3 | VARINT) + number(1))
    graphs = [graph + b"".join(inner)] if rng.random() < 0.8 else [graph, b"".join(inner)]
    head = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 21)]).SerializeToString()
    parts = [head, *[held(GRAPH, g) for g in graphs]]
    return b"".join(parts if rng.random() < 0.5 else parts[::-1])


def parsed(data: bytes) -> onnx.ModelProto | None:
    """Return the message, or None if it is invalid."""
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError:
        return None


def put_back(data: bytes) -> tuple[onnx.ModelProto | None, int]:
    """Return the message with its weights removed and put back, and the number of weights."""
    short, cut = without_weights(memoryview(data))
    made = parsed(bytes(short))
    if made is not None:
        for place, raw in cut.items():
            made.graph.initializer[place].raw_data = bytes(raw)
    return made, len(cut)


def test_a_message_is_the_same_with_its_weights_back(rng: np.random.Generator) -> None:
    """Check unusual fields, then bytes damaged at random places.

    The result equals protobuf's, and is None where protobuf fails."""
    whole = broken = cut = 0
    for turn in range(3000):
        data = bytearray(model(rng))
        for _ in range(turn % 3):
            place = int(rng.integers(len(data)))
            data[place : place + int(rng.integers(0, 2))] = rng.bytes(int(rng.integers(0, 3)))
        want, (have, count) = parsed(bytes(data)), put_back(bytes(data))
        assert have == want, bytes(data).hex()
        whole, broken, cut = whole + (want is not None), broken + (want is None), cut + count
    assert min(whole, broken, cut) > 300


@pytest.mark.parametrize("extra", [held(RAW, bytes(64)), number(LOCATION << 3 | VARINT) + number(1)], ids=["raw", "location"])
@pytest.mark.parametrize("before", [False, True])
def test_a_tensor_that_says_more_stays_whole(extra: bytes, before: bool) -> None:
    """Check repeated raw data, of which the last one counts, and data at another location."""
    usual = numpy_helper.from_array(np.ones(40, np.float32), "w").SerializeToString()
    for tensor_bytes, count in some([(usual, 1), (extra + usual if before else usual + extra, 0)]):
        data = held(GRAPH, held(INITIALIZER, tensor_bytes))
        have, found = put_back(data)
        assert have == parsed(data) and found == count


def test_numbers_and_fields() -> None:
    assert read_varint(b"\x96\x01", 0) == (150, 2) and read_varint(number(1 << 63), 0) == (1 << 63, 10)
    assert read_varint(b"\x96", 0)[0] is None and read_varint(b"", 0)[0] is None and read_varint(b"\xff" * 20, 0)[0] is None
    data = held(3, b"abc") + number(2 << 3 | VARINT) + number(5)
    assert [(f.number, f.kind, data[f.begin : f.end]) for f in iter_fields(data, 0, len(data))] == [
        (3, BYTES, b"abc"),
        (2, VARINT, b"\5"),
    ]
    for end in some(range(1, len(data))):
        if end != 5:
            with pytest.raises(Malformed):
                list(iter_fields(data[:end], 0, end))
