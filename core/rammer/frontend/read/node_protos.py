"""Conversions between ONNX protobufs and ``Node``: attributes, element types, titles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TypeProto, helper, numpy_helper

from rammer.errors import BadInput
from rammer.frontend.op_traits import Trait, operators
from rammer.ir.graph import Node
from rammer.ir.names import quote_text, shorten_name
from rammer.ir.types import KNOWN, TensorType


@dataclass(frozen=True, slots=True)
class SubGraph:
    """A body of If, Loop or Scan: a serialised GraphProto.

    ``captures`` names the outer values that bodies read as the last ``len(captures)`` inputs; all bodies of a node share them.
    ``opsets`` lists the opset versions of the body by domain. ``formats`` lists the element types of inputs held in a carrier
    type (``frontend.lower.emulated_types``), "" for other inputs; () without carriers.
    """

    proto: bytes
    captures: tuple[str, ...] = ()
    opsets: tuple[tuple[str, int], ...] = ()
    formats: tuple[str, ...] = ()

    @property
    def graph(self) -> GraphProto:
        """The body as a protobuf."""
        return GraphProto.FromString(self.proto)

    def __str__(self) -> str:
        graph = self.graph
        return f"graph<{graph.name}, {len(graph.node)} nodes>"


def attribute_value(attribute: AttributeProto) -> Any:
    """Return an attribute as a Python scalar, string, tuple, ndarray or SubGraph.

    Raises ValueError for sparse tensors and types."""
    kind = attribute.type
    if kind == AttributeProto.TENSOR:
        return numpy_helper.to_array(attribute.t)
    if kind == AttributeProto.GRAPH:
        return SubGraph(attribute.g.SerializeToString())
    if kind == AttributeProto.STRING:
        return _decode_text(attribute.s)
    if kind == AttributeProto.STRINGS:
        return tuple(_decode_text(s) for s in attribute.strings)
    if kind == AttributeProto.TENSORS:
        return tuple(numpy_helper.to_array(t) for t in attribute.tensors)
    if kind in (AttributeProto.FLOAT, AttributeProto.INT):
        return helper.get_attribute_value(attribute)
    if kind in (AttributeProto.FLOATS, AttributeProto.INTS):
        return tuple(helper.get_attribute_value(attribute))
    raise ValueError(f"attribute {attribute.name} has the unsupported kind {AttributeProto.AttributeType.Name(kind)}")


def _decode_text(data: bytes) -> str:
    # Byte strings need not be UTF-8 in ONNX; surrogates keep them reversible.
    return data.decode("utf-8", "surrogateescape")


def attributes_of(
    proto: NodeProto, opsets: Mapping[str, int], free: Callable[[GraphProto], Sequence[str]]
) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the node's attributes as Python values, and the outer values (by ``free``) that its bodies capture."""
    captured = list(dict.fromkeys(n for a in proto.attribute if a.HasField("g") for n in free(a.g)))
    attributes: dict[str, Any] = {}
    for attribute in proto.attribute:
        if attribute.HasField("g"):
            data = attribute.g.SerializeToString()
            attributes[attribute.name] = SubGraph(data, tuple(captured), tuple(sorted(opsets.items())))
            continue
        try:
            attributes[attribute.name] = attribute_value(attribute)
        except ValueError as error:
            raise BadInput(str(error), node_title(proto), "export the model without it") from error
    return attributes, captured


def attribute_proto(name: str, value: Any) -> AttributeProto:
    """Convert a Python value to an attribute, the inverse of ``attribute_value``."""
    if isinstance(value, SubGraph):
        return helper.make_attribute(name, value.graph)
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, numpy_helper.from_array(value))
    if isinstance(value, str):
        return helper.make_attribute(name, value.encode("utf-8", "surrogateescape"))
    if isinstance(value, tuple):
        items = [numpy_helper.from_array(v) if isinstance(v, np.ndarray) else v for v in value]
        # An empty list has no element type; only lists of integers may be empty in practice.
        return helper.make_attribute(name, items, attr_type=None if items else AttributeProto.INTS)
    return helper.make_attribute(name, value)


def node_proto(node: Node) -> NodeProto:
    """Return ``node`` as a protobuf whose formal inputs and outputs have the names of the Graph."""
    formal = len(node.inputs) - len(captured_names(node))
    proto = NodeProto(op_type=node.bare, domain=node.domain, name=node.name)
    proto.input.extend(node.inputs[:formal])
    proto.output.extend(node.outputs)
    proto.attribute.extend(attribute_proto(k, v) for k, v in node.attributes.items())
    return proto


