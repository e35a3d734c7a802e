"""Mixtures of experts: the router selects a few networks per token, and their results are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import ml_dtypes
import numpy as np

from rammer.frontend.lower.contrib.blocks import emit_unpack, unpack_bits
from rammer.frontend.lower.contrib.function import Array, Declined, FunctionBody, contrib_function

#: Input indices of a projection: weights, bias and, for integers, scales and zero points.
_FLOATS = ((2, 3), (4, 5), (6, 7))
_INTEGERS = ((2, 4, 3, 11), (5, 7, 6, 12), (8, 10, 9, 13))
#: QMoE ignores routing weights up to this value, as ONNX Runtime does.
_LEAST_SHARE = 1e-8
#: Function from expert numbers ("" for all experts in order) to weights ``[experts, rows, columns]``.
Weights: TypeAlias = Callable[[str], str]


@dataclass(frozen=True)
class Routes:
    """The chosen experts of each token: numbers ``which`` and weights ``share``, both ``[tokens, k]``. If ``gathered``, each pair
    of token and expert is computed with weights gathered for it. Otherwise all experts compute all tokens."""

    tokens: int
    experts: int
    k: int
    which: str
    share: str

    @property
    def gathered(self) -> bool:
        """True if gathering reads fewer weights than the experts have."""
        return self.tokens * self.k < self.experts


def select_experts(b: FunctionBody, scores: str, experts: int, k: int) -> tuple[str, str]:
    """Return the ``k`` greatest of ``scores [tokens, experts]`` and their indices; among equal scores, the last indices."""
    backward = [b.constant([v]) for v in (-1, -(experts + 1), 1, -1)]
    best, place = b.op("TopK", b.Slice(scores, *backward), b.constant([k]), outputs=2, axis=1)
    return best, b.Sub(b.constant(experts - 1), place)


def normalised_shares(b: FunctionBody, shares: str) -> str:
    """Return the shares divided by their sum over a token's experts."""
    return b.Div(shares, b.ReduceSum(shares, b.constant([1]), keepdims=1))


def check_router(b: FunctionBody) -> tuple[int, int, int]:
    """Return the numbers of tokens, experts and chosen experts. Raise Declined if operands or attributes do not match."""
    shape, (rows, experts), k = b.shape(0), b.shape(1, 2), b.attr("k")
    tokens = int(np.prod(shape[:-1]))
    if len(shape) not in (2, 3) or rows != tokens:
        raise Declined(f"a router of {rows} rows for an input of {list(shape)}")
    if not 1 <= k <= experts:
        raise Declined(f"k is {k}, of {experts} experts")
    if b.attr("use_sparse_mixer") and k != 2:
        raise Declined(f"the sparse mixer needs k=2, and k is {k}")
    return tokens, experts, k


@dataclass(frozen=True)
class Experts:
    """The networks of one use: sizes, and weights and bias of up to three projections."""

    hidden: int
    inner: int
    fused: bool  #: The first projection includes the rows of the third.
    weights: tuple[Weights | None, Weights | None, Weights | None]
    biases: tuple[str, str, str]

    def mixed(self, b: FunctionBody, routes: Routes) -> str:
        """Return the weighted sum of the chosen experts' results, ``[tokens, hidden]``, in float32."""
        tokens, experts, k = routes.tokens, routes.experts, routes.k
        x = b.cast(b.input(0), "float32")
        if routes.gathered:
            rows = b.Expand(b.reshape(x, tokens, 1, 1, self.hidden), b.constant([1, k, 1, 1]))
            chosen = b.reshape(routes.which, tokens * k)
            y = b.reshape(self.computed(b, b.reshape(rows, tokens * k, 1, self.hidden), chosen), tokens, k, self.hidden)
            shares = b.Unsqueeze(routes.share, b.constant([2]))
            return b.ReduceSum(_apply_shares(b, y, shares), b.constant([1]), keepdims=0)
        is_chosen = b.Equal(b.Unsqueeze(routes.which, b.constant([2])), b.constant(np.arange(experts)))
        shares = b.Where(is_chosen, b.Unsqueeze(routes.share, b.constant([2])), b.constant(0, "float32"))
        shares = b.Unsqueeze(b.ReduceSum(shares, b.constant([1]), keepdims=0), b.constant([2]))
        y = self.computed(b, b.reshape(x, 1, tokens, self.hidden), "")
        return b.ReduceSum(_apply_shares(b, y, b.Transpose(shares, perm=[1, 0, 2])), b.constant([0]), keepdims=0)

    def computed(self, b: FunctionBody, x: str, chosen: str) -> str:
        """Return the results of experts ``chosen`` for ``x [experts or 1, rows, hidden]``."""
        first = self._apply_projection(b, x, 0, chosen)
        third = self._apply_projection(b, x, 2, chosen) if self.weights[2] is not None else ""
        if b.attr("activation_type") == "swiglu":
            first = _apply_swiglu(b, *(_split_gates(b, first, self.inner) if self.fused else (first, third)))
        else:
            first = _apply_activation(b, first)
            first = b.Mul(first, third) if third else first
        return self._apply_projection(b, first, 1, chosen)

    def _apply_projection(self, b: FunctionBody, x: str, place: int, chosen: str) -> str:
        made, bias = self.weights[place], self.biases[place]
        assert made is not None
        y = b.MatMul(x, b.Transpose(made(chosen), perm=[0, 2, 1]))
        if not bias:
            return y
        bias = b.cast(b.Gather(bias, chosen, axis=0) if chosen else bias, "float32")
        return b.Add(y, b.Unsqueeze(bias, b.constant([1])))


