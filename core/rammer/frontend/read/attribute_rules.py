"""Rules for attributes and operands beyond ONNX's schemas: words, flags, axes, ranks and single elements.

ONNX declares that an attribute is a number or a string, and the element types of an operand. Only its documentation states the
allowed words, that a flag is 0 or 1, and the rank of an operand. ONNX's converter and inference do not check these, and some
nodes crash the process. Therefore ``attribute_problems`` precedes both, and ``check_operands`` precedes inference and lowering,
which rely on these tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from onnx import AttributeProto, NodeProto

from rammer.errors import BadInput
from rammer.frontend.op_traits import Trait, operators
from rammer.frontend.read.limits import MAX_RANK
from rammer.frontend.read.node_protos import node_title
from rammer.frontend.read.schemas import MICROSOFT
from rammer.ir.names import shorten_name
from rammer.ir.types import TensorType

Words: TypeAlias = tuple[str, ...]

_PADDINGS: Final[Words] = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_REDUCTIONS: Final[Words] = ("none", "sum", "mean")
_SCATTERED: Final[Words] = ("none", "add", "mul", "max", "min")
_DIRECTIONS: Final[Words] = ("forward", "reverse", "bidirectional")
#: Allowed words by attribute and operator.
_WORDS: Final[Mapping[str, Mapping[str, Words]]] = {
    "auto_pad": dict.fromkeys((*operators(Trait.CONVOLUTION), "MaxPool", "AveragePool", "LpPool"), _PADDINGS),
    "direction": {**dict.fromkeys(operators(Trait.RECURRENT), _DIRECTIONS), "BitShift": ("LEFT", "RIGHT")},
    "mode": {
        "Resize": ("nearest", "linear", "cubic"),
        "Upsample": ("nearest", "linear", "bilinear"),
        "Pad": ("constant", "reflect", "edge", "wrap"),
        "DepthToSpace": ("DCR", "CRD"),
        "SpaceToDepth": ("DCR", "CRD"),
        "GridSample": ("bilinear", "nearest", "bicubic", "linear", "cubic"),
        "RoiAlign": ("avg", "max"),
    },
    "padding_mode": {"GridSample": ("zeros", "border", "reflection")},
    "coordinate_transformation_mode": {
        "Resize": (
            "half_pixel",
            "half_pixel_symmetric",
            "pytorch_half_pixel",
            "align_corners",
            "asymmetric",
            "tf_half_pixel_for_nn",
            "tf_crop_and_resize",
        ),
        "RoiAlign": ("half_pixel", "output_half_pixel"),
    },
    "nearest_mode": {"Resize": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")},
    "keep_aspect_ratio_policy": {"Resize": ("stretch", "not_larger", "not_smaller")},
    "approximate": {"Gelu": ("none", "tanh")},
    "case_change_action": {"StringNormalizer": ("NONE", "LOWER", "UPPER")},
    "reduction": {
        "ScatterElements": _SCATTERED,
        "ScatterND": _SCATTERED,
        "SoftmaxCrossEntropyLoss": _REDUCTIONS,
        "NegativeLogLikelihoodLoss": _REDUCTIONS,
    },
}
#: Attributes that are always 0 or 1.
_FLAGS: Final = frozenset(
    {
        "align_corners",
        "allowzero",
        "antialias",
        "broadcast",
        "ceil_mode",
        "center_point_box",
        "count_include_pad",
        "detect_negative",
        "detect_positive",
        "exclude_outside",
        "exclusive",
        "fmod",
        "input_forget",
        "interleaved",
        "inverse",
        "is_causal",
        "keepdims",
        "largest",
        "layout",
        "linear_before_reset",
        "noop_with_empty_axes",
        "onesided",
        "periodic",
        "reverse",
        "saturate",
        "select_last_index",
        "sorted",
        "storage_order",
        "training_mode",
        "transA",
        "transB",
        "upper",
    }
)
#: Attributes that name axes, counted from the front or the end, and those counted only from the front.
_AXES: Final = frozenset({"axis", "axes", "gather_axis", "quantize_axis"})
_FIRST_AXES: Final = frozenset({"batch_axis", "time_axis", "batch_dims"})
#: Strings that are data and may be other bytes than text.
_DATA: Final = frozenset({"value_string", "value_strings"})


def attribute_problems(node: NodeProto, inside: bool) -> Iterator[str]:
    """Yield the problems of a node's attribute values, whose kinds are correct. If ``inside`` the body of a function, attributes
    may refer to the function's attributes."""
    op = node.op_type
    for attribute in node.attribute:
        name = attribute.name
        if op == "Split" and name == "num_outputs" and not attribute.ref_attr_name and attribute.i != len(node.output):
            # ONNX's inference writes past the end of a list if the node has more outputs than the attribute.
            yield f"attribute num_outputs of Split is {attribute.i}, where it has {len(node.output)} outputs"
        if attribute.ref_attr_name:
            if not inside:
                yield f"attribute {name} of {op} refers to an attribute of a function, but {op} is outside functions"
            continue
        if attribute.type in (AttributeProto.STRING, AttributeProto.STRINGS) and name not in _DATA:
            yield from _text_problems(op, attribute)
        elif attribute.type in (AttributeProto.INT, AttributeProto.INTS):
            yield from _whole_problems(op, attribute)


