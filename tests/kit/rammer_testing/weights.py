"""Random weights and inputs that expose wrong results, and models with intermediate values as outputs.

A network with equal weights, or with batch norms that do not match its activations, gives the same output for any input. A test
that compares this output proves nothing. :func:`reseed` makes the output depend on the input. :func:`strip_final_softmax`
prevents the softmax from hiding differences. :func:`with_all_outputs` exposes every intermediate value.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

# Tensors above this many elements are hidden from shape inference. Shape operands are shorter, and copying and serialising
# VGG-19's 574 MB for a hundred shapes would take seconds.
_SMALL_TENSOR: Final = 1024

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class InputSpec:
    """The description of one input: integers are uniform in [low, high), floats N(0, 1) clipped to [low, high]."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float = -math.inf
    high: float = math.inf


InputSet = tuple[InputSpec, ...]


def random_inputs(specs: Iterable[InputSpec], seed: int) -> dict[str, Array]:
    """Return arrays for ``specs`` by input name, determined by the seed."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for spec in specs:
        dtype = np.dtype(spec.dtype)
        if dtype.kind in "iu":
            feeds[spec.name] = rng.integers(int(spec.low), int(spec.high), spec.shape, dtype=dtype)
        else:
            normal = rng.standard_normal(spec.shape, dtype=np.float32)
            feeds[spec.name] = normal.clip(spec.low, spec.high).astype(dtype)
    return feeds


def graph_inputs(model: onnx.ModelProto) -> list[InputSpec]:
    """Return the inputs of ``model`` that are not initialisers. Raises ValueError if a shape is not static."""
    weights = {tensor.name for tensor in model.graph.initializer}
    specs: list[InputSpec] = []
    for value in model.graph.input:
        if value.name in weights:
            continue
        shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        if 0 in shape:
            raise ValueError(f"input {value.name!r} has no static shape: bind its dimensions first")
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        low, high = (0, 2) if dtype.kind in "iu" else (-math.inf, math.inf)
        specs.append(InputSpec(value.name, dtype.name, shape, low, high))
    return specs


@dataclass(frozen=True)
class _Weight:
    """A tensor to draw: its shape, its role, and the number of products per result (weights only)."""

    shape: tuple[int, ...]
    role: str
    fan_in: int


def reseed(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Return a copy of ``model`` with random weights for which different inputs give visibly different outputs.

    Convolution and matrix weights have standard deviation sqrt(2 / fan_in) (He et al., arXiv 1502.01852), biases 0.1, scales 0.1
    around 1. Batch-norm mean and variance come from one forward pass over a random input. In a model without batch norm this pass
    centres the convolutions' biases. Without this, deep models give the same output for any input. Weights that ConstantOfShape
    generates become initialisers. Raises ValueError for a ConstantOfShape of unknown use, and for an input without static shape.
    """
    out = onnx.ModelProto()
    out.CopyFrom(model)
    rng = np.random.default_rng(seed)
    for name, weight in _take_weights(out).items():
        # Filled in place: appending would copy a classifier's weights (hundreds of megabytes) again.
        tensor = out.graph.initializer.add(name=name, dims=weight.shape, data_type=onnx.TensorProto.FLOAT)
        tensor.raw_data = _draw(rng, weight).astype("<f4", copy=False).tobytes()
    calibrate(out, seed)
    return out


def _take_weights(model: onnx.ModelProto) -> dict[str, _Weight]:
    """Remove the float weights, and the nodes that fill them, from ``model``; return their roles by name."""
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    fills = {n.output[0]: n for n in graph.node if n.op_type == "ConstantOfShape" and n.input[0] in tensors}
    shapes = {t.name: tuple(t.dims) for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    shapes |= {name: _integers(tensors[fill.input[0]]) for name, fill in fills.items()}
    weights = _roles(graph, shapes, tensors)
    if unknown := sorted(fills.keys() - weights.keys()):
        raise ValueError(f"no operator determines the use of these weights: {', '.join(unknown)}")
    kept = [node for node in graph.node if node.output[0] not in fills]
    read = {name for node in kept for name in node.input}
    constants = [t for t in graph.initializer if t.name in read and t.name not in weights]
    inputs = [value for value in graph.input if value.name not in tensors]
    del graph.node[:], graph.initializer[:], graph.input[:]
    graph.node.extend(kept)
    graph.initializer.extend(constants)
    graph.input.extend(inputs)
    # Since IR version 4 an initialiser need not be an input as well.
    model.ir_version = max(model.ir_version, 4)
    return weights


def _integers(tensor: onnx.TensorProto) -> tuple[int, ...]:
    return tuple(int(value) for value in numpy_helper.to_array(tensor).ravel())


def _roles(
    graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, onnx.TensorProto]
) -> dict[str, _Weight]:
    """Return the roles of the tensors in ``shapes``, determined by their first reader; tensors of unknown use are omitted."""
    # For each value that is a weight, possibly reshaped: the weight's name and the shape that its reader sees.
    seen = {name: (name, shape) for name, shape in shapes.items()}
    weights: dict[str, _Weight] = {}
    for node in graph.node:
        if node.op_type in ("Unsqueeze", "Reshape") and node.input[0] in seen:
            name, shape = seen[node.input[0]]
            if node.op_type == "Reshape" and node.input[1] in tensors:
                shape = _integers(tensors[node.input[1]])
            seen[node.output[0]] = (name, shape)
            continue
        for position, read in enumerate(node.input):
            if read not in seen:
                continue
            name, shape = seen[read]
            role = _role(node, position, reshaped=read != name)
            if role is not None:
                weights.setdefault(name, _Weight(shapes[name], role, _fan_in(node, shape)))
    return weights


