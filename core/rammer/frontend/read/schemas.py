"""Operator schemas by name, version and domain: ONNX's, and those of the functions of ``frontend.lower.contrib``. ONNX has one
table per process, which its checker applies to the models of others too. Our schemas are therefore stored separately."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from onnx import AttributeProto, defs, helper
from onnx.defs import OpSchema

#: The domain of the operators of ONNX Runtime's optimiser, quantiser and model builder.
MICROSOFT: Final = "com.microsoft"

_FLOATS = ("float16", "float", "double", "bfloat16")
_ALL = (*_FLOATS, *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "bool")
#: First letter of a type in a signature -> allowed types. Operands with the same letter and number share one type.
_SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "T": _FLOATS,
    "F": ("float",),
    "Q": ("uint8", "int8"),
    "P": ("uint8", "int8", "uint16", "int16", "uint4", "int4", "int32"),
    "W": ("uint8", "uint4", "int4", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz", "float4e2m1"),
    "U": ("uint8",),
    "S": _FLOATS,
    "X": ("float", "float16", "double", "bfloat16", "uint8", "int8"),
    "I": ("int32", "int64"),
    "M": ("int32",),
    "L": ("int64",),
    "B": ("bool",),
    "A": _ALL,
    "Z": (*_ALL, "string"),
    "Y": ("uint32", "int32", "uint64", "int64", "float", "double", "string"),
    "N": ("uint32", "int32"),
    "H": ("uint16", "int16"),
}
#: Kinds of required attributes, and of optional attributes without a default.
_REQUIRED: Final[Mapping[Any, int]] = {
    int: AttributeProto.INT, float: AttributeProto.FLOAT, str: AttributeProto.STRING, tuple[int, ...]: AttributeProto.INTS,
}  # fmt: skip
_OPTIONAL: Final[Mapping[Any, int]] = {
    list[int]: AttributeProto.INTS, list[float]: AttributeProto.FLOATS, list[str]: AttributeProto.STRINGS,
    str | None: AttributeProto.STRING, int | None: AttributeProto.INT, float | None: AttributeProto.FLOAT,
}  # fmt: skip
_OWN: Final = dict[tuple[str, str], OpSchema]()


def has_schema(op: str, version: int, domain: str) -> bool:
    """Return True if the domain has the operator at this version."""
    return (domain, op) in _OWN or (version < 1 << 31 and bool(defs.has(op, version, domain)))


def get_schema(op: str, version: int, domain: str) -> OpSchema:
    """Return the newest schema up to ``version``. Raises ONNX's error if the operator is undefined."""
    return _OWN.get((domain, op)) or defs.get_schema(op, version, domain)


def is_own(op: str, domain: str) -> bool:
    """Return True if this module, not ONNX, defines the operator."""
    return (domain, op) in _OWN


def own_operators() -> Iterator[tuple[str, str]]:
    """Yield domain and name of each operator that this module defines."""
    yield from _OWN


def add_schema(domain: str, op: str, signature: str, attributes: Mapping[str, Any]) -> None:
    """Define an operator.

    ``signature`` has the form ``"A: T, B?: T, more*: X -> Y: T, Z?: T"``: ``?`` marks an optional operand, ``*`` a variadic one.
    ``attributes`` maps each name to its default or its type. Required attributes have int, float or str; optional ones have a
    list type (``list[int]``) or ``int | None``."""
    inputs, outputs = ([_parse_formal(part) for part in side.split(",") if part.strip()] for side in signature.split("->"))
    letters = sorted({p.type_str for p in (*inputs, *outputs)})
    constraints = [(v, [f"tensor({k})" for k in _SETS[v[0]]], "") for v in letters]
    declared = [_make_attribute(name, value) for name, value in attributes.items()]
    ports = {"inputs": inputs, "outputs": outputs, "type_constraints": constraints}
    _OWN[domain, op] = OpSchema(op, domain, 1, **ports, attributes=declared)


def _parse_formal(text: str) -> OpSchema.FormalParameter:
    name, _, kind = (part.strip() for part in text.partition(":"))
    options = OpSchema.FormalParameterOption
    option = options.Optional if name.endswith("?") else options.Variadic if name.endswith("*") else options.Single
    return OpSchema.FormalParameter(name.rstrip("?*"), kind, param_option=option, is_homogeneous=option != options.Variadic)


def _make_attribute(name: str, value: Any) -> OpSchema.Attribute:
    if isinstance(value, str | int | float) and not isinstance(value, type):
        return OpSchema.Attribute(name, helper.make_attribute(name, value))
    required = value in _REQUIRED
    return OpSchema.Attribute(name, OpSchema.AttrType(_REQUIRED[value] if required else _OPTIONAL[value]), required=required)