def _apply_shares(b: FunctionBody, y: str, shares: str) -> str:
    """Return ``y * shares``, 0 where a share is 0: infinities of other experts do not enter the sum."""
    zero = b.constant(0, "float32")
    return b.Where(b.Equal(shares, zero), zero, b.Mul(y, shares))


def _apply_activation(b: FunctionBody, x: str) -> str:
    name = b.attr("activation_type")
    if name == "relu":
        return b.Relu(x)
    if name == "gelu":
        return b.Gelu(x, approximate="tanh")
    if name == "silu":
        return b.Mul(x, b.Sigmoid(x))
    if name == "identity":
        return x
    raise Declined(f"the activation {name!r} is unknown; relu, gelu, silu, swiglu and identity are supported")


def _split_gates(b: FunctionBody, x: str, inner: int) -> tuple[str, str]:
    """Split the columns of ``x`` into gates and values, interleaved or in halves."""
    if b.attr("swiglu_fusion") == 1:
        ends, axis, step = b.constant([2 * inner]), b.constant([2]), b.constant([2])
        gate, value = (b.Slice(x, b.constant([i]), ends, axis, step) for i in range(2))
    else:
        gate, value = b.split(x, 2, [inner, inner])
    return gate, value


def _apply_swiglu(b: FunctionBody, gate: str, value: str) -> str:
    """Return ``G * Sigmoid(alpha * G) * (V + beta)`` of clamped gates and values."""
    limit, alpha, beta = b.attr("swiglu_limit"), b.attr("activation_alpha"), b.attr("activation_beta")
    if limit != ():
        least, most = b.constant(-limit, "float32"), b.constant(limit, "float32")
        gate, value = b.Clip(gate, "", most), b.Clip(value, least, most)
    opening = b.Sigmoid(b.Mul(gate, b.constant(alpha, "float32")) if alpha != 1 else gate)
    value = b.Add(value, b.constant(beta, "float32")) if beta else value
    return b.Mul(b.Mul(gate, opening), value)


def check_fusion(b: FunctionBody, has_third: bool) -> bool:
    """Return True if the first projection includes the rows of the third."""
    if b.attr("activation_type") != "swiglu":
        return False
    fusion = b.attr("swiglu_fusion")
    if fusion not in (0, 1, 2) or has_third == bool(fusion):
        raise Declined(f"swiglu_fusion is {fusion} {'with' if has_third else 'without'} a third projection")
    return bool(fusion)


def _restore_output(b: FunctionBody, y: str) -> str:
    return b.cast(b.reshape(y, *b.shape(0)), b.dtype())


@contrib_function(
    "MoE",
    "input: T, router_probs: T, fc1_experts_weights: T, fc1_experts_bias?: T, fc2_experts_weights: T, fc2_experts_bias?: T,"
    " fc3_experts_weights?: T, fc3_experts_bias?: T -> output: T",
    k=1, activation_type="relu", normalize_routing_weights=0, use_sparse_mixer=0, activation_alpha=1.0, activation_beta=0.0,
    swiglu_limit=float | None, swiglu_fusion=0,
)  # fmt: skip
def mixture_of_experts(b: FunctionBody) -> str:
    """Expand MoE: routing weights are the greatest values of the softmax over all experts."""
    tokens, experts, k = check_router(b)
    hidden = b.shape(0)[-1]
    inner = int(np.prod(b.shape(4, 3)[1:])) // max(hidden, 1)
    fused = check_fusion(b, b.has(6))
    rows = (inner * (2 if fused else 1), hidden, inner)
    weights: list[Weights | None] = []
    for (place, _), count in zip(_FLOATS, rows, strict=True):
        weights.append(_stored_weights(b, place, (experts, count, inner if place == 4 else hidden)) if b.has(place) else None)
    biases = tuple(b.input(place) for _, place in _FLOATS)
    share, which = select_experts(b, b.Softmax(b.cast(b.input(1), "float32"), axis=1), experts, k)
    share = normalised_shares(b, share) if b.attr("normalize_routing_weights") else share
    network = Experts(hidden, inner, fused, (weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]))
    return _restore_output(b, network.mixed(b, Routes(tokens, experts, k, which, share)))