def _role(node: onnx.NodeProto, position: int, *, reshaped: bool) -> str | None:
    """Return the role of the operand at ``position``: weight, bias, scale, mean or variance; None if it must stay."""
    if position == 0 and node.op_type not in ("Mul", "Add"):
        return None
    if node.op_type == "BatchNormalization":
        return ("scale", "bias", "mean", "variance")[position - 1]
    if node.op_type in ("Conv", "Gemm"):
        return "weight" if position == 1 else "bias"
    # Only reshaped vectors: a bare Mul or Add operand may be an epsilon or a step size, which must stay.
    if node.op_type in ("Mul", "Add") and reshaped:
        return "scale" if node.op_type == "Mul" else "bias"
    return None


def _fan_in(node: onnx.NodeProto, shape: tuple[int, ...]) -> int:
    """Return the number of products per result of the Conv or Gemm ``node`` with weights of ``shape``."""
    if node.op_type == "Gemm" and not any(a.name == "transB" and a.i for a in node.attribute):
        return shape[0]
    return math.prod(shape[1:])


def _draw(rng: np.random.Generator, weight: _Weight) -> Array:
    if weight.role in ("mean", "variance"):
        return np.full(weight.shape, float(weight.role == "variance"), np.float32)
    values = rng.standard_normal(weight.shape, dtype=np.float32)
    values *= np.float32(math.sqrt(2.0 / weight.fan_in) if weight.role == "weight" else 0.1)
    return values + np.float32(1.0) if weight.role == "scale" else values


def calibrate(model: onnx.ModelProto, seed: int) -> None:
    """Fit ``model``'s normalisation to the activations of one forward pass over a random input, in place. Sets the mean and
    variance of batch norms if the model has any, else the biases of convolutions."""
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    biased = [node for node in model.graph.node if node.op_type == "Conv" and len(node.input) == 3]
    convs = [node for node in biased if node.input[2] in tensors]
    if norms:
        _fit_norms(model, norms, tensors, seed)
    elif convs:
        _fit_biases(model, convs, tensors, seed)


def _fit_norms(
    model: onnx.ModelProto,
    norms: Sequence[onnx.NodeProto],
    tensors: Mapping[str, onnx.TensorProto],
    seed: int,
) -> None:
    """Set every batch norm's mean and variance to its input's, in one pass that normalises progressively."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            # For one image, instance norm equals batch norm with the image's statistics, so one pass suffices.
            epsilon = {a.name: a.f for a in node.attribute if a.name == "epsilon"}
            node = helper.make_node("InstanceNormalization", node.input[:3], node.output[:1], **epsilon)
        nodes.append(node)
    sources = list(dict.fromkeys(node.input[0] for node in norms))
    values = forward(_probe(model, nodes, (), sources), random_inputs(graph_inputs(model), seed))
    for node in norms:
        value = values[node.input[0]].astype(np.float64)
        axes = (0, *range(2, value.ndim))
        variance = value.var(axis=axes)
        # A channel disabled by a ReLU has zero variance, and dividing by it would dominate all other channels.
        variance = np.maximum(variance, 1e-3 * variance.mean())
        _set(tensors[node.input[3]], value.mean(axis=axes))
        _set(tensors[node.input[4]], variance)


def _fit_biases(
    model: onnx.ModelProto,
    convs: Sequence[onnx.NodeProto],
    tensors: Mapping[str, onnx.TensorProto],
    seed: int,
) -> None:
    """Shift every convolution's bias so that its channels centre on the drawn bias in one pass.

    ReLU makes all activations positive. Without batch norm each channel thus carries a constant far larger than the effect of the
    input. SqueezeNet's outputs for two inputs differ by 0.009 before this."""
    nodes: list[onnx.NodeProto] = []
    columns: list[onnx.TensorProto] = []
    for node in model.graph.node:
        if node not in convs:
            nodes.append(node)
            continue
        out, bias = node.output[0], numpy_helper.to_array(tensors[node.input[2]])
        raw = helper.make_node("Conv", node.input[:2], [f"{out}#raw"])
        raw.attribute.extend(node.attribute)
        rank = len(tensors[node.input[1]].dims)
        columns.append(numpy_helper.from_array(bias.reshape(-1, *[1] * (rank - 2)), f"{out}#bias"))
        nodes += [
            raw,
            helper.make_node("GlobalAveragePool", [f"{out}#raw"], [f"{out}#mean"]),
            helper.make_node("Sub", [f"{out}#raw", f"{out}#mean"], [f"{out}#centred"]),
            helper.make_node("Add", [f"{out}#centred", f"{out}#bias"], [out]),
        ]
    wanted = [f"{node.output[0]}#mean" for node in convs]
    values = forward(_probe(model, nodes, columns, wanted), random_inputs(graph_inputs(model), seed))
    for node, name in zip(convs, wanted, strict=True):
        bias = numpy_helper.to_array(tensors[node.input[2]])
        _set(tensors[node.input[2]], bias - values[name].mean(axis=0).ravel())


