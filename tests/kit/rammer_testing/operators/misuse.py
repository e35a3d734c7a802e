"""Invalid uses of operators: attributes, operands and results of wrong kinds, lengths and values.

One property of a valid case is changed. An attribute is omitted, or has another kind, an extreme value, NaN or an unknown word. A
list is too short or too long. An operand is omitted, or has another rank, extent or type. A result is added. The model must be
refused as bad input, or the references judge its results. A traceback is always a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from rammer_testing.operators.case import Array, OperatorCase

#: Whole numbers, floats and words at the limits of valid values.
WHOLE: Final = (0, 1, -1, 2, 5, -3, 1000, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63))
REAL: Final = (0.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
WORDS: Final = (b"", b"nonsense", b"\xff\xfe", "\u00e9".encode(), b"linear", b"NONE", b"a b\n")
TYPES: Final = ("float32", "float64", "int64", "int32", "bool", "uint8")

_KINDS: Final = AttributeProto.AttributeType
#: The field that stores an attribute's value, by kind.
_FIELDS: Final = {
    "FLOAT": "f",
    "INT": "i",
    "STRING": "s",
    "TENSOR": "t",
    "GRAPH": "g",
    "FLOATS": "floats",
    "INTS": "ints",
    "STRINGS": "strings",
    "TENSORS": "tensors",
    "GRAPHS": "graphs",
    "SPARSE_TENSOR": "sparse_tensor",
    "TYPE_PROTO": "tp",
    "SPARSE_TENSORS": "sparse_tensors",
    "TYPE_PROTOS": "type_protos",
}


@dataclass(frozen=True)
class Misuse:
    """A model with one error, the description of the error, and input values."""

    op: str
    what: str
    model: ModelProto
    feeds: dict[str, Array]

    def __str__(self) -> str:
        return f"{self.op}: {self.what}"


def misuses(case: OperatorCase, random: Random) -> Iterator[Misuse]:
    """Yield every change of ``case`` in a deterministic order: attributes, then operands and results."""
    model, feeds = case.model(), case.feeds
    for what, change in (*_attribute_changes(case, model, random), *_arity_changes(model)):
        made = ModelProto.FromString(model.SerializeToString())
        change(made.graph.node[0])
        yield Misuse(case.op, what, made, feeds)
    yield from _operand_changes(case, random)


# Attributes ----------------------------------------------------------------------------------------------------

_Change = Callable[[NodeProto], object]


def _attribute_changes(case: OperatorCase, model: ModelProto, random: Random) -> Iterator[tuple[str, _Change]]:
    schema = case.schema
    given = {a.name: a for a in model.graph.node[0].attribute}
    for name, declared in schema.attributes.items():
        kind = int(declared.type.value)
        if name in given:
            yield f"without {name}", _replaced(name)
            yield f"{name} twice", _added(given[name])
        for value in _values(kind, given.get(name), declared.default_value):
            made = _made(name, kind, value)
            yield f"{name}={value!r:.60}", _replaced(name, made)
        for other in random.sample([k for k in _KINDS.values() if k != kind], 3):
            made = _made(name, other, _some(other))
            yield f"{name} of kind {_KINDS.Name(other)}", _replaced(name, made)
        mislabelled = _made(name, kind, _some(kind))
        mislabelled.type = random.choice([k for k in _KINDS.values() if k != kind])
        yield f"{name} of kind {_KINDS.Name(kind)} labelled {_KINDS.Name(mislabelled.type)}", _replaced(name, mislabelled)
        reference = AttributeProto(name=name, type=kind, ref_attr_name="outer")
        yield f"{name} refers to a function's attribute", _replaced(name, reference)
    yield "an unknown attribute", _added(_made("surprise", _KINDS.Value("INT"), 1))


def _added(made: AttributeProto) -> _Change:
    return lambda node: node.attribute.append(made)


def _replaced(name: str, made: AttributeProto | None = None) -> _Change:
    def change(node: NodeProto) -> None:
        others = [AttributeProto.FromString(a.SerializeToString()) for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*others, *([made] if made is not None else [])])

    return change


def _made(name: str, kind: int, value: Any) -> AttributeProto:
    """Return an attribute of exactly this kind with any value."""
    result = AttributeProto(name=name, type=kind)
    field = _FIELDS.get(_KINDS.Name(kind))
    if field is None or value is None:
        return result
    if isinstance(value, list):
        getattr(result, field).extend(value)
    elif field in ("f", "i", "s"):
        setattr(result, field, value)
    else:
        getattr(result, field).CopyFrom(value)
    return result


def _some(kind: int) -> Any:
    """Return a value of a kind."""
    plain: dict[str, Any] = {
        "FLOAT": 1.0,
        "INT": 1,
        "STRING": b"constant",
        "TENSOR": _tensor(np.ones(1, np.float32)),
        "GRAPH": GraphProto(name="empty"),
        "TYPE_PROTO": TypeProto(),
    }
    name = _KINDS.Name(kind)
    return [plain[name[:-1]]] if name.endswith("S") and name[:-1] in plain else plain.get(name)


def _values(kind: int, given: AttributeProto | None, default: AttributeProto) -> Iterator[Any]:
    name = _KINDS.Name(kind)
    if name == "INT":
        yield from WHOLE
    elif name == "FLOAT":
        yield from REAL
    elif name == "STRING":
        yield from WORDS
        if given is not None:
            yield from (given.s.lower(), given.s.upper(), given.s + b"x")
    elif name == "INTS":
        yield from _lists(list(given.ints) if given is not None else [], WHOLE)
    elif name == "FLOATS":
        yield from _lists(list(given.floats) if given is not None else [], REAL)
    elif name == "STRINGS":
        yield from _lists(list(given.strings) if given is not None else [], WORDS)
    elif name == "TENSOR":
        yield from (_tensor(a) for a in _ARRAYS)
        yield TensorProto(data_type=TensorProto.STRING, dims=[1], string_data=[b"x"])
        yield TensorProto(data_type=TensorProto.FLOAT, dims=[2], float_data=[1.0])
        yield TensorProto(data_type=TensorProto.BFLOAT16, dims=[1], int32_data=[1])
        yield TensorProto()
    elif name == "GRAPH":
        yield GraphProto(name="empty")


_ARRAYS: Final = (
    np.zeros(0, np.float32),
    np.ones((), np.float32),
    np.ones(1, np.float64),
    np.full(1, np.nan, np.float32),
    np.ones((2, 2), np.float32),
    np.ones(1, bool),
    np.full(1, -(1 << 63), np.int64),
    np.full(1, 255, np.uint8),
    np.ones(1, np.complex64),
)


def _lists(given: list[Any], ends: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Yield lists that are empty, too short, too long, or differ at one element or at all."""
    yield []
    for value in ends:
        yield [value]
        if len(given) > 1:
            yield [value] * len(given)
            yield [*given[:-1], value]
    for count in (2, 3, 4, 6):
        yield [ends[1]] * count
    if given:
        yield given[:-1]
        yield [*given, given[-1]]