def _text_problems(op: str, attribute: AttributeProto) -> Iterator[str]:
    words = _WORDS.get(attribute.name, {}).get(op)
    for data in attribute.strings if attribute.type == AttributeProto.STRINGS else (attribute.s,):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            yield f"attribute {attribute.name} of {op} is {shorten_name(repr(data))}, which is not UTF-8 text"
            continue
        if attribute.name == "equation" and op == "Einsum" and not _is_equation(text):
            yield f"attribute equation of Einsum is {shorten_name(repr(text))}, whose terms are not letters"
        if words is not None and text not in words:
            yield f"attribute {attribute.name} of {op} is {shorten_name(repr(text))}, where ONNX defines {', '.join(words)}"


def _is_equation(text: str) -> bool:
    """Return True if the terms, separated by commas and an arrow, are letters with at most one ellipsis each. ONNX's inference
    never ends on other characters."""
    left, _, right = text.replace(" ", "").partition("->")
    letters = [term.replace("...", "", 1) for term in (*left.split(","), right)]
    return all(not t or (t.isascii() and t.isalpha()) for t in letters)


def _whole_problems(op: str, attribute: AttributeProto) -> Iterator[str]:
    name = attribute.name
    ends = (
        (0, 1) if name in _FLAGS else (-MAX_RANK, MAX_RANK) if name in _AXES else (0, MAX_RANK) if name in _FIRST_AXES else None
    )
    for value in attribute.ints if attribute.type == AttributeProto.INTS else (attribute.i,):
        if ends is not None and not ends[0] <= value <= ends[1]:
            yield f"attribute {name} of {op} is {value}, where {ends[0]} to {ends[1]} is possible"


# --- operands --------------------------------------------------------------------------------------------------

