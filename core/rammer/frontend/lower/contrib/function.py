"""Operators as functions over ONNX's: the body of one use, written for its types, shapes and attributes.

Expanding comes before inference and lowering (``frontend.bind.binder``), so no device knows of such an operator, and what its
body makes is folded, fused and scheduled as if the model had been exported so.
"""

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

#: The opset of bodies, and the domain of operators that only bodies hold.
OPSET, INTERNAL_DOMAIN = 23, "rammer"

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: A value of a body: the name of a tensor, or a number to make a constant of, in the type of the operand beside it.
Operand: TypeAlias = "str | int | float"


class Declined(Exception):
    """This use has no body; the message says why."""


@dataclass
class FunctionBody:
    """The body of one use, written operator by operator; ``b.Add(x, y)`` appends one and gives the name of its result. Names of
    results begin with ``prefix``, which tells those of a body inside from those around it."""

    use: Use
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    prefix: str = ""
    #: The version of ONNX's operators in this body.
    opset: int = OPSET

    def input(self, index: int) -> str:
        """Name of input ``index``, "" where it is left out."""
        return f"in{index}" if self.use.has(index) else ""

    def has(self, index: int) -> bool:
        """Whether optional input ``index`` is given."""
        return self.use.has(index)

    def wants(self, index: int) -> bool:
        """Whether output ``index`` is asked for."""
        return index < len(self.use.wanted) and bool(self.use.wanted[index])

    def shape(self, index: int = 0, rank: int | None = None) -> tuple[int, ...]:
        """Shape of an input. Declined where it has not ``rank`` axes."""
        shape = self.use.shape(index)
        if rank is not None and len(shape) != rank:
            raise Declined(f"input {index} has the shape {list(shape)}, where it needs {rank} axes")
        return shape

    def dtype(self, index: int = 0) -> str:
        """Element type of an input."""
        return self.use.dtype(index)

    def attr(self, name: str) -> Any:
        """An attribute; its default, or () for a list, where it is left out."""
        return self.use.attr(name, ())

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Append an operator; names of its results. Inputs at the end may be left out as ``""``."""
        name = f"{self.prefix}v{len(self.nodes)}"
        made = [f"{name}_{i}" if outputs > 1 else name for i in range(outputs)]
        last = max((i for i, name in enumerate(inputs) if name), default=-1)
        self.nodes.append(helper.make_node(kind, list(inputs[: last + 1]), made, **attributes))
        return made

    def __getattr__(self, kind: str) -> Callable[..., str]:
        """``b.Add(x, y, axis=1)``: an operator with one result."""
        if not kind[0].isupper():
            raise AttributeError(kind)
        return lambda *inputs, **attributes: self.op(kind, *inputs, **attributes)[0]

    def constant(self, value: Any, dtype: str = "int64") -> str:
        """A constant: an array as it is, numbers in ``dtype``. Declined where one does not fit, which attributes may have."""
        try:
            array = value if isinstance(value, np.ndarray) else np.array(value, dtype)
        except OverflowError:
            raise Declined(f"{value} does not fit into {dtype}") from None
        name = f"{self.prefix}k{len(self.constants)}"
        self.constants[name] = array
        return name

    def number(self, value: float, like: int = 0) -> str:
        """A number in the element type of input ``like``."""
        return self.constant(np.array(value, helper.tensor_dtype_to_np_dtype(CODES[self.dtype(like)])))

    def cast(self, x: str, dtype: str) -> str:
        """``x`` in another element type, by NumPy's name."""
        return self.Cast(x, to=CODES[dtype])

    def reshape(self, x: str, *shape: int) -> str:
        """``x`` in another shape; extents of 0 are none."""
        return self.Reshape(x, self.constant(list(shape)), allowzero=1)

    def slice(self, x: str, axis: int, start: int, stop: int) -> str:
        """Elements ``start`` to ``stop`` along an axis."""
        return self.Slice(x, self.constant([start]), self.constant([stop]), self.constant([axis]))

    def split(self, x: str, axis: int, parts: Sequence[int]) -> list[str]:
        """Parts of ``x`` along an axis."""
        return self.op("Split", x, self.constant(list(parts)), outputs=len(parts), axis=axis)

    def known(self, index: int) -> Array | None:
        """Elements of an input, None where they are run-time data."""
        return self.use.value(index)