def captured_names(node: Node) -> tuple[str, ...]:
    """Return the outer names that the bodies of ``node`` read; () for an operator without bodies."""
    return next((body.captures for body in body_graphs(node)), ())


def carried_dtypes(node: Node) -> tuple[str, ...]:
    """Return the element types that the bodies of ``node`` use for inputs held in a carrier type; () without carriers."""
    return next((body.formats for body in body_graphs(node)), ())


def body_graphs(node: Node) -> list[SubGraph]:
    """Return the sub-graphs of ``node`` in attribute order."""
    return [v for v in node.attributes.values() if isinstance(v, SubGraph)]


def node_title(proto: NodeProto) -> str:
    """Return the title of a node in messages: its name, or else the values that it computes."""
    name = (
        quote_text(shorten_name(proto.name))
        if proto.name
        else f"computing {', '.join(o for o in proto.output if o) or 'nothing'}"
    )
    return f"node {name} ({proto.op_type})"


def tensor_type(proto: TypeProto) -> TensorType | None:
    """Return the static tensor type, or None for other kinds, unsupported element types and dynamic extents."""
    if proto.WhichOneof("value") != "tensor_type" or not proto.tensor_type.HasField("shape"):
        return None
    dtype = element_type(proto.tensor_type.elem_type)
    dims = proto.tensor_type.shape.dim
    if dtype not in KNOWN or any(d.WhichOneof("value") != "dim_value" or d.dim_value < 0 for d in dims):
        return None
    return TensorType(dtype, tuple(d.dim_value for d in dims))


@cache
def element_type(code: int) -> str:
    """Return the NumPy name of an ONNX element type (``float32``), or ONNX's lower-case name if NumPy lacks it."""
    if code == onnx.TensorProto.STRING:
        return "string"
    if code == onnx.TensorProto.UNDEFINED or code not in onnx.TensorProto.DataType.values():
        return "undefined"
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(code)))


def type_proto(dtype: np.dtype[Any], shape: Sequence[int]) -> TypeProto:
    """Return an ONNX tensor type."""
    return helper.make_tensor_type_proto(element_code(dtype), tuple(shape))


def value_type(value: Any) -> TypeProto:
    """Return the ONNX type of an array, a list (a sequence, of float32 if empty) or None (an empty optional)."""
    if value is None:
        return helper.make_optional_type_proto(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    if isinstance(value, list | tuple):
        inner = value_type(value[0]) if value else helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
        inner.tensor_type.ClearField("shape")
        return helper.make_sequence_type_proto(inner)
    array = np.asarray(value)
    return type_proto(array.dtype, array.shape)


def element_code(dtype: np.dtype[Any]) -> int:
    """Return ONNX's code of an element type; object and str arrays hold strings."""
    return int(onnx.TensorProto.STRING if dtype.kind in "OSU" else helper.np_dtype_to_tensor_dtype(dtype))


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def plain_node(proto: NodeProto, version: int) -> Node:
    """Convert a node without sub-graphs, preserving value names. Raises ValueError for an unsupported attribute."""
    attributes = {a.name: attribute_value(a) for a in proto.attribute}
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return Node(proto.op_type, tuple(proto.input), tuple(proto.output), attributes, proto.name, domain, version)


def is_decoding(node: NodeProto) -> bool:
    """Return True if the node decodes quantised values; its consumers decide whether weights stay quantised."""
    return node.op_type == "DequantizeLinear" and node.domain in ("", "ai.onnx")


def is_random(node: Node | NodeProto) -> bool:
    """Return True if two runs may differ: random operators, and Dropout that may train without a seed."""
    op, inputs = (node.op, node.inputs) if isinstance(node, Node) else (node.op_type, node.input)
    if op == "Dropout" and len(inputs) > 2 and inputs[2]:
        return "seed" not in (node.attributes if isinstance(node, Node) else {a.name for a in node.attribute})
    return op in operators(Trait.RANDOM)


def shape_or_size(proto: NodeProto, shape: tuple[int, ...]) -> np.ndarray:
    """Return the result of a Shape or Size node for an input of ``shape``."""
    if proto.op_type == "Size":
        return np.array(math.prod(shape), np.int64)
    ends = {a.name: a.i for a in proto.attribute}
    # Python's slices clamp like the start and end of Shape.
    return np.array(shape[ends.get("start", 0) : ends.get("end", len(shape))], np.int64)
