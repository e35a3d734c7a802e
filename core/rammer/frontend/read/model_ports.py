"""Inputs and outputs of a model: their types and shapes, as declared and, for outputs, as ONNX infers them."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import ModelProto, TensorShapeProto, TypeProto, ValueInfoProto, shape_inference

from rammer.frontend.read import limits, model_checks
from rammer.frontend.read.node_protos import element_type
from rammer.frontend.read.onnx_inference_guards import declare_types, hide_indices
from rammer.frontend.read.strip_weights import detach_tensors
from rammer.ir.port import MAP, OPTIONAL, SEQUENCE, ModelPort, onnx_element


def input_ports(proto: ModelProto) -> tuple[ModelPort, ...]:
    """Return the inputs without initialisers, which are constants. Up to IR version 3 initialisers are also listed as inputs."""
    graph = proto.graph
    constants = {t.name for t in graph.initializer}
    return tuple(_to_port("input", v) for v in graph.input if v.name not in constants)


def output_ports(proto: ModelProto) -> tuple[ModelPort, ...]:
    """Return the outputs. ONNX's inference completes missing types and extents, unless the model has sub-graphs: their inference
    may abort the process. An output without a type has the element type ""."""
    declared = {v.name: v for v in proto.graph.output}
    symbols = {d for v in (*proto.graph.input, *proto.graph.output) for d in _extents(v.type) if isinstance(d, str)}
    if not all(map(_is_static, declared.values())) and len(list(model_checks.all_graphs(proto))) == 1:
        declared |= _inferred_outputs(proto)
    ports = []
    for value in proto.graph.output:
        port = _to_port("output", declared[value.name])
        dims = tuple(d if isinstance(d, int) or d in symbols else None for d in port.shape)
        ports.append(ModelPort(port.name, port.dtype, dims, port.ranked, port.container))
    return tuple(ports)


def _inferred_outputs(proto: ModelProto) -> dict[str, ValueInfoProto]:
    """Return the outputs as ONNX infers them, by name; {} if inference fails."""
    outline, _ = detach_tensors(proto)
    hide_indices(outline)
    declare_types(model_checks.all_graphs(outline))
    try:
        found = shape_inference.infer_shapes(outline, data_prop=True)
    except Exception:  # a fault of the model, which compiling reports
        return {}
    # Binding reports an inferred shape beyond the limits with its operator.
    return {v.name: v for v in found.graph.output if limits.is_allowed_shape(d.dim_value for d in v.type.tensor_type.shape.dim)}


def _is_static(value: ValueInfoProto) -> bool:
    kind = value.type.tensor_type
    return value.type.WhichOneof("value") not in (None, "tensor_type") or (
        kind.HasField("shape") and all(isinstance(d, int) for d in _extents(value.type))
    )


def _extents(kind: TypeProto) -> Iterable[int | str | None]:
    return map(_parse_extent, kind.tensor_type.shape.dim)


def _to_port(what: str, value: ValueInfoProto) -> ModelPort:
    tensor = value.type.tensor_type
    if what == "output" and (value.type.WhichOneof("value") is None or (_is_tensor(value.type) and not tensor.elem_type)):
        return ModelPort(value.name, "", (), ranked=False)
    dtype = model_checks.check_port_type(what, value.name, value.type)
    if dtype in (SEQUENCE, OPTIONAL, MAP):
        return ModelPort(value.name, dtype, (), container=_type_text(value.type))
    if not tensor.HasField("shape"):
        return ModelPort(value.name, dtype, (), ranked=False)
    limits.check_shape((max(0, d.dim_value) for d in tensor.shape.dim), f"{what} {value.name}")
    return ModelPort(value.name, dtype, tuple(_extents(value.type)))


def _is_tensor(kind: TypeProto) -> bool:
    return bool(kind.WhichOneof("value") == "tensor_type")


def _type_text(kind: TypeProto) -> str:
    """Return ONNX's text of a type, for example ``seq(map(int64,tensor(float)))``."""
    match kind.WhichOneof("value"):
        case "sequence_type":
            return f"seq({_type_text(kind.sequence_type.elem_type)})"
        case "optional_type":
            return f"optional({_type_text(kind.optional_type.elem_type)})"
        case "map_type":
            return f"map({onnx_element(element_type(kind.map_type.key_type))},{_type_text(kind.map_type.value_type)})"
    return f"tensor({onnx_element(element_type(kind.tensor_type.elem_type))})"


def _parse_extent(dim: TensorShapeProto.Dimension) -> int | str | None:
    if dim.WhichOneof("value") == "dim_value":
        # Old exporters write -1 for "any extent". An extent of 0 is valid, as in ONNX Runtime.
        return dim.dim_value if dim.dim_value >= 0 else None
    # "?" and similar names mean "any extent", independent at each use.
    return dim.dim_param if any(c.isalnum() for c in dim.dim_param) else None