Writer: TypeAlias = "Callable[[FunctionBody], str | Sequence[str]]"


@dataclass(frozen=True)
class OperatorFunction:
    """What writes the bodies of an operator; where ``hosted``, a use that has none runs on the host."""

    write: Writer
    hosted: bool = False
    #: Places of operands that decide shapes: bodies are written for their values.
    deciding: tuple[int, ...] = ()
    #: What ONNX Runtime does otherwise, where its results are others.
    departs: str = ""


#: (domain, operator) -> function.
FUNCTIONS: Final = dict[tuple[str, str], OperatorFunction]()
#: Element type, by NumPy's name -> ONNX's number.
CODES: Final[Mapping[str, int]] = {
    nd.element_type(code): code
    for code in TensorProto.DataType.values()
    if code not in (TensorProto.UNDEFINED, TensorProto.STRING)
}


def contrib_function(
    op: str, signature: str, *, hosted: bool = False, deciding: tuple[int, ...] = (), departs: str = "", **attributes: Any
) -> Callable[[Writer], Writer]:
    """Decorator: define an operator of ONNX Runtime's by a function that writes its bodies and gives the names of its results.
    ``signature`` and ``attributes`` are those of ``schemas.add_schema``, the others those of ``OperatorFunction``."""

    def register(write: Writer) -> Writer:
        add_schema(MICROSOFT, op, signature, attributes)
        FUNCTIONS[MICROSOFT, op] = OperatorFunction(write, hosted, deciding=deciding, departs=departs)
        return write

    return register


def list_departures(model: ModelProto) -> list[str]:
    """What ONNX Runtime does otherwise in this model's operators: a line each."""
    found = {n.op_type: f.departs for n in model.graph.node if (f := FUNCTIONS.get((n.domain, n.op_type))) and f.departs}
    return [f"ONNX Runtime's {op} {departs}" for op, departs in found.items()]


def expand_use(
    proto: NodeProto, version: int, types: Sequence[TensorType | None], values: Sequence[Array | None]
) -> Expansion | None:
    """What to run instead of ``proto``, whose operands have these types, and values where they are known; None for an operator
    that is no function here, and for a use that the host runs. BadInput for one that nothing runs."""
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
        hint = "docs/models.md has what is declined: export the model without it"
        raise BadInput(f"{proto.op_type}: {reason}", nd.node_title(proto), hint) from None
    outputs = [results] if isinstance(results, str) else list(results)
    for i, name in enumerate(proto.output):
        if name and not (i < len(outputs) and outputs[i]):
            raise BadInput(f"{proto.op_type} does not compute its output {i} here", nd.node_title(proto), "leave it out")
    inputs = tuple(f"in{i}" for i in range(len(proto.input)))
    # ``Identity`` lets a result be an operand or a constant.
    same = [helper.make_node("Identity", [name], [f"out{i}"]) for i, name in enumerate(outputs) if name]
    outs = tuple(f"out{i}" if name else "" for i, name in enumerate(outputs))
    opsets = {domain: version, "": body.opset, INTERNAL_DOMAIN: 1}
    return Expansion((*body.nodes, *same), inputs, outs, opsets, body.constants)


def attributes_with_defaults(proto: NodeProto, version: int) -> dict[str, Any]:
    """The attributes of a node as Python values, those that have a default and are left out included."""
    given = {a.name: nd.attribute_value(a) for a in proto.attribute}
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    declared = get_schema(proto.op_type, version, domain).attributes
    for name, schema in declared.items():
        if name not in given and schema.default_value.type != AttributeProto.UNDEFINED:
            given[name] = nd.attribute_value(schema.default_value)
    return given
