"""A PeerGraph as a torch module: straight-line code (torch.fx), cuDNN for recurrences, SDPA for attention."""

from __future__ import annotations

import operator
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper

from rammer.errors import BadInput
from rammer_bench import layers
from rammer_bench.emitter import Emit, Emitter, load_torch, operands
from rammer_bench.graph import PeerNode, peer_graph

__all__ = ["load_torch", "to_torch"]


def to_torch(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]] | None = None) -> Any:
    """Return a ``torch.fx.GraphModule`` with the model's inputs in order and its outputs as a tuple.

    Weights are buffers, so ``.to(device, dtype)`` moves them. ``shapes`` binds dynamic input dimensions. Raises BadInput that
    names an uncovered operator or form of it."""
    return Emitter(peer_graph(model), _input_types(model, shapes or {}), _EMIT).module()


def _input_types(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    result = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = shapes.get(value.name) or tuple(d.dim_value for d in kind.shape.dim)
        result[value.name] = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), shape
    return result


def _flatten(e: Emitter, node: PeerNode) -> Any:
    (x,) = operands(e, node)
    axis = node.attr("axis", 1)
    if axis != 1:
        raise BadInput("the torch peer covers Flatten along axis 1 only", where=node.outputs[0])
    return e.call(e.torch.flatten, x, 1)


def _concat(e: Emitter, node: PeerNode) -> Any:
    return e.call(e.torch.cat, operands(e, node), node.attr("axis"))


def _clip(e: Emitter, node: PeerNode) -> Any:
    x, *limits = operands(e, node)
    return e.call(e.torch.clamp, x, *limits)


def _reshape(e: Emitter, node: PeerNode) -> Any:
    x = e.value(node.inputs[0])
    shape = e.static(node, 1) or []
    whole = [e.shape(x)[i] if n == 0 and not node.attr("allowzero", 0) else n for i, n in enumerate(shape)]
    return e.call(e.torch.reshape, x, whole)


def _squeeze(e: Emitter, node: PeerNode) -> Any:
    return e.call(e.torch.squeeze, e.value(node.inputs[0]), e.static(node, 1) or [])


def _transpose(e: Emitter, node: PeerNode) -> Any:
    x = e.value(node.inputs[0])
    order = node.attr("perm", list(reversed(range(len(e.shape(x))))))
    return e.call(e.torch.permute, x, list(order))


