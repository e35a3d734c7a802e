"""Type inference of results where ONNX's inference deviates from the operators' specifications."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import NodeProto, OperatorSetIdProto, TensorProto, TypeProto, defs, helper, numpy_helper, shape_inference
from onnx.checker import ValidationError

from rammer.errors import BadInput
from rammer.frontend.loops.trip_count import counted_types
from rammer.frontend.lower.einsum_equations import parse_equation
from rammer.frontend.lower.window_extents import Extent, geometry_of, transposed_of
from rammer.frontend.op_traits import Trait, operators
from rammer.frontend.read import limits, onnx_inference_guards
from rammer.frontend.read import node_protos as nd
from rammer.ir.types import TensorType

#: Maximum elements of operand values for shape inference: it reads only shapes, axes and scales, which are short.
_MAX_INFERENCE_ELEMENTS: Final = 1024
#: Computes result shapes from attributes and the types of the operands (None for an absent one).
_Rule: TypeAlias = Callable[[str, Mapping[str, Any], Sequence[TensorType | None]], tuple[int, ...]]


def inferred_types(
    schema: defs.OpSchema,
    proto: NodeProto,
    types: Mapping[str, TypeProto],
    operands: Mapping[str, np.ndarray],
    opsets: Mapping[str, int],
) -> dict[str, TypeProto]:
    """Return the types of the node's outputs by name; those that cannot be inferred are missing or incomplete.

    ``types`` are those of its inputs, ``operands`` the inputs with constant values. Raises BadInput for operands that the
    operator does not accept."""
    if proto.op_type == "Range":
        # ONNX's function bodies of other operators (AffineGrid) pass it tensors of one element.
        operands = {n: a.reshape(()) if a.size == 1 else a for n, a in operands.items()}
        types = {n: nd.type_proto(operands[n].dtype, ()) if n in operands else t for n, t in types.items()}
    if proto.op_type == "STFT" and all(a.name != "onesided" for a in proto.attribute):
        # Inference ignores the default of 1.
        proto = NodeProto.FromString(proto.SerializeToString())
        proto.attribute.append(helper.make_attribute("onesided", 1))
    onnx_inference_guards.check_bodies(proto, types, opsets)
    result = _correct_types(
        proto, types, _infer_types(schema, onnx_inference_guards.with_declared_types(proto), types, operands, opsets)
    )
    if proto.op_type == "Loop" and proto.domain in ("", "ai.onnx"):
        result |= onnx_inference_guards.steady_types(proto, types, opsets)
        result |= counted_types(proto, result, operands)
    for kind in result.values():
        limits.check_shape((d.dim_value for d in kind.tensor_type.shape.dim), nd.node_title(proto))
    return result


def _infer_types(
    schema: defs.OpSchema,
    proto: NodeProto,
    types: Mapping[str, TypeProto],
    operands: Mapping[str, np.ndarray],
    opsets: Mapping[str, int],
) -> dict[str, TypeProto]:
    """Return the types of the node's outputs by name; those that ONNX cannot infer are missing or incomplete."""
    data: dict[str, TensorProto] = {
        n: numpy_helper.from_array(a) for n, a in operands.items() if a.size <= _MAX_INFERENCE_ELEMENTS and a.dtype.kind in "iufb"
    }
    imports = [OperatorSetIdProto(domain=d, version=v) for d, v in opsets.items()]
    inferred: dict[str, TypeProto]
    try:
        inferred = shape_inference.infer_node_outputs(schema, proto, dict(types), data, opset_imports=imports)
        return inferred
    except Exception as error:  # ONNX's two exception types, and all that its C++ throws: std::bad_alloc, std::out_of_range, ...
        # Types inside ONNX's function body may be inconsistent although the operator is valid.
        known = _untyped_body(proto) or all(n in operands for n in proto.input if n)
        if isinstance(error, ValidationError) and known:
            return {}
        shown = ", ".join(f"{n}: {nd.tensor_type(types[n])}" for n in proto.input if n)
        raise BadInput(
            f"{proto.op_type} does not accept its operands ({shown}): {nd.first_line(error)}",
            nd.node_title(proto),
            "check the input shapes given with --shape",
        ) from error