#: Rank of each operand; None for any, -n for n or more.
_RANKS: Final[Mapping[str, tuple[int | None, ...]]] = {
    "LSTM": (3, 3, 3, 2, 1, 3, 3, 2),
    "GRU": (3, 3, 3, 2, 1, 3),
    "RNN": (3, 3, 3, 2, 1, 3),
    "InstanceNormalization": (-2, 1, 1),
    "GroupNormalization": (-2, 1, 1),
    "BatchNormalization": (-1, 1, 1, 1, 1),
    "LRN": (-2,),
    "LpNormalization": (-1,),
    "MeanVarianceNormalization": (-1,),
    "DepthToSpace": (4,),
    "SpaceToDepth": (4,),
    "Gemm": (2, 2),
    "MatMul": (-1, -1),
    "Trilu": (-2,),
    "EyeLike": (2,),
    "CumSum": (-1,),
    "CumProd": (-1,),
    "ArgMax": (-1,),
    "ArgMin": (-1,),
    "Softmax": (-1,),
    "LogSoftmax": (-1,),
    "Hardmax": (-1,),
    "Gather": (-1,),
    "GatherElements": (-1,),
    "GatherND": (-1, -1),
    "ScatterElements": (-1,),
    "Scatter": (-1,),
    "ScatterND": (-1, -1),
    "ReverseSequence": (-2, 1),
    "Concat": (-1,),
    "Split": (-1, 1),
    "TopK": (-1,),
    "Det": (-2,),
    "GlobalMaxPool": (-2,),
    "GlobalAveragePool": (-2,),
    "GlobalLpPool": (-2,),
    "Reshape": (None, 1),
    "Expand": (None, 1),
    "Tile": (None, 1),
    "ConstantOfShape": (1,),
    "Slice": (-1, 1, 1, 1, 1),
    "Resize": (-1, 1, 1, 1),
    "Upsample": (-1, 1),
    "Pad": (None, 1),
    "OneHot": (None, None, 1),
    "LayerNormalization": (-1,),
    "RMSNormalization": (-1,),
}
#: Operands with the rank of the first one.
_ALIKE: Final[Mapping[str, tuple[int, ...]]] = {
    "GatherElements": (1,),
    "ScatterElements": (1, 2),
    "Scatter": (1, 2),
    "MaxUnpool": (1,),
}
#: Operands with one element for each channel of the first one.
_CHANNELS: Final[Mapping[str, tuple[int, ...]]] = {"InstanceNormalization": (1, 2), "BatchNormalization": (1, 2, 3, 4)}
#: Operators whose attributes of ``_AXES`` name axes of an operand, and its index; no inference checks them.
_AXES_OF: Final[Mapping[str, int]] = {
    **dict.fromkeys(("GatherElements", "Scatter", "ScatterElements", "GatherBlockQuantized"), 0),
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "LpNormalization"), 0),
    **dict.fromkeys(("MeanVarianceNormalization", "BiasSoftmax", "QLinearSoftmax", "QuantizeLinear", "DequantizeLinear"), 0),
    "QLinearConcat": 2,
}
#: Operators of these whose axis is ignored if their second operand is one number.
_AXIS_OF_SEVERAL: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
#: Operands with one element.
_SINGLE: Final[Mapping[str, tuple[int, ...]]] = {
    "Clip": (1, 2),
    "OneHot": (1,),
    "Range": (0, 1, 2),
    "CumSum": (1,),
    "CumProd": (1,),
    "Trilu": (1,),
    "Pad": (2,),
    "Dropout": (1, 2),
    "TopK": (1,),
    "ConvInteger": (2,),
    "QLinearConv": (1, 2, 6, 7),
}


#: Scales and zero points of products -> their operand, and the axis along which they may vary.
_GRAINS: Final[Mapping[str, Mapping[int, tuple[int, int]]]] = {
    "MatMulInteger": {2: (0, -2), 3: (1, -1)},
    "QLinearMatMul": {1: (0, -2), 2: (0, -2), 4: (3, -1), 5: (3, -1), 6: (0, -2), 7: (0, -2)},
    "ConvInteger": {3: (1, 0)},
    "QLinearConv": {4: (3, 0), 5: (3, 0)},
}