def _pad(e: Emitter, node: PeerNode) -> Any:
    """Emit constant padding of all axes, or reflection along the last one."""
    x, pads = e.value(node.inputs[0]), e.static(node, 1) or []
    mode, rank = node.attr("mode", b"constant"), len(e.shape(x))
    last = mode == b"reflect" and rank in (2, 3) and not any(pads[d] for d in range(2 * rank) if (d + 1) % rank)
    if (mode != b"constant" and not last) or (len(node.inputs) > 3 and node.inputs[3]):
        raise BadInput("the torch peer covers Pad of all axes, constant or reflecting the last, only", where=node.outputs[0])
    if last:
        return e.call(e.F.pad, x, [pads[rank - 1], pads[-1]], "reflect")
    fill = e.value(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else 0.0
    return e.call(e.F.pad, x, [p for d in reversed(range(rank)) for p in (pads[d], pads[d + rank])], "constant", fill)


def _slice(e: Emitter, node: PeerNode) -> Any:
    x = e.value(node.inputs[0])
    starts, ends = e.static(node, 1) or [], e.static(node, 2) or []
    axes, steps = e.static(node, 3) or list(range(len(starts))), e.static(node, 4) or [1] * len(starts)
    index = [slice(None)] * len(e.shape(x))
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise BadInput("the torch peer covers Slice with positive steps only", where=node.outputs[0])
        index[axis] = slice(start, end, step)
    return e.call(operator.getitem, x, tuple(index))


def _softmax(e: Emitter, node: PeerNode) -> Any:
    return e.call(e.torch.softmax, operands(e, node)[0], node.attr("axis", -1))


def _gelu(e: Emitter, node: PeerNode) -> Any:
    form = node.attr("approximate", b"none")
    return e.call(e.F.gelu, operands(e, node)[0], approximate=form.decode() if isinstance(form, bytes) else form)


def _hard_sigmoid(e: Emitter, node: PeerNode) -> Any:
    x, alpha, beta = e.tensor(node.inputs[0]), node.attr("alpha", 0.2), node.attr("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return e.call(e.F.hardsigmoid, x)
    return e.call(e.torch.clamp, e.call(e.torch.add, e.call(e.torch.mul, x, alpha), beta), 0.0, 1.0)


def _split(e: Emitter, node: PeerNode) -> tuple[Any, ...]:
    """Split into the requested sizes, or into equal parts of which the last may be smaller."""
    x, axis = e.value(node.inputs[0]), node.attr("axis", 0)
    extent, count = e.shape(x)[axis], len(node.outputs)
    each = -(-extent // count)
    sizes = e.static(node, 1) or [min(each, extent - each * i) for i in range(count)]
    parts = e.call(e.torch.split, x, sizes, axis)
    return tuple(e.call(operator.getitem, parts, i) for i, name in enumerate(node.outputs) if name)


def _unsqueeze(e: Emitter, node: PeerNode) -> Any:
    x, axes = e.value(node.inputs[0]), e.static(node, 1) or []
    rank = len(e.shape(x)) + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = e.call(e.torch.unsqueeze, x, axis)
    return x


def _expand(e: Emitter, node: PeerNode) -> Any:
    x = e.tensor(node.inputs[0])
    return e.call(e.torch.broadcast_to, x, np.broadcast_shapes(e.shape(x), tuple(e.static(node, 1) or ())))


def cast_like(x: Any, like: Any) -> Any:
    """Return ``x`` in the element type of ``like``."""
    return x.to(like.dtype)


def _cast(e: Emitter, node: PeerNode) -> Any:
    """Cast floats to the module's computation type, that of its weights."""
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(node.attr("to")))
    like = e.weight(np.zeros((), dtype), f"cast to {dtype}")
    return e.call(cast_like, e.tensor(node.inputs[0]), like)


def _reduction(path: str) -> Emit:
    """Return the translation of a reduction along constant axes."""

    def emit(e: Emitter, node: PeerNode) -> Any:
        x, axes = e.tensor(node.inputs[0]), e.static(node, 1)
        if not axes and node.attr("noop_with_empty_axes", 0):
            return x
        return e.call(getattr(e.torch, path), x, axes or list(range(len(e.shape(x)))), bool(node.attr("keepdims", 1)))

    return emit


def _global_max(e: Emitter, node: PeerNode) -> Any:
    x = e.tensor(node.inputs[0])
    return e.call(e.torch.amax, x, list(range(2, len(e.shape(x)))), True)


def _folded(path: str) -> Emit:
    """Return the translation of an n-ary operator that is binary in torch."""

    def emit(e: Emitter, node: PeerNode) -> Any:
        first, *rest = (e.tensor(n) for n in node.inputs)
        for x in rest:
            first = e.call(getattr(e.torch, path), first, x)
        return first

    return emit


def _plain(path: str) -> Emit:
    """Return the translation of an operator to one torch function; the first operand must be a tensor."""

    def emit(e: Emitter, node: PeerNode) -> Any:
        first, *rest = node.inputs
        return e.call(getattr(e.torch, path), e.tensor(first), *map(e.value, rest))

    return emit


def _where(e: Emitter, node: PeerNode) -> Any:
    return e.call(e.torch.where, *map(e.tensor, node.inputs))


def _lrn(e: Emitter, node: PeerNode) -> Any:
    """Emit local response normalisation: torch pads size / 2 channels in front, as ONNX does for odd sizes."""
    size, alpha, beta = node.attr("size"), node.attr("alpha", 1e-4), node.attr("beta", 0.75)
    if size % 2 == 0:
        raise BadInput("the torch peer covers LRN over odd numbers of channels only", where=node.outputs[0])
    return e.call(e.F.local_response_norm, e.tensor(node.inputs[0]), size, alpha, beta, node.attr("bias", 1.0))


def _identity(e: Emitter, node: PeerNode) -> Any:
    return e.value(node.inputs[0])


_EMIT: Final[dict[str, Emit]] = {
    "Conv": layers.conv,
    "ConvTranspose": layers.conv_transpose,
    "MaxPool": layers.pool,
    "AveragePool": layers.pool,
    "LSTM": layers.lstm,
    "Linear": layers.linear,
    "Gemm": layers.gemm,
    "Attention": layers.attention,
    "BatchNormalization": layers.norm,
    "LayerNormalization": layers.layer_norm,
    "Gather": layers.gather,
    "GlobalAveragePool": layers.global_pool,
    "Resize": layers.resize,
    "Flatten": _flatten,
    "Concat": _concat,
    "Clip": _clip,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Pad": _pad,
    "Slice": _slice,
    "Softmax": _softmax,
    "Gelu": _gelu,
    "Identity": _identity,
    "Dropout": _identity,
    "Add": _plain("add"),
    "Sub": _plain("sub"),
    "Mul": _plain("mul"),
    "Div": _plain("div"),
    "MatMul": _plain("matmul"),
    "Relu": _plain("relu"),
    "Sigmoid": _plain("sigmoid"),
    "Tanh": _plain("tanh"),
    "Erf": _plain("erf"),
    "Exp": _plain("exp"),
    "Sqrt": _plain("sqrt"),
    "Pow": _plain("pow"),
    "Reciprocal": _plain("reciprocal"),
    "Equal": _plain("eq"),
    "HardSigmoid": _hard_sigmoid,
    "Sum": _folded("add"),
    "Max": _folded("maximum"),
    "Min": _folded("minimum"),
    "Split": _split,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Cast": _cast,
    "ReduceMean": _reduction("mean"),
    "ReduceSum": _reduction("sum"),
    "ReduceMax": _reduction("amax"),
    "ReduceMin": _reduction("amin"),
    "GlobalMaxPool": _global_max,
    "Where": _where,
    "LRN": _lrn,
}