def _correct_types(proto: NodeProto, types: Mapping[str, TypeProto], inferred: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Return ``inferred`` with the shapes that this module corrects. Raises BadInput for an invalid window."""
    plain = proto.domain in ("", "ai.onnx")
    rule = RULES.get(proto.op_type if plain else f"{proto.domain}.{proto.op_type}")
    operands = [nd.tensor_type(types[n]) if n else None for n in proto.input]
    if rule is None or not operands or operands[0] is None:
        return dict(inferred)
    attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute if not a.HasField("g")}
    attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
    try:
        shape = rule(proto.op_type, attributes, operands)
    except BadInput as problem:
        raise BadInput(problem.what, nd.node_title(proto), problem.hint) from None
    result = dict(inferred)
    for name in filter(None, proto.output):
        known = inferred.get(name, types[proto.input[0]])
        result[name] = helper.make_tensor_type_proto(known.tensor_type.elem_type, shape)
    return result


def _untyped_body(proto: NodeProto) -> bool:
    """Return True if ONNX's body of the operator has inconsistent types, but ``_correct_types`` infers the result's."""
    return bool(proto.op_type == "MeanVarianceNormalization")


def _pool_shape(op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType | None]) -> tuple[int, ...]:
    batch, channels, source = _image_dims(op, operands[0])
    kernel = tuple(attributes.get("kernel_shape", ()))
    _check_window(op, attributes, len(source), kernel)
    return (batch, channels, *_output_extents(op, geometry_of(op, attributes, source, kernel)[1], source, kernel))


def _conv_shape(op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType | None]) -> tuple[int, ...]:
    batch, channels, source = _image_dims(op, operands[0])
    quantized = op == "QLinearConv"  # each tensor is followed by its scale and zero point
    _, _, kernel = weights = _image_dims(op, operands[3 if quantized else 1])
    if len(kernel) != len(source):
        raise BadInput(
            f"{op} of an image with {len(source)} spatial dimensions has weights with {len(kernel)}",
            hint="the weights have the rank of the image",
        )
    given = tuple(attributes.get("kernel_shape") or kernel)
    if given != kernel:
        raise BadInput(f"{op} has kernel_shape={list(given)} and weights of {list(kernel)}", hint="leave kernel_shape out")
    _check_window(op, attributes, len(source), kernel)
    features = _output_channels(op, int(attributes.get("group", 1)), channels, weights)
    if op != "ConvInteger":
        _check_bias(op, features, operands[8:] if quantized else operands[2:])
    if op == "ConvTranspose":
        return (batch, features, *_output_extents(op, transposed_of(attributes, source, kernel), source, kernel))
    return (batch, features, *_output_extents(op, geometry_of(op, attributes, source, kernel)[1], source, kernel))


def _output_channels(op: str, group: int, channels: int, weights: tuple[int, int, tuple[int, ...]]) -> int:
    """Return the channels of the result. Raises BadInput if groups, channels and weights are inconsistent."""
    first, second, _ = weights
    if group < 1:
        raise BadInput(f"{op} has group={group}", hint="groups of channels are counted from 1")
    if op == "ConvTranspose":
        if first != channels or channels % group:
            raise BadInput(
                f"{op} of {channels} channels in {group} groups has weights for {first}",
                hint="the weights have shape [channels, features / group, ...]",
            )
        return second * group
    if second * group != channels or first % group:
        raise BadInput(
            f"{op} of {channels} channels in {group} groups has weights for {second} channels a group and {first} features",
            hint="the weights have shape [features, channels / group, ...]",
        )
    return first


def _check_bias(op: str, features: int, operands: Sequence[TensorType | None]) -> None:
    bias = operands[0] if operands else None
    if bias is not None and bias.shape != (features,):
        raise BadInput(f"{op} with {features} features has a bias of shape {list(bias.shape)}", hint="one value a feature")


def _image_dims(op: str, kind: TensorType | None) -> tuple[int, int, tuple[int, ...]]:
    if kind is None or len(kind.shape) < 3:
        shape = "no shape" if kind is None else str(list(kind.shape))
        raise BadInput(f"{op} of a tensor of {shape}", hint="batch, channels and at least one spatial dimension")
    return kind.shape[0], kind.shape[1], kind.shape[2:]


def _check_window(op: str, attributes: Mapping[str, Any], rank: int, kernel: Sequence[int]) -> None:
    given = {name: attributes.get(name) or () for name in ("strides", "dilations", "pads")}
    for name, values in {**given, "kernel_shape": kernel}.items():
        count = 2 * rank if name == "pads" else rank
        if (values or name == "kernel_shape") and len(values) != count:
            raise BadInput(f"{op} in {rank} spatial dimensions has {name}={list(values)}", hint=f"give {count} values")
        # Weights without elements make an empty sum; a pooling window needs an element.
        checked = name in ("strides", "dilations") or (name == "kernel_shape" and not op.startswith("Conv"))
        if checked and any(v < 1 for v in values):
            raise BadInput(f"{op} has {name}={list(values)}", hint="the minimum is 1")
    mode = attributes.get("auto_pad") or "NOTSET"
    if mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise BadInput(f"{op} has auto_pad={mode!r}", hint="ONNX defines NOTSET, VALID, SAME_UPPER and SAME_LOWER")


def _output_extents(op: str, dims: Sequence[Extent], source: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of the result ("floor((input + pads - window) / stride) + 1"), which may be 0. Raises BadInput if the
    window does not fit."""
    if any(d.out < 0 for d in dims):
        raise BadInput(
            f"the window of {op}, {list(kernel)}, does not fit into its padded input {list(source)}",
            hint="give a larger input with --shape",
        )
    return tuple(d.out for d in dims)


def _global_pool(op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType | None]) -> tuple[int, ...]:
    batch, channels, source = _image_dims(op, operands[0])
    return (batch, channels, *[1] * len(source))


def _same_shape(op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType | None]) -> tuple[int, ...]:
    return operands[0].shape if operands[0] is not None else ()


def _transpose_shape(op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType | None]) -> tuple[int, ...]:
    shape = _same_shape(op, attributes, operands)
    perm = list(attributes.get("perm") or reversed(range(len(shape))))
    if sorted(perm) != list(range(len(shape))):
        raise BadInput(f"{op} of a tensor of {list(shape)} has perm={perm}", hint="name every axis of the tensor once")
    return tuple(shape[p] for p in perm)


def _einsum_shape(op: str, attributes: Mapping[str, Any], operands: Sequence[TensorType | None]) -> tuple[int, ...]:
    return parse_equation(str(attributes.get("equation", "")), [kind.shape for kind in operands if kind is not None]).shape


RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool_shape),
    **dict.fromkeys(operators(Trait.CONVOLUTION), _conv_shape),
    **dict.fromkeys(("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"), _global_pool),
    # ONNX lacks rules for these and infers through their bodies, whose Reshape interprets an extent of 0 as "unchanged".
    **dict.fromkeys(("MeanVarianceNormalization", "GroupNormalization"), _same_shape),
    "Transpose": _transpose_shape,
    "Einsum": _einsum_shape,
    "com.microsoft.Inverse": _same_shape,
}
