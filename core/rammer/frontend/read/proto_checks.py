"""Checks of a model file's tensors and operators, before any code reads their values or infers types from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, Final

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, defs, helper

from rammer.errors import BadInput
from rammer.frontend.read import limits, schemas
from rammer.frontend.read.attribute_rules import attribute_problems
from rammer.frontend.read.node_protos import node_title

#: No values outside the protobuf.
NONE: Final[Mapping[str, int]] = MappingProxyType({})
_EXPORT = "export the model again, and check it with onnx.checker"
#: Fields that can store a tensor's values, besides raw bytes and external files.
_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
#: Bits of sub-byte element types that the installed ONNX supports. Raw bytes are packed densely, across byte boundaries. Each
#: entry of ``int32_data`` holds as many elements as fit whole in a byte.
BITS = {
    TensorProto.DataType.Value(name): bits
    for name, bits in {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}.items()
    if name in dict(TensorProto.DataType.items())
}
#: Operators that would run a pattern from the model: a short pattern may never terminate.
_PATTERNS = frozenset({"RegexFullMatch"})


def check_strings(message: Any, where: str) -> None:
    """Raise BadInput unless every string is UTF-8: protobuf returns other strings as bytes, which no code expects."""
    strings, lists, messages = _message_fields(message.DESCRIPTOR)
    for name in strings:
        _check_text(getattr(message, name), name, where)
    for name in lists:
        for text in getattr(message, name):
            _check_text(text, name, where)
    for name, repeated in messages:
        for inner in getattr(message, name) if repeated else (getattr(message, name),) if message.HasField(name) else ():
            check_strings(inner, where)


def _check_text(text: str | bytes, field: str, where: str) -> None:
    if isinstance(text, bytes):
        raise BadInput(f"the text {text[:40]!r} of a field {field} is not UTF-8", where, _EXPORT)


@cache
def _message_fields(kind: Any) -> tuple[list[str], list[str], list[tuple[str, bool]]]:
    """Return the string fields, repeated string fields and message fields (name, repeated) of a message type."""
    texts = [f for f in kind.fields if f.cpp_type == f.CPPTYPE_STRING and f.type == f.TYPE_STRING]
    return (
        [f.name for f in texts if not _is_repeated(f)],
        [f.name for f in texts if _is_repeated(f)],
        [(f.name, _is_repeated(f)) for f in kind.fields if f.cpp_type == f.CPPTYPE_MESSAGE],
    )


def _is_repeated(field: Any) -> bool:
    # Protobuf 6.31 added the property, and later versions drop the label.
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def check_tensors(model: ModelProto, graphs: list[GraphProto], external_bytes: Mapping[str, int] = NONE) -> None:
    """Raise BadInput for the first tensor with inconsistent element type, shape and data. ``external_bytes`` maps initialisers
    of the main graph to their bytes outside the protobuf."""
    for graph in graphs:
        for tensor in graph.initializer:
            check_tensor(tensor, f"initializer {tensor.name!r}", external_bytes.get(tensor.name, 0) if graph is graphs[0] else 0)
        for sparse in graph.sparse_initializer:
            _check_sparse(sparse, f"initializer {sparse.values.name!r}")
    for node in (*(n for g in graphs for n in g.node), *(n for f in model.functions for n in f.node)):
        for attribute in node.attribute:
            where = f"attribute {attribute.name} of {node_title(node)}"
            for tensor in (*([attribute.t] if attribute.HasField("t") else ()), *attribute.tensors):
                check_tensor(tensor, where)
            for sparse in (
                *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else ()),
                *attribute.sparse_tensors,
            ):
                _check_sparse(sparse, where)


def check_tensor(tensor: TensorProto, where: str, external_bytes: int = 0) -> None:
    """Raise BadInput unless the data match the tensor's shape and type. ``external_bytes`` counts the bytes outside the
    protobuf."""
    kind = tensor.data_type
    if kind not in TensorProto.DataType.values() or kind == TensorProto.UNDEFINED:
        raise BadInput(f"a tensor has the element type {kind}, which ONNX does not define", where, _EXPORT)
    limits.check_shape(tuple(tensor.dims), where)
    if tensor.HasField("segment"):
        raise BadInput("a tensor is stored in segments, which is not supported", where, "export the model in one piece")
    count = math.prod(tensor.dims)
    stored = [f for f in ("raw_data", *_FIELDS) if len(getattr(tensor, f)) or (external_bytes and f == "raw_data")]
    if len(stored) > 1:
        raise BadInput(f"a tensor has its data twice, in {' and '.join(stored)}", where, _EXPORT)
    if tensor.data_location == TensorProto.EXTERNAL and not stored:
        return  # not loaded yet, or empty
    if not stored:
        have, want, unit = 0, count, "elements"
    elif stored[0] == "raw_data":
        return check_stored_bytes(tensor, external_bytes or len(tensor.raw_data), where)
    else:
        field = helper.tensor_dtype_to_field(kind)
        if stored[0] != field:
            raise BadInput(f"a tensor of type {kind} has its data in {stored[0]}, not in {field}", where, _EXPORT)
        parts = 2 if kind in (TensorProto.COMPLEX64, TensorProto.COMPLEX128) else 1
        have, want, unit = len(getattr(tensor, field)), -(-count * parts // (8 // BITS.get(kind, 8))), "entries"
    if have != want:
        what = f"a tensor of shape {list(tensor.dims)} has {have} {unit} of data, where it needs {want}"
        raise BadInput(what, where, _EXPORT)


def check_stored_bytes(tensor: TensorProto, have: int, where: str) -> None:
    """Raise BadInput unless the tensor needs exactly ``have`` bytes, in the model file or in an external file."""
    kind = tensor.data_type
    if kind == TensorProto.STRING:
        raise BadInput("a tensor of strings is stored as bytes", where, _EXPORT)
    if kind not in TensorProto.DataType.values() or kind == TensorProto.UNDEFINED:
        raise BadInput(f"a tensor has the element type {kind}, which ONNX does not define", where, _EXPORT)
    bits = BITS.get(kind, 8 * helper.tensor_dtype_to_np_dtype(kind).itemsize)
    want = -(-math.prod(tensor.dims) * bits // 8)
    if have != want:
        raise BadInput(f"a tensor of shape {list(tensor.dims)} has {have} bytes of data, where it needs {want}", where, _EXPORT)


def _check_sparse(sparse: SparseTensorProto, where: str) -> None:
    check_tensor(sparse.values, where)
    check_tensor(sparse.indices, where)
    limits.check_shape(tuple(sparse.dims), where)
    count = math.prod(sparse.values.dims)
    forms = ([count], [count, len(sparse.dims)])
    if len(sparse.values.dims) != 1 or list(sparse.indices.dims) not in forms or sparse.indices.data_type != TensorProto.INT64:
        raise BadInput("a sparse tensor needs a row of values and as many int64 indices", where, _EXPORT)
    limits.check_folded(math.prod(sparse.dims) * 8, where)


def check_names(graphs: list[GraphProto]) -> None:
    """Raise BadInput unless all inputs, initializers and outputs are named and declared once, with one element type."""
    for graph in graphs:
        _check_names(graph)


def _check_names(graph: GraphProto) -> None:
    """Check that every input and initializer is named and declared once; an initializer may also be listed as an input."""
    types = {v.name: v.type.tensor_type.elem_type for v in graph.input if v.type.HasField("tensor_type")}
    sparse = [s.values for s in graph.sparse_initializer]
    for kind, names in (
        ("input", [v.name for v in graph.input]),
        ("initializer", [t.name for t in (*graph.initializer, *sparse)]),
        ("output", [v.name for v in graph.output]),
    ):
        for name, times in Counter(names).items():
            if not name:
                raise BadInput(f"an {kind} has no name", f"graph {graph.name}", _EXPORT)
            if times > 1:
                raise BadInput(f"{kind} {name!r} is declared {times} times", f"graph {graph.name}", _EXPORT)
    for value in (*graph.input, *graph.value_info):
        # Inner graphs may omit the types of their inputs, but may not declare an empty type.
        kind = value.type.WhichOneof("value")
        if value.HasField("type") and kind is None:
            raise BadInput(f"value {value.name!r} has an empty type", f"graph {graph.name}", _EXPORT)
    for tensor in (*graph.initializer, *sparse):
        if types.get(tensor.name, tensor.data_type) not in (tensor.data_type, TensorProto.UNDEFINED):
            raise BadInput(
                f"initializer {tensor.name!r} has another element type than the input of its name", f"graph {graph.name}", _EXPORT
            )


# Operators -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _find_schema(op: str, version: int, domain: str) -> defs.OpSchema:
    return schemas.get_schema(op, version, domain)


def check_node(node: NodeProto, domain: str, version: int, inside: bool = False) -> None:
    """Raise BadInput unless number, kinds and values of inputs, outputs and attributes match ONNX's definition. With ``inside``,
    the node is in a function body, and its attributes may refer to the function's."""
    schema = _find_schema(node.op_type, version, domain)
    if node.op_type in _PATTERNS and not domain:
        raise BadInput(
            f"{node.op_type} is not supported: a pattern may take forever", node_title(node), "compute it before the model runs"
        )
    for what, names, low, high in (
        ("inputs", node.input, schema.min_input, schema.max_input),
        ("outputs", node.output, schema.min_output, schema.max_output),
    ):
        if not low <= len(names) <= high:
            wanted = f"{low}" if low == high else f"{low} to {high}" if high < 1 << 20 else f"at least {low}"
            raise BadInput(f"{node.op_type} has {len(names)} {what}, where it needs {wanted}", node_title(node), _EXPORT)
    for formal, name in zip(schema.inputs, node.input, strict=False):
        if not name and formal.option == defs.OpSchema.FormalParameterOption.Single:
            raise BadInput(f"{node.op_type} is not given its input {formal.name!r}", node_title(node), _EXPORT)
    for problem in (*_attribute_problems(node, schema), *attribute_problems(node, inside)):
        raise BadInput(problem, node_title(node), _EXPORT)


def _attribute_problems(node: NodeProto, schema: defs.OpSchema) -> Iterator[str]:
    known, op = schema.attributes, node.op_type
    given = Counter(a.name for a in node.attribute)
    for attribute in node.attribute:
        declared = known.get(attribute.name)
        if declared is None:
            yield f"{op} of opset {schema.since_version} has no attribute {attribute.name!r}"
        elif attribute.type != int(declared.type.value):
            yield (
                f"attribute {attribute.name} of {op} is {_attribute_kind(attribute.type)}, where ONNX wants "
                f"{_attribute_kind(int(declared.type.value))}"
            )
        elif given[attribute.name] > 1:
            yield f"{op} has the attribute {attribute.name} {given[attribute.name]} times"
    for name, declared in known.items():
        if declared.required and not given[name]:
            yield f"{op} lacks the attribute {name}"


def _attribute_kind(code: int) -> str:
    known = code in AttributeProto.AttributeType.values()
    return AttributeProto.AttributeType.Name(code) if known else f"of an unknown kind ({code})"
