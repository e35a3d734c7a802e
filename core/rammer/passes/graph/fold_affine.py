"""Folding of batch norms and other channel-wise affine maps into the weights of an adjacent layer. All arithmetic is done in
float64 and rounded once to the weights' type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final, TypeAlias

import numpy as np

from rammer.ir.constants.recipes import scale_array
from rammer.ir.graph import Node
from rammer.ir.graph_rewriter import GraphRewriter, RewritePass, is_operator
from rammer.ir.types import TensorType, is_float

Array: TypeAlias = np.ndarray
#: y[c] = scale[c] * x[c] + shift[c], in float64.
Affine: TypeAlias = "tuple[Array, Array]"

_NORMS: Final = ("BatchNormalization", "InstanceNormalization", "GroupNormalization")
_LAYERS: Final = ("Conv", "ConvTranspose", "Gemm", *_NORMS)


class _Folding(GraphRewriter):
    def rule(self, node: Node) -> bool:
        return self._into_producer(node) or self._into_consumer(node)

    def _into_producer(self, node: Node) -> bool:
        """Fold ``node``, an affine map of a layer's result, into the layer's weights. Return True if it was folded."""
        source = _varying_operand(node, self.constants)
        layer = self.producers.get(source or "")
        if source is None or layer is None or self.counts[source] != 1 or not is_operator(layer, *_LAYERS):
            return False
        affine = _match_affine(node, source, self.types[source], self.constants, self.types[node.outputs[0]])
        inputs = None if affine is None or any(layer.outputs[1:]) else self._absorb_affine(layer, affine)
        if inputs is None:
            return False
        attributes = {k: v for k, v in layer.attributes.items() if layer.op != "Gemm" or k not in ("alpha", "beta")}
        self.replace_node(layer, replace(layer, inputs=inputs, outputs=(node.outputs[0],), attributes=attributes))
        return True

    def _absorb_affine(self, layer: Node, affine: Affine) -> tuple[str, ...] | None:
        """Return the inputs of ``layer`` after absorbing an affine map of its result."""
        operands = [self.constants.get(n) for n in layer.inputs]
        if layer.op in _NORMS:
            return self._absorbed_by_norm(layer, affine)
        weight = operands[1] if len(operands) > 1 else None
        biased = len(layer.inputs) > 2 and bool(layer.inputs[2])
        if weight is None or not is_float(str(weight.dtype)) or (biased and operands[2] is None):
            return None
        bias = operands[2].astype(np.float64) if biased and operands[2] is not None else np.zeros(1)
        scale, shift = affine
        factors = _weight_factors(layer, weight, scale)
        new_weight = scale_array(weight, factors)
        if layer.op == "Gemm":
            bias = bias * layer.attributes.get("beta", 1.0)
            if layer.attributes.get("alpha", 1.0) != 1.0:
                new_weight = weight.astype(np.float64) * layer.attributes["alpha"] * factors
        new_bias = scale * bias + shift
        if layer.op != "Gemm":
            new_bias = np.broadcast_to(new_bias, (_output_channels(layer, weight),))
        first = self._rounded(layer.inputs[1], new_weight, weight)
        return layer.inputs[0], first, self._rounded(f"{layer.outputs[0]}_bias", new_bias, weight)

    def _absorbed_by_norm(self, layer: Node, affine: Affine) -> tuple[str, ...] | None:
        scale, bias = self.constants.get(layer.inputs[1]), self.constants.get(layer.inputs[2])
        if scale is None or bias is None or layer.attributes.get("training_mode", 0):
            return None
        if any(a.size not in (1, scale.size) for a in affine):  # a norm of groups may have a scale per group
            return None
        new_scale = np.broadcast_to(affine[0] * scale.astype(np.float64), scale.shape)
        new_bias = np.broadcast_to(affine[0] * bias.astype(np.float64) + affine[1], bias.shape)
        first, second = self._rounded(layer.inputs[1], new_scale, scale), self._rounded(layer.inputs[2], new_bias, bias)
        return layer.inputs[0], first, second, *layer.inputs[3:]

    def _into_consumer(self, conv: Node) -> bool:
        """Fold an affine map before ``conv`` into the weights of ``conv``. Return True if it was folded."""
        node = self.producers.get(conv.inputs[0]) if is_operator(conv, "Conv") else None
        if node is None or self.counts[conv.inputs[0]] != 1:
            return False
        source = _varying_operand(node, self.constants)
        if source is None or source not in self.types:
            return False
        affine = _match_affine(node, source, self.types[source], self.constants, self.types[conv.inputs[0]])
        inputs = None if affine is None else self._absorbed_before(conv, affine)
        if inputs is None:
            return False
        self.replace_node(node)
        self.append(replace(conv, inputs=(source, *inputs)))
        return True

    def _absorbed_before(self, conv: Node, affine: Affine) -> tuple[str, str] | None:
        """Return the weights and bias of ``conv`` after absorbing an affine map of its input."""
        weight = self.constants.get(conv.inputs[1])
        biased = len(conv.inputs) > 2 and bool(conv.inputs[2])
        bias = self.constants.get(conv.inputs[2]) if biased else np.zeros(1)
        if weight is None or bias is None or (_has_padding(conv) and np.any(affine[1] != 0.0)):
            return None
        group = int(conv.attributes.get("group", 1))
        inner = (group, weight.shape[1])
        wide = weight.astype(np.float64).reshape(group, -1, *weight.shape[1:])
        per_input = (group, 1, weight.shape[1], *[1] * (weight.ndim - 2))
        scale = np.broadcast_to(affine[0], (group * weight.shape[1],)).reshape(inner)
        shift = np.broadcast_to(affine[1], (group * weight.shape[1],)).reshape(inner).reshape(per_input)
        new_weight = scale_array(weight, _by_group(scale, weight))
        new_bias = bias.astype(np.float64) + (wide * shift).reshape(weight.shape[0], -1).sum(axis=1)
        first = self._rounded(conv.inputs[1], new_weight, weight)
        return first, self._rounded(f"{conv.outputs[0]}_bias", new_bias, weight)

    def _rounded(self, near: str, value: Array, like: Array) -> str:
        """Add a constant, rounded to the type of ``like``, and return its name."""
        return self.add_constant(near, np.ascontiguousarray(value, like.dtype))


class FoldAffine(RewritePass):
    """A rewrite of ``Affine(Layer(x, w, b))`` to ``Layer(x, w', b')``, and of ``Conv(Affine(x), w, b)`` where it is exact.

    Affine: BatchNormalization in inference, or Add, Sub, Mul, Div with a constant per channel (axis 1) or a scalar. Layer: Conv,
    ConvTranspose, Gemm or a norm with a scale per channel, with a single consumer. A shift is folded forward into a Conv only
    without padding, since padding is zero after the affine map.
    """

    name: ClassVar[str] = "fold_affine"
    rewriter = _Folding


def _has_padding(conv: Node) -> bool:
    automatic = conv.attributes.get("auto_pad", "NOTSET")
    return automatic not in ("NOTSET", "VALID") or any(conv.attributes.get("pads", ()))


def _output_channels(layer: Node, weight: Array) -> int:
    if layer.op == "ConvTranspose":
        return int(weight.shape[1] * layer.attributes.get("group", 1))
    return int(weight.shape[0])


def _weight_factors(layer: Node, weight: Array, scale: Array) -> Array:
    """Return the factors of ``weight`` that multiply each output channel by its ``scale`` ([channels] or [1])."""
    if layer.op == "Gemm":
        return scale[:, None] if layer.attributes.get("transB", 0) else scale[None]
    if layer.op == "Conv":
        return scale.reshape(-1, *[1] * (weight.ndim - 1))
    group = int(layer.attributes.get("group", 1))
    return _by_group(np.broadcast_to(scale, (group * weight.shape[1],)).reshape(group, -1), weight)


def _by_group(scale: Array, weight: Array) -> Array:
    """Return factors of ``weight`` by group and position on the second axis; the first axis is that of all groups."""
    lines = scale if len(scale) == 1 else np.repeat(scale, weight.shape[0] // len(scale), axis=0)
    return lines.reshape(*lines.shape, *[1] * (weight.ndim - 2))


def _varying_operand(node: Node, constants: Mapping[str, Array]) -> str | None:
    """Return the varying operand of a node that may be an affine map."""
    if node.domain:
        return None
    if node.op == "BatchNormalization":
        return node.inputs[0]
    if node.op not in ("Add", "Sub", "Mul", "Div"):
        return None
    varying = [n for n in node.inputs if n not in constants]
    return varying[0] if len(varying) == 1 else None


def _match_affine(node: Node, source: str, kind: TensorType, constants: Mapping[str, Array], result: TensorType) -> Affine | None:
    """Return the affine map of each channel of ``source`` that ``node`` computes, or None if it is not one."""
    if result != kind or not is_float(kind.dtype) or len(kind.shape) < 2:
        return None
    if node.op == "BatchNormalization":
        return _match_batch_norm(node, constants)
    right = node.inputs[0] == source
    factor = _per_channel(constants[node.inputs[1 if right else 0]].astype(np.float64), len(kind.shape))
    if factor is None:
        return None
    one, zero = np.ones(1), np.zeros(1)
    if node.op == "Mul":
        return factor, zero
    if node.op == "Add":
        return one, factor
    if node.op == "Sub":
        return (one, -factor) if right else (-one, factor)
    return (1.0 / factor, zero) if right and bool(np.all(factor != 0.0)) else None


def _match_batch_norm(node: Node, constants: Mapping[str, Array]) -> Affine | None:
    parts = [constants.get(n) for n in node.inputs[1:5]]
    if any(p is None for p in parts) or node.attributes.get("training_mode", 0) or any(node.outputs[1:]):
        return None
    scale, bias, mean, variance = (p.astype(np.float64) for p in parts if p is not None)
    factor = scale / np.sqrt(variance + node.attributes.get("epsilon", 1e-5))
    return factor, bias - mean * factor


def _per_channel(value: Array, rank: int) -> Array | None:
    """Return a constant that varies at most along axis 1 of a value of ``rank``, as [channels] or [1]."""
    if value.ndim > rank:
        return None
    shape = (1,) * (rank - value.ndim) + value.shape
    if any(extent != 1 for axis, extent in enumerate(shape) if axis != 1):
        return None
    return value.reshape(-1)
