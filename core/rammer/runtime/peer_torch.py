"""A PeerGraph as a torch module: straight-line code (torch.fx), cuDNN for recurrences, SDPA for attention."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx

from rammer.errors import BadInput, DeviceUnavailable
from rammer.runtime.peer_graph import Array, PeerGraph, PeerNode, peer_graph


def load_torch() -> Any:
    """The torch package. DeviceUnavailable where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as problem:
        raise DeviceUnavailable("torch is not installed", hint="pip install torch") from problem


def to_torch(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]] | None = None) -> Any:
    """A ``torch.fx.GraphModule`` that takes the model's inputs in order and returns its outputs as a tuple.

    Weights are buffers, so ``.to(device, dtype)`` moves them. ``shapes`` binds dynamic input dimensions.
    BadInput for an operator or a form of it that is not covered, naming it.
    """
    return _Emitter(peer_graph(model), _input_types(model, shapes or {})).module()


def _input_types(model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    result = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = shapes.get(value.name) or tuple(d.dim_value for d in kind.shape.dim)
        result[value.name] = str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), shape
    return result


class _Emitter:
    """Emits one fx node for each operator; beside it runs the operator on meta tensors, which have shapes only."""

    def __init__(self, source: PeerGraph, inputs: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        self.torch = load_torch()
        self.fx = importlib.import_module("torch.fx")
        self.F = importlib.import_module("torch.nn.functional")
        self.source, self.inputs = source, inputs
        self.root = self.torch.nn.Module()
        self.graph = self.fx.Graph()
        self.values: dict[str, Any] = {}
        self.metas: dict[Any, Any] = {}
        self.kept: dict[tuple[str, bool], Any] = {}

    def module(self) -> Any:
        """Emit everything and compile it to Python."""
        torch = self.torch
        for number, name in enumerate(self.source.inputs):
            dtype, shape = self.inputs[name]
            node = self.graph.placeholder(f"input_{number}")
            self.metas[node] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            self.values[name] = node
        for node in self.source.nodes:
            emit = _EMIT.get(node.op)
            if emit is None:
                raise BadInput(f"the torch peer has no translation of {node.op}", where=f"value {node.outputs[0]}")
            result = emit(self, node)
            names = [o for o in node.outputs if o]
            if isinstance(result, tuple):
                self.values.update(zip(names, result, strict=True))
            else:  # Dropout's mask is the one output that nobody here computes
                self.values[names[0]] = result
        self.graph.output(tuple(self.value(name) for name in self.source.outputs))
        made = self.fx.GraphModule(self.root, self.graph, "Peer")
        return made.eval().requires_grad_(False)

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A call of ``function`` on values."""
        node = self.graph.call_function(function, args, options)
        self.metas[node] = function(*map(self._meta, args), **options)
        return node

    def _meta(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._meta(v) for v in value)
        return self.metas.get(value, value) if isinstance(value, self.fx.Node) else value

    def shape(self, value: Any) -> tuple[int, ...]:
        """Static shape of a value."""
        return tuple(self.metas[value].shape)

    def value(self, name: str) -> Any:
        """A tensor, a weight, or a Python number for a float constant of rank 0."""
        if name in self.values:
            return self.values[name]
        array = self.source.constants[name]
        if array.ndim == 0 and array.dtype.kind == "f":
            return float(array)
        return self.weight(array, name)

    def weight(self, array: Array, name: str, transposed: bool = False) -> Any:
        """A buffer, made once."""
        key = (name, transposed)
        if key not in self.kept:
            attribute = f"w{len(self.kept)}"
            tensor = self.torch.from_numpy(np.ascontiguousarray(array.T if transposed else array))
            self.root.register_buffer(attribute, tensor)
            self.kept[key] = self.graph.get_attr(attribute)
            self.metas[self.kept[key]] = tensor.to("meta")
        return self.kept[key]

    def static(self, node: PeerNode, index: int) -> list[int] | None:
        """An integer operand that must be constant; None where it is absent."""
        if len(node.inputs) <= index or not node.inputs[index]:
            return None
        if node.inputs[index] not in self.source.constants:
            raise BadInput(f"the torch peer needs a constant operand {index} of {node.op}", where=node.outputs[0])
        return [int(v) for v in np.atleast_1d(self.source.constants[node.inputs[index]])]


def _operands(e: _Emitter, node: PeerNode) -> list[Any]:
    return [e.value(n) if n else None for n in node.inputs]


def _conv(e: _Emitter, node: PeerNode) -> Any:
    x, weight, *bias = _operands(e, node)
    rank = len(e.shape(weight)) - 2
    ones = [1] * rank
    pads, groups = node.attr("pads", [0] * 2 * rank), node.attr("group", 1)
    if pads[:rank] != pads[rank:]:
        x, pads = e.call(e.F.pad, x, [p for d in reversed(range(rank)) for p in (pads[d], pads[d + rank])]), [0] * rank
    function = (e.F.conv1d, e.F.conv2d, e.F.conv3d)[rank - 1]
    strides, dilations = list(node.attr("strides", ones)), list(node.attr("dilations", ones))
    return e.call(function, x, weight, bias[0] if bias else None, strides, list(pads[:rank]), dilations, groups)


def _pool(e: _Emitter, node: PeerNode) -> Any:
    """Padding at the end only is a window cut off by the border, which torch calls ceil_mode."""
    (x,) = _operands(e, node)
    kernel, strides = list(node.attr("kernel_shape")), list(node.attr("strides", [1, 1]))
    pads, ceil = list(node.attr("pads", [0] * 4)), bool(node.attr("ceil_mode", 0))
    cut = pads[:2] != pads[2:]
    if len(kernel) != 2 or (cut and (pads[:2] != [0, 0] or node.attr("count_include_pad", 0))):
        raise BadInput(f"the torch peer does not cover {node.op} with pads {pads}", where=node.outputs[0])
    rounding = [s - 1 if ceil else 0 for s in strides]
    want = tuple((n + pads[d] + pads[d + 2] - kernel[d] + rounding[d]) // strides[d] + 1
                 for d, n in enumerate(e.shape(x)[2:]))  # fmt: skip
    if node.op == "MaxPool":
        y = e.call(e.F.max_pool2d, x, kernel, strides, pads[:2], 1, ceil or cut)
    else:
        y = e.call(e.F.avg_pool2d, x, kernel, strides, pads[:2], ceil or cut, bool(node.attr("count_include_pad", 0)))
    if e.shape(y)[2:] != want:
        raise BadInput(f"the torch peer does not cover {node.op} with pads {pads}", where=node.outputs[0])
    return y


def _lstm(e: _Emitter, node: PeerNode) -> tuple[Any, ...]:
    """cuDNN's multi-layer LSTM. ONNX orders gates i, o, f, c; torch i, f, g, o."""
    if not all(n in e.source.constants for n in node.inputs[1:]) or len(node.inputs) % 3 != 1:
        raise BadInput("the torch peer covers plain forward LSTMs with constant weights only", where=node.outputs[0])
    weights = [e.source.constants[n] for n in node.inputs[1:]]
    hidden, layers, torch = int(node.attr("hidden_size")), len(weights) // 3, e.torch
    lstm = torch.nn.LSTM(weights[0].shape[-1], hidden, layers)
    order = np.concatenate([np.arange(hidden) + g * hidden for g in (0, 2, 3, 1)])
    state: dict[str, Any] = {}
    for layer in range(layers):
        w, r, b = (a[0] for a in weights[3 * layer : 3 * layer + 3])
        parts = {"weight_ih": w, "weight_hh": r, "bias_ih": b[: 4 * hidden], "bias_hh": b[4 * hidden :]}
        state |= {f"{n}_l{layer}": torch.from_numpy(np.ascontiguousarray(a[order])) for n, a in parts.items()}
    lstm.load_state_dict(state)
    name = f"lstm{len(e.kept)}_{len(e.values)}"
    e.root.add_module(name, lstm)
    x = e.value(node.inputs[0])
    steps, batch, _ = e.shape(x)
    made = e.graph.call_module(name, (x,))
    sequence, states = (e.graph.call_function(operator.getitem, (made, i)) for i in (0, 1))
    e.metas[sequence] = torch.empty((steps, batch, hidden), device="meta")
    results = []
    for index, output in enumerate(node.outputs):
        if output and index == 0:
            results.append(e.call(torch.unsqueeze, sequence, 1))
        elif output:
            state_of = e.graph.call_function(operator.getitem, (states, index - 1))
            e.metas[state_of] = torch.empty((layers, batch, hidden), device="meta")
            results.append(e.call(operator.getitem, state_of, slice(layers - 1, layers)))
    return tuple(results)


def _linear(e: _Emitter, node: PeerNode) -> Any:
    x, _, bias = _operands(e, node)
    return e.call(e.F.linear, x, e.weight(e.source.constants[node.inputs[1]], node.inputs[1], transposed=True), bias)


def _gemm(e: _Emitter, node: PeerNode) -> Any:
    x, weight, *bias = _operands(e, node)
    if node.attr("alpha", 1.0) != 1.0 or node.attr("beta", 1.0) != 1.0 or node.attr("transA", 0):
        raise BadInput("the torch peer covers Gemm without alpha, beta and transA only", where=node.outputs[0])
    if not node.attr("transB", 0):
        weight = e.call(e.torch.transpose, weight, 0, 1)
    return e.call(e.F.linear, x, weight, *bias)


def _attention(e: _Emitter, node: PeerNode) -> Any:
    q, k, v = _operands(e, node)
    k = e.call(e.torch.transpose, k, -1, -2)
    return e.call(e.F.scaled_dot_product_attention, q, k, v, scale=node.attr("scale"))


def _norm(e: _Emitter, node: PeerNode) -> Any:
    """A batch norm that no convolution precedes."""
    x, scale, shift, mean, variance = _operands(e, node)
    epsilon = float(node.attr("epsilon", 1e-5))
    return e.call(e.F.batch_norm, x, mean, variance, scale, shift, False, 0.0, epsilon)


def _layer_norm(e: _Emitter, node: PeerNode) -> Any:
    x, scale, *shift = _operands(e, node)
    start = node.attr("axis", -1) % len(e.shape(x))
    extents = list(e.shape(x)[start:])
    return e.call(e.F.layer_norm, x, extents, scale, shift[0] if shift else None, float(node.attr("epsilon", 1e-5)))


def _gather(e: _Emitter, node: PeerNode) -> Any:
    table, index = _operands(e, node)
    if node.attr("axis", 0) or len(e.shape(table)) != 2:
        raise BadInput("the torch peer covers Gather of a matrix's rows only", where=node.outputs[0])
    return e.call(e.F.embedding, index, table)


def _global_pool(e: _Emitter, node: PeerNode) -> Any:
    return e.call(e.F.adaptive_avg_pool2d, _operands(e, node)[0], 1)


def _flatten(e: _Emitter, node: PeerNode) -> Any:
    (x,) = _operands(e, node)
    axis = node.attr("axis", 1)
    if axis != 1:
        raise BadInput("the torch peer covers Flatten along axis 1 only", where=node.outputs[0])
    return e.call(e.torch.flatten, x, 1)


def _concat(e: _Emitter, node: PeerNode) -> Any:
    return e.call(e.torch.cat, _operands(e, node), node.attr("axis"))


def _clip(e: _Emitter, node: PeerNode) -> Any:
    x, *limits = _operands(e, node)
    return e.call(e.torch.clamp, x, *limits)


def _reshape(e: _Emitter, node: PeerNode) -> Any:
    x = e.value(node.inputs[0])
    shape = e.static(node, 1) or []
    whole = [e.shape(x)[i] if n == 0 and not node.attr("allowzero", 0) else n for i, n in enumerate(shape)]
    return e.call(e.torch.reshape, x, whole)


def _squeeze(e: _Emitter, node: PeerNode) -> Any:
    return e.call(e.torch.squeeze, e.value(node.inputs[0]), e.static(node, 1) or [])


def _transpose(e: _Emitter, node: PeerNode) -> Any:
    x = e.value(node.inputs[0])
    order = node.attr("perm", list(reversed(range(len(e.shape(x))))))
    return e.call(e.torch.permute, x, list(order))


def _pad(e: _Emitter, node: PeerNode) -> Any:
    """Constant padding of all axes."""
    x, pads = e.value(node.inputs[0]), e.static(node, 1) or []
    if node.attr("mode", b"constant") != b"constant" or (len(node.inputs) > 3 and node.inputs[3]):
        raise BadInput("the torch peer covers constant Pad of all axes only", where=node.outputs[0])
    fill = e.value(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] else 0.0
    rank = len(e.shape(x))
    return e.call(e.F.pad, x, [p for d in reversed(range(rank)) for p in (pads[d], pads[d + rank])], "constant", fill)


def _slice(e: _Emitter, node: PeerNode) -> Any:
    x = e.value(node.inputs[0])
    starts, ends = e.static(node, 1) or [], e.static(node, 2) or []
    axes, steps = e.static(node, 3) or list(range(len(starts))), e.static(node, 4) or [1] * len(starts)
    index = [slice(None)] * len(e.shape(x))
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise BadInput("the torch peer covers Slice with positive steps only", where=node.outputs[0])
        index[axis] = slice(start, end, step)
    return e.call(operator.getitem, x, tuple(index))


def _softmax(e: _Emitter, node: PeerNode) -> Any:
    return e.call(e.torch.softmax, _operands(e, node)[0], node.attr("axis", -1))


def _gelu(e: _Emitter, node: PeerNode) -> Any:
    form = node.attr("approximate", b"none")
    return e.call(e.F.gelu, _operands(e, node)[0], approximate=form.decode() if isinstance(form, bytes) else form)


def _plain(path: str) -> Callable[[_Emitter, PeerNode], Any]:
    """An operator that is one function of torch on its operands."""

    def emit(e: _Emitter, node: PeerNode) -> Any:
        return e.call(getattr(e.torch, path), *_operands(e, node))

    return emit


def _identity(e: _Emitter, node: PeerNode) -> Any:
    return e.value(node.inputs[0])


_EMIT: Final[dict[str, Callable[[_Emitter, PeerNode], Any]]] = {
    "Conv": _conv, "MaxPool": _pool, "AveragePool": _pool, "LSTM": _lstm, "Linear": _linear, "Gemm": _gemm,
    "Attention": _attention, "BatchNormalization": _norm, "LayerNormalization": _layer_norm, "Gather": _gather,
    "GlobalAveragePool": _global_pool, "Flatten": _flatten, "Concat": _concat, "Clip": _clip, "Reshape": _reshape,
    "Squeeze": _squeeze, "Transpose": _transpose, "Pad": _pad, "Slice": _slice, "Softmax": _softmax, "Gelu": _gelu,
    "Identity": _identity, "Dropout": _identity,
    "Add": _plain("add"), "Sub": _plain("sub"), "Mul": _plain("mul"), "Div": _plain("div"), "MatMul": _plain("matmul"),
    "Relu": _plain("relu"), "Sigmoid": _plain("sigmoid"), "Tanh": _plain("tanh"), "Erf": _plain("erf"),
    "Exp": _plain("exp"), "Sqrt": _plain("sqrt"),
}  # fmt: skip