def _stored_weights(b: FunctionBody, place: int, shape: tuple[int, int, int]) -> Weights:
    """Return weights unchanged. An older shape with rows and columns exchanged has the same memory layout."""
    given = b.shape(place, 3)
    if given[0] != shape[0] or sorted(given[1:]) != sorted(shape[1:]):
        raise Declined(f"input {place} has the shape {list(given)}, where it needs {list(shape)}")
    stored = b.input(place) if given == shape else b.reshape(b.input(place), *shape)
    return lambda chosen: b.cast(b.Gather(stored, chosen, axis=0) if chosen else stored, "float32")


@contrib_function(
    "QMoE",
    "input: T, router_probs: T, fc1_experts_weights: U, fc1_scales?: S, fc1_experts_bias?: T, fc2_experts_weights: U,"
    " fc2_scales?: S, fc2_experts_bias?: T, fc3_experts_weights?: U, fc3_scales?: S, fc3_experts_bias?: T,"
    " fc1_zero_points?: U, fc2_zero_points?: U, fc3_zero_points?: U, router_weights?: T, fc1_global_scale?: F,"
    " fc2_global_scale?: F, fc1_act_scale?: F, fc2_act_scale?: F, fc1_act_block_scale?: S, fc2_act_block_scale?: S -> output: T",
    k=1, activation_type="relu", normalize_routing_weights=0, use_sparse_mixer=0, activation_alpha=1.0, activation_beta=0.0,
    swiglu_limit=float | None, swiglu_fusion=0, expert_weight_bits=4, fc1_expert_weight_bits=int | None,
    fc2_expert_weight_bits=int | None, fc3_expert_weight_bits=int | None, block_size=int | None, quant_type="int",
    weights_prepacked=-1, accuracy_level=0,
)  # fmt: skip
def quantised_mixture_of_experts(b: FunctionBody) -> str:
    """Expand QMoE: integer weights with a scale per row or block; routing weights are the softmax over the chosen experts."""
    tokens, experts, k = check_router(b)
    if b.attr("quant_type") != "int" or any(b.has(place) for place in range(15, 21)):
        raise Declined(f"weights of quant_type {b.attr('quant_type')!r} are not supported; 'int' is")
    if b.attr("weights_prepacked") == 1:
        raise Declined("weights in a kernel-specific order are not supported")
    hidden, third = b.shape(0)[-1], b.has(8)
    fused = check_fusion(b, third)
    bits = [b.use.attr(f"fc{i}_expert_weight_bits", b.attr("expert_weight_bits")) for i in (1, 2, 3)]
    if not {2, 4, 8}.issuperset(bits):
        raise Declined(f"weights of {bits} bits are not supported; 2, 4 and 8 are")
    inner = int(np.prod(b.shape(5, 3)[1:])) * (8 // bits[1]) // max(hidden, 1)
    rows = (inner * (2 if fused else 1), hidden, inner)
    weights: list[Weights | None] = []
    for places, count, width in zip(_INTEGERS, rows, bits, strict=True):
        stored = StoredIntegers(places[0], places[2], places[3], width, (experts, count, inner if places[0] == 5 else hidden))
        weights.append(stored.checked(b) if b.has(places[0]) else None)
    biases = tuple(b.input(places[1]) for places in _INTEGERS)
    scores = b.cast(b.input(1), "float32")
    best, which = select_experts(b, scores, experts, k)
    share = _given_shares(b, which) if b.has(14) else b.Softmax(best, axis=1)
    share = b.Where(b.Greater(share, b.constant(_LEAST_SHARE, "float32")), share, b.constant(0, "float32"))
    network = Experts(hidden, inner, fused, (weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]))
    return _restore_output(b, network.mixed(b, Routes(tokens, experts, k, which, share)))


