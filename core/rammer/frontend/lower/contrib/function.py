"""Operators as functions over ONNX's operators: a body is written for the types, shapes and attributes of each use.

Expansion precedes inference and lowering (``frontend.bind.binder``). Devices never see these operators, and their bodies are
folded, fused and scheduled like the rest of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper

from rammer.errors import BadInput
from rammer.frontend.read import node_protos as nd
from rammer.frontend.read.function_bodies import Expansion
from rammer.frontend.read.schemas import MICROSOFT, add_schema, get_schema
from rammer.ir.operator_use import Use
from rammer.ir.types import TensorType

#: The opset of bodies, and the domain of operators that occur only in bodies.
OPSET, INTERNAL_DOMAIN = 23, "rammer"

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: A value of a body: a tensor name, or a number that becomes a constant of the type of the adjacent operand.
Operand: TypeAlias = "str | int | float"


class Declined(Exception):
    """This use has no body; the message gives the reason."""


@dataclass
class FunctionBody:
    """The body of one use, written operator by operator: ``b.Add(x, y)`` appends an operator and returns its result's name. Names
    of results begin with ``prefix``, which separates nested bodies from the bodies around them."""

    use: Use
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    prefix: str = ""
    #: The version of ONNX's operators in this body.
    opset: int = OPSET

    def input(self, index: int) -> str:
        """Return the name of input ``index``, or "" if it is absent."""
        return f"in{index}" if self.use.has(index) else ""

    def has(self, index: int) -> bool:
        """Return True if optional input ``index`` is present."""
        return self.use.has(index)

    def wants(self, index: int) -> bool:
        """Return True if output ``index`` is used."""
        return index < len(self.use.wanted) and bool(self.use.wanted[index])

    def shape(self, index: int = 0, rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of an input. Raise Declined if it does not have ``rank`` axes."""
        shape = self.use.shape(index)
        if rank is not None and len(shape) != rank:
            raise Declined(f"input {index} has the shape {list(shape)}, where it needs {rank} axes")
        return shape

    def dtype(self, index: int = 0) -> str:
        """Return the element type of an input."""
        return self.use.dtype(index)

    def attr(self, name: str) -> Any:
        """Return an attribute, or its default (() for a list) if it is absent."""
        return self.use.attr(name, ())

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Append an operator and return the names of its results. Trailing inputs may be omitted as ``""``."""
        name = f"{self.prefix}v{len(self.nodes)}"
        made = [f"{name}_{i}" if outputs > 1 else name for i in range(outputs)]
        last = max((i for i, name in enumerate(inputs) if name), default=-1)
        self.nodes.append(helper.make_node(kind, list(inputs[: last + 1]), made, **attributes))
        return made

    def __getattr__(self, kind: str) -> Callable[..., str]:
        """Return a function that appends an operator with one result: ``b.Add(x, y, axis=1)``."""
        if not kind[0].isupper():
            raise AttributeError(kind)
        return lambda *inputs, **attributes: self.op(kind, *inputs, **attributes)[0]

    def constant(self, value: Any, dtype: str = "int64") -> str:
        """Add a constant: an array unchanged, or numbers in ``dtype``. Raise Declined if a number does not fit."""
        try:
            array = value if isinstance(value, np.ndarray) else np.array(value, dtype)
        except OverflowError:
            raise Declined(f"{value} does not fit into {dtype}") from None
        name = f"{self.prefix}k{len(self.constants)}"
        self.constants[name] = array
        return name

    def number(self, value: float, like: int = 0) -> str:
        """Add a number as a constant in the element type of input ``like``."""
        return self.constant(np.array(value, helper.tensor_dtype_to_np_dtype(CODES[self.dtype(like)])))

    def cast(self, x: str, dtype: str) -> str:
        """Return ``x`` converted to another element type (NumPy's name)."""
        return self.Cast(x, to=CODES[dtype])

    def reshape(self, x: str, *shape: int) -> str:
        """Return ``x`` in another shape; an extent of 0 means zero elements."""
        return self.Reshape(x, self.constant(list(shape)), allowzero=1)

    def slice(self, x: str, axis: int, start: int, stop: int) -> str:
        """Return the elements ``start`` to ``stop`` of ``x`` along an axis."""
        return self.Slice(x, self.constant([start]), self.constant([stop]), self.constant([axis]))

    def split(self, x: str, axis: int, parts: Sequence[int]) -> list[str]:
        """Split ``x`` into parts along an axis."""
        return self.op("Split", x, self.constant(list(parts)), outputs=len(parts), axis=axis)

    def known(self, index: int) -> Array | None:
        """Return the elements of an input, or None if it is run-time data."""
        return self.use.value(index)


Writer: TypeAlias = "Callable[[FunctionBody], str | Sequence[str]]"


@dataclass(frozen=True)
class OperatorFunction:
    """The writer of an operator's bodies. If ``hosted``, a use without a body runs on the host."""

    write: Writer
    hosted: bool = False
    #: Indices of operands that decide shapes; bodies are written for their values.
    deciding: tuple[int, ...] = ()
    #: Difference from ONNX Runtime, if its results differ.
    departs: str = ""


#: (domain, operator) -> function.
FUNCTIONS: Final = dict[tuple[str, str], OperatorFunction]()
#: Element type (NumPy's name) -> ONNX's number.
CODES: Final[Mapping[str, int]] = {
    nd.element_type(code): code
    for code in TensorProto.DataType.values()
    if code not in (TensorProto.UNDEFINED, TensorProto.STRING)
}


def contrib_function(
    op: str, signature: str, *, hosted: bool = False, deciding: tuple[int, ...] = (), departs: str = "", **attributes: Any
) -> Callable[[Writer], Writer]:
    """Decorate a function that writes the bodies of an ONNX Runtime operator and returns the names of its results. ``signature``
    and ``attributes`` are those of ``schemas.add_schema``; the others are fields of ``OperatorFunction``."""

    def register(write: Writer) -> Writer:
        add_schema(MICROSOFT, op, signature, attributes)
        FUNCTIONS[MICROSOFT, op] = OperatorFunction(write, hosted, deciding=deciding, departs=departs)
        return write

    return register


def standard_function(op: str, hosted: bool = True) -> Callable[[Writer], Writer]:
    """Decorate a function that writes the bodies of an operator of ``ai.onnx.ml``. ONNX has its schema. A use without a body
    raises BadInput if the operator is not ``hosted``."""

    def register(write: Writer) -> Writer:
        FUNCTIONS["ai.onnx.ml", op] = OperatorFunction(write, hosted)
        return write

    return register


def list_departures(model: ModelProto) -> list[str]:
    """Return one line per operator of this model whose results differ from ONNX Runtime's."""
    found = {n.op_type: f.departs for n in model.graph.node if (f := FUNCTIONS.get((n.domain, n.op_type))) and f.departs}
    return [f"ONNX Runtime's {op} {departs}" for op, departs in found.items()]


def expand_use(
    proto: NodeProto, version: int, types: Sequence[TensorType | None], values: Sequence[Array | None]
) -> Expansion | None:
    """Return the expansion of ``proto`` for these operand types and constant values. Return None for an operator that is not a
    function here, and for a use that the host runs. Raise BadInput for a use that is unsupported everywhere."""
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    found = FUNCTIONS.get((domain, proto.op_type))
    if found is None:
        return None
    attributes = attributes_with_defaults(proto, version)
    body = FunctionBody(Use(proto.op_type, version, attributes, types, [bool(o) for o in proto.output], values))
    try:
        results = found.write(body)
    except Declined as reason:
        if found.hosted:
            return None
        hint = "docs/models.md lists the unsupported cases: export the model without them"
        raise BadInput(f"{proto.op_type}: {reason}", nd.node_title(proto), hint) from None
    outputs = [results] if isinstance(results, str) else list(results)
    for i, name in enumerate(proto.output):
        if name and not (i < len(outputs) and outputs[i]):
            raise BadInput(f"{proto.op_type} does not compute its output {i} here", nd.node_title(proto), "leave it out")
    inputs = tuple(f"in{i}" for i in range(len(proto.input)))
    # ``Identity`` allows a result to be an operand or a constant.
    same = [helper.make_node("Identity", [name], [f"out{i}"]) for i, name in enumerate(outputs) if name]
    outs = tuple(f"out{i}" if name else "" for i, name in enumerate(outputs))
    opsets = {domain: version, "": body.opset, INTERNAL_DOMAIN: 1}
    return Expansion((*body.nodes, *same), inputs, outs, opsets, body.constants)


def attributes_with_defaults(proto: NodeProto, version: int) -> dict[str, Any]:
    """Return the attributes of a node as Python values, with defaults for absent ones."""
    given = {a.name: nd.attribute_value(a) for a in proto.attribute}
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    declared = get_schema(proto.op_type, version, domain).attributes
    for name, schema in declared.items():
        if name not in given and schema.default_value.type != AttributeProto.UNDEFINED:
            given[name] = nd.attribute_value(schema.default_value)
    return given