def _tensor(array: Array) -> TensorProto:
    return numpy_helper.from_array(array)


# Operands and results ------------------------------------------------------------------------------------------


def _arity_changes(model: ModelProto) -> Iterator[tuple[str, _Change]]:
    node = model.graph.node[0]
    for i in range(len(node.input)):
        yield f"input {i} left out", _input(i, "")
        yield f"inputs from {i} on left out", partial(_cut, i)
    for i in range(1, len(node.input)):
        yield f"input {i} is input 0", _input(i, node.input[0])
    if node.input:
        yield "an input more", lambda n: n.input.append(n.input[0])
        yield "40 inputs more", lambda n: n.input.extend([n.input[0]] * 40)
    yield "no output", lambda n: n.output.__delitem__(slice(None))
    yield "an output more", lambda n: n.output.append("more")
    yield "20 outputs more", lambda n: n.output.extend([f"more{i}" for i in range(20)])


def _input(place: int, name: str) -> _Change:
    return lambda node: node.input.__setitem__(place, name)


def _cut(first: int, node: NodeProto) -> None:
    del node.input[first:]


def _operand_changes(case: OperatorCase, random: Random) -> Iterator[Misuse]:
    """Yield changes of the rank, extent, type or value of one operand, constant or not."""
    for i, operand in enumerate(case.operands):
        if operand is None:
            continue
        for what, array in _arrays(operand, random):
            operands = (*case.operands[:i], array, *case.operands[i + 1 :])
            for static in {case.static, case.static ^ {i}}:
                made = OperatorCase(case.op, case.opset, operands, case.attributes, case.outputs, frozenset(static))
                known = " (constant)" if i in static else ""
                yield Misuse(case.op, f"input {i} {what}{known}", made.model(), made.feeds)


def _arrays(operand: Array, random: Random) -> Iterator[tuple[str, Array]]:
    yield "of one rank more", operand[None]
    yield "as it is", operand
    if operand.ndim:
        yield "of one rank less", operand[0] if operand.shape[0] else operand.reshape(operand.shape[1:] if operand.size else (0,))
        yield "as a scalar", np.asarray(operand.ravel()[0] if operand.size else 0, operand.dtype)
        yield "flattened", operand.ravel()
    for axis in range(operand.ndim):
        index = [slice(None)] * operand.ndim
        index[axis] = slice(0, 0)
        yield f"empty along {axis}", operand[tuple(index)]
        yield f"longer along {axis}", np.concatenate([operand, operand], axis=axis)
    for dtype in random.sample(TYPES, 3):
        if dtype != str(operand.dtype):
            with np.errstate(all="ignore"):
                yield f"as {dtype}", operand.astype(dtype)
    if operand.dtype.kind in "iu" and operand.size:
        bounds = np.iinfo(operand.dtype)
        for value in WHOLE:
            if bounds.min <= value <= bounds.max:
                last = operand.copy()
                last.ravel()[-1] = value
                last = last if last.ndim else np.asarray(value, operand.dtype)
                yield f"that ends with {value}", last
                yield f"of {value} everywhere", np.full_like(operand, value)
    elif operand.dtype.kind == "f" and operand.size:
        for real in REAL:
            with np.errstate(over="ignore"):
                yield f"of {real} everywhere", np.full_like(operand, real)