def _given_shares(b: FunctionBody, which: str) -> str:
    """Return the routing weights of ``router_weights`` for the chosen experts."""
    if b.shape(14) != b.shape(1):
        raise Declined(f"router_weights have the shape {list(b.shape(14))}, where the router has {list(b.shape(1))}")
    share = b.GatherElements(b.cast(b.input(14), "float32"), which, axis=1)
    if not b.attr("normalize_routing_weights"):
        return share
    total, zero = b.ReduceSum(share, b.constant([1]), keepdims=1), b.constant(0, "float32")
    return b.Where(b.Equal(total, zero), zero, b.Div(share, total))


@dataclass(frozen=True)
class StoredIntegers:
    """Packed integers of ``bits`` in bytes, with scales and zero points at these input indices. ``shape`` is experts, rows,
    columns."""

    place: int
    scale: int
    zero: int
    bits: int
    shape: tuple[int, int, int]

    def checked(self, b: FunctionBody) -> Weights:
        """Return the dequantised weights. Raise Declined if shapes do not match."""
        experts, rows, columns = self.shape
        if int(np.prod(b.shape(self.place, 3))) * 8 != experts * rows * columns * self.bits or columns * self.bits % 8:
            raise Declined(
                f"input {self.place} has the shape {list(b.shape(self.place))}, for {list(self.shape)} of {self.bits} bits"
            )
        if not b.has(self.scale) or self.blocks(b) == 0:
            raise Declined(f"input {self.place} has no scales for each of its rows or blocks")
        codes, zero = b.known(self.place), b.known(self.zero) if b.has(self.zero) else np.zeros(0, np.uint8)
        fixed = self.numbers(b, codes, zero) if codes is not None and zero is not None else ""
        return lambda chosen: self.gathered(b, chosen) if chosen or not fixed else fixed

    def blocks(self, b: FunctionBody) -> int:
        """Return the number of scales of a row; 0 if the scales have another shape."""
        experts, rows, columns = self.shape
        block, shape = b.use.attr("block_size", 0), b.shape(self.scale)
        if shape == (experts, rows):
            return 1
        whole = len(shape) == 3 and shape[:2] == (experts, rows)
        return shape[2] if whole and shape[2] == (-(-columns // block) if block > 0 else 1) else 0

    def scaled(self, b: FunctionBody, codes: str, scales: str, zero: str) -> str:
        """Return the dequantised values of ``codes``."""
        blocks = self.blocks(b)
        scales = b.cast(scales, "float32")
        scales = b.Unsqueeze(scales, b.constant([2])) if len(b.shape(self.scale)) == 2 else scales
        return b.DequantizeLinear(codes, scales, zero, axis=2, block_size=b.attr("block_size") if blocks > 1 else self.shape[2])

    def numbers(self, b: FunctionBody, packed: Array, zero: Array) -> str:
        """Return all weights, dequantised from constants."""
        experts, rows, columns = self.shape
        codes = b.constant(np.ascontiguousarray(unpack_bits(packed.reshape(experts, rows, -1), self.bits, columns)))
        blocks = self.blocks(b)
        if not b.has(self.zero):
            points = np.full((experts, rows, blocks), 1 << (self.bits - 1), np.uint8)
        elif len(b.shape(self.scale)) == 2:
            points = unpack_bits(zero.reshape(experts, -1), self.bits, rows)[..., None]
        else:
            points = unpack_bits(zero.reshape(experts, rows, -1), self.bits, blocks)
        kind = np.uint8 if self.bits == 8 else ml_dtypes.uint4
        return self.scaled(b, codes, b.input(self.scale), b.constant(np.ascontiguousarray(points.astype(kind))))

    def gathered(self, b: FunctionBody, chosen: str) -> str:
        """Return the weights of the ``chosen`` experts, or of all experts if ``chosen`` is ""."""

        def picked(place: int, *shape: int) -> str:
            given = b.reshape(b.input(place), *shape) if shape else b.input(place)
            return b.Gather(given, chosen, axis=0) if chosen else given

        experts, rows, columns = self.shape
        codes = emit_unpack(b, picked(self.place, experts, rows, columns * self.bits // 8), self.bits, columns)
        blocks = self.blocks(b)
        if not b.has(self.zero):
            zero = b.Expand(b.constant(1 << (self.bits - 1), "uint8"), b.Shape(picked(self.scale)))
        else:
            zero = emit_unpack(b, picked(self.zero), self.bits, rows if len(b.shape(self.zero)) == 2 else blocks)
        zero = b.Unsqueeze(zero, b.constant([2])) if len(b.shape(self.scale)) == 2 else zero
        return self.scaled(b, codes, picked(self.scale), zero)