def _set(tensor: onnx.TensorProto, array: Array) -> None:
    tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))


def _probe(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    added: Sequence[onnx.TensorProto],
    outputs: Sequence[str],
) -> onnx.ModelProto:
    """Return ``model`` with its nodes replaced by ``nodes``, reduced to the part that ``outputs`` need: classifiers are large."""
    live = set(outputs)
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if live.intersection(node.output):
            kept.append(node)
            live.update(_reads(node))
    probe = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    probe.graph.name = model.graph.name
    probe.graph.node.extend(reversed(kept))
    probe.graph.input.extend(model.graph.input)
    probe.graph.initializer.extend(t for t in (*model.graph.initializer, *added) if t.name in live)
    probe.graph.output.extend(_value_infos(probe, outputs))
    return probe


def forward(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return every output of ``model`` by name, from onnxruntime on the CPU or, without it, from onnx.reference."""
    return runner(model)(feeds)


def runner(model: onnx.ModelProto) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """Return :func:`forward` prepared for many inputs: loading half a gigabyte takes longer than a run."""
    names = [value.name for value in model.graph.output]
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError:
        engine: Any = importlib.import_module("onnx.reference").ReferenceEvaluator(model)
    else:
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        # Packing weights for speed doubles the loading time, and these models run only a few times.
        options.add_session_config_entry("session.disable_prepacking", "1")
        content = model.SerializeToString()
        engine = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda feeds: dict(zip(names, engine.run(names, dict(feeds)), strict=True))


def strip_final_softmax(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose outputs are read before a final Softmax, if present: a softmax hides differences."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    producers = {name: node for node in out.graph.node for name in node.output}
    outputs: list[str] = []
    for value in out.graph.output:
        name = value.name
        node = producers.get(name)
        while node is not None and node.op_type == "Identity":
            node = producers.get(node.input[0])
        outputs.append(node.input[0] if node is not None and node.op_type == "Softmax" else name)
    infos = _value_infos(out, list(dict.fromkeys(outputs)))
    del out.graph.output[:]
    out.graph.output.extend(infos)
    live = set(outputs)
    kept: list[onnx.NodeProto] = []
    for node in reversed(out.graph.node):
        # Nodes that lead only to the softmax are removed. Nodes that were already dead stay.
        if node.op_type not in ("Softmax", "Identity") or live.intersection(node.output):
            kept.append(node)
            live.update(_reads(node))
    del out.graph.node[:]
    out.graph.node.extend(reversed(kept))
    return out


def with_all_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which every computed value is an output, the model's outputs first."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    own = [value.name for value in out.graph.output]
    computed = [name for node in out.graph.node for name in _computed(node)]
    out.graph.output.extend(_value_infos(out, [name for name in dict.fromkeys(computed) if name not in own]))
    return out


def _computed(node: onnx.NodeProto) -> list[str]:
    """Return the outputs of ``node`` to compare: constants and dropout masks (unused at inference) are excluded."""
    if node.op_type == "Constant":
        return []
    return [name for name in (node.output[:1] if node.op_type == "Dropout" else node.output) if name]


def _reads(node: onnx.NodeProto) -> set[str]:
    """Return the values that ``node`` reads, including those of its sub-graphs."""
    names = set(node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            names.update(value.name for value in graph.output)
            names.update(*(_reads(inner) for inner in graph.node))
    return names


def _value_infos(model: onnx.ModelProto, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
    """Return the name and inferred type of each of ``names``; the type is missing if inference fails."""
    graph = model.graph
    skeleton = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    skeleton.functions.extend(model.functions)
    bare = skeleton.graph
    bare.name = graph.name
    bare.node.extend(graph.node)
    bare.input.extend(graph.input)
    bare.value_info.extend(graph.value_info)
    bare.output.extend(graph.output)
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _SMALL_TENSOR:
            bare.initializer.append(tensor)
        else:
            bare.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    known = {value.name: value for value in (*inferred.value_info, *inferred.input, *graph.output)}
    return [known.get(name, onnx.ValueInfoProto(name=name)) for name in names]