def check_operands(node: NodeProto, types: Sequence[TensorType | None]) -> None:
    """Raise BadInput if an operand's rank or size contradicts the operator's documentation. ``types`` are those of the inputs,
    None for an absent one or one without a static tensor shape."""
    _check_axes(node, types)
    if node.domain not in ("", "ai.onnx"):
        return
    op, ranks = node.op_type, _RANKS.get(node.op_type, ())
    for place, kind in enumerate(types):
        if kind is None:
            continue
        rank, wanted = len(kind.shape), ranks[place] if place < len(ranks) else None
        if wanted is not None and (rank < -wanted if wanted < 0 else rank != wanted):
            raise _make_shape_error(node, place, kind, f"{f'at least {-wanted}' if wanted < 0 else wanted} axes")
        if place in _ALIKE.get(op, ()) and types[0] is not None and rank != len(types[0].shape):
            raise _make_shape_error(node, place, kind, f"the {len(types[0].shape)} axes of input 0")
        if place in _SINGLE.get(op, ()) and kind.size != 1:
            raise _make_shape_error(node, place, kind, "one element")
        if place in _CHANNELS.get(op, ()) and types[0] is not None and kind.size != _channel_count(types[0]):
            raise _make_shape_error(node, place, kind, f"{_channel_count(types[0])} elements, one for each channel")
        _check_grain(node, place, kind, types)
    for attribute in node.attribute:
        if attribute.name == "batch_dims" and any(k is not None and len(k.shape) <= attribute.i for k in types):
            shapes = " and ".join(str(list(k.shape)) for k in types if k is not None)
            raise BadInput(
                f"batch_dims of {op} is {attribute.i}, where its operands have the shapes {shapes}",
                node_title(node),
                "it counts axes that both operands have, and one more follows",
            )


def _check_axes(node: NodeProto, types: Sequence[TensorType | None]) -> None:
    """Raise BadInput for an attribute that names an axis which its operand does not have."""
    place = _AXES_OF.get(node.op_type, -1) if node.domain in ("", "ai.onnx", MICROSOFT) else -1
    kind = types[place] if 0 <= place < len(types) else None
    if kind is None:
        return
    several = types[1] if len(types) > 1 else None
    if node.op_type in _AXIS_OF_SEVERAL and (several is None or several.size == 1):
        return
    rank = len(kind.shape)
    for attribute in (a for a in node.attribute if a.name in _AXES):
        for value in attribute.ints if attribute.type == AttributeProto.INTS else (attribute.i,):
            if not -rank <= value < rank:
                shown = f"input {place} has the shape {list(kind.shape)}"
                raise BadInput(
                    f"attribute {attribute.name} of {node.op_type} is {value}, where {shown}",
                    node_title(node),
                    f"axes of it are {-rank} to {rank - 1}" if rank else "it has no axes",
                )


def _check_grain(node: NodeProto, place: int, kind: TensorType, types: Sequence[TensorType | None]) -> None:
    """Raise BadInput for scales or zero points of a product with an invalid shape. One number, or one per row, column or feature
    is valid. For matrices, so is a tensor of that extent along the axis and 1 along the other."""
    whose, axis = _GRAINS.get(node.op_type, {}).get(place, (-1, 0))
    of = types[whose] if 0 <= whose < len(types) else None
    if of is None or kind.size == 1:
        return
    count = of.shape[axis] if len(of.shape) >= (2 if axis < 0 else 1) else 1
    result = max(len(k.shape) for k in (of, types[3] if place > 5 and len(types) > 3 else None) if k is not None)
    spread = axis < 0 and 2 <= len(kind.shape) <= result and kind.shape[axis] == count and kind.shape[-3 - axis] == 1
    if not (kind.size and (kind.shape == (count,) or spread)):
        raise _make_shape_error(node, place, kind, f"one element, or {count} for input {whose} of {list(of.shape)}")


def _channel_count(kind: TensorType) -> int:
    return kind.shape[1] if len(kind.shape) > 1 else 1


def _make_shape_error(node: NodeProto, place: int, kind: TensorType, wanted: str) -> BadInput:
    return BadInput(
        f"input {place} of {node.op_type} has the shape {list(kind.shape)}, where it needs {wanted}",
        node_title(node),
        "check the model with onnx.checker, and the shapes given with --shape",
    )
