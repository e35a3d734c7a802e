"""Contrib operators of whole layers: mixtures of experts, recurrences and related operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer_testing.operators.case import Array, OperatorCase
from rammer_testing.operators.draw import Draw
from rammer_testing.operators.registry import describe_alone

_DOMAIN = "com.microsoft"


def _chosen(draw: Draw, activations: tuple[str, ...]) -> dict[str, Any]:
    """Draw the attributes that both kinds of mixtures share."""
    attributes: dict[str, Any] = {
        "activation_type": draw.either(*activations),
        "normalize_routing_weights": draw.either(None, 0, 1),
        "k": draw.either(None, 1, 2, 3),
    }
    if draw.chance(0.2):
        attributes |= {"k": 2, "use_sparse_mixer": 1}
    if attributes["activation_type"] == "swiglu":
        attributes |= {
            "swiglu_fusion": 1,
            "activation_alpha": draw.either(None, 1.702),
            "activation_beta": draw.either(None, 1.0),
            "swiglu_limit": draw.either(None, 0.5, 7.0),
        }
    return attributes


def _routed(draw: Draw, kind: str, hidden: int) -> tuple[Array, Array, int]:
    """Draw tokens, their router and the number of experts; some routers have ties between experts."""
    experts, shape = draw.size(3, 8), draw.either((draw.size(1, 5),), (draw.size(1, 2), draw.size(1, 4)))
    router = draw.array((int(np.prod(shape)), experts), kind)
    if draw.chance(0.2):
        router = np.round(router)
    return draw.array((*shape, hidden), kind), router, experts


@describe_alone(f"{_DOMAIN}.MoE")
def experts(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with constant or computed weights."""
    attributes = _chosen(draw, ("relu", "gelu", "silu", "identity", "swiglu"))
    hidden, inner = draw.size(1, 7), draw.size(1, 7)
    x, router, count = _routed(draw, "float32", hidden)
    rows = inner * (2 if attributes["activation_type"] == "swiglu" else 1)
    operands = (
        x,
        router,
        draw.array((count, rows, hidden)),
        draw.array((count, rows)) if draw.chance() else None,
        draw.array((count, hidden, inner)),
        draw.array((count, hidden)) if draw.chance() else None,
    )
    static = frozenset((2, 3, 4, 5)) if draw.chance() else frozenset()
    return OperatorCase(op, draw.either(17, 21), operands, attributes, static=static)


@describe_alone(f"{_DOMAIN}.QMoE")
def quantised_experts(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of 2-, 4- and 8-bit integers by rows, and of 4-bit ones by blocks. For other blocks ONNX Runtime also rounds
    the input to 8 bits."""
    attributes = _chosen(draw, ("relu", "gelu", "silu", "identity", "swiglu"))
    kind, bits, block = draw.either("float32", "float32", "float16"), draw.either(2, 4, 4, 8), draw.either(None, 16, 32)
    block = block if bits == 4 else None
    hidden, inner = (draw.either(32, 64) for _ in range(2))
    if block is None:
        hidden, inner = (8 * draw.size(1, 4) for _ in range(2))
    attributes |= {"expert_weight_bits": bits, "block_size": block}
    x, router, count = _routed(draw, kind, hidden)
    rows = inner * (2 if attributes["activation_type"] == "swiglu" else 1)
    operands: list[Array | None] = [x, router]
    points = draw.chance()
    zeros: list[Array | None] = []
    for shape in ((count, rows, hidden), (count, hidden, inner)):
        blocks = shape[:2] if block is None else (*shape[:2], shape[2] // block)
        operands.append(draw.array((*shape[:2], shape[2] * bits // 8), "uint8", low=0, high=255))
        operands.append(draw.array(blocks, kind, low=0.01, high=0.2))
        operands.append(draw.array(shape[:2], kind) if draw.chance() else None)
        packed = (*blocks[:-1], -(-blocks[-1] * bits // 8))
        zeros.append(draw.array(packed, "uint8", low=0, high=255) if points else None)
    operands += [None, None, None, *zeros, None]
    operands.append(draw.array(router.shape, kind, low=0.0, high=1.0) if draw.chance(0.3) else None)
    static = frozenset(range(2, 13)) if draw.chance(0.7) else frozenset()
    return OperatorCase(op, 21, tuple(operands), attributes, static=static)


@describe_alone(f"{_DOMAIN}.MatMulBnb4")
def four_bits(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with sizes that no block divides; ONNX Runtime treats transB=0 as 1."""
    rows, depth, block = draw.size(1, 9), draw.size(1, 40), draw.either(16, 32, 64)
    count = rows * depth
    operands = (
        draw.array((*draw.shape(1, 3), depth)),
        draw.array((-(-count // 2),), "uint8", low=0, high=255),
        draw.array((-(-count // block),), low=0.1, high=2),
    )
    attributes = {"K": depth, "N": rows, "block_size": block, "quant_type": draw.either(0, 1), "transB": draw.either(None, 1)}
    return OperatorCase(op, draw.either(17, 21), operands, attributes, static=draw.either(frozenset((1, 2)), frozenset()))


@describe_alone(f"{_DOMAIN}.MRotaryEmbedding")
def three_places(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of both section layouts, with heads interleaved or in a separate dimension, and full or partial rotation."""
    batch, length, heads, half = draw.size(1, 3), draw.size(), draw.size(1, 3), draw.size(1, 8)
    rotary, kind = 2 * half, draw.either("float32", "float32", "float16")
    width = rotary + draw.either(0, 2, 4)
    cuts = sorted(draw.ints(2, 0, half))
    shape = draw.either((batch, length, heads * width), (batch, heads, length, width))
    attributes = {
        "mrope_section": [cuts[0], cuts[1] - cuts[0], half - cuts[1]],
        "mrope_layout": draw.either(None, 0, 1),
        "interleaved": draw.either(None, 0, 1),
        "num_heads": heads,
        "rotary_embedding_dim": rotary if width > rotary else draw.either(None, rotary),
        "scale": draw.either(None, None, 1.5),
        "is_packed_batching": draw.either(None, 0, 1),
    }
    places = draw.array((3, batch, length), "int64", low=0, high=8)
    caches = (draw.array((9, half), kind, low=-1, high=1) for _ in range(2))
    return OperatorCase(op, draw.either(17, 21), (draw.array(shape, kind), places, *caches), attributes)


@describe_alone(f"{_DOMAIN}.CausalConvWithState")
def causal_convolutions(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of both layouts, with and without a state, with one position or many."""
    batch, length, size, dilation, last = (
        draw.size(1, 3),
        draw.size(1, 7),
        draw.size(1, 5),
        draw.either(None, 1, 2, 3),
        draw.chance(),
    )
    inner = draw.either((draw.size(1, 6),), (2, draw.size(1, 3))) if last else (draw.size(1, 6),)
    channels, before = int(np.prod(inner)), (size - 1) * (dilation or 1)
    state = (batch, before, *inner) if last else (batch, *inner, before)
    operands = (
        draw.array((batch, length, *inner) if last else (batch, *inner, length)),
        draw.array((channels, 1, size)),
        draw.array((channels,)) if draw.chance() else None,
        draw.array(state) if draw.chance() else None,
    )
    attributes = {
        "activation": draw.either(None, "none", "silu", "swish"),
        "dilation": dilation,
        "channels_last": int(last),
        "ndim": draw.either(None, 1),
    }
    static = draw.either(frozenset((1, 2)), frozenset())
    return OperatorCase(op, draw.either(17, 21), operands, attributes, 2, static)


@describe_alone(f"{_DOMAIN}.LinearAttention")
def linear_attentions(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of any update rule; heads of queries and keys share states, or the reverse."""
    batch, length, depth, width = draw.size(1, 2), draw.size(1, 5), draw.size(1, 5), draw.size(1, 5)
    shared = draw.either(1, 2, 4)
    heads, keys = draw.either(1, 2, 4), draw.either(*(n for n in (1, 2, 4) if n <= shared))
    rule = draw.either("linear", "gated", "delta", "gated_delta", None)
    gated, corrected = rule in ("gated", "gated_delta", None), rule in ("delta", "gated_delta", None)
    operands = (
        draw.array((batch, length, heads * depth), low=-1, high=1),
        draw.array((batch, length, keys * depth), low=-0.5, high=0.5),
        draw.array((batch, length, shared * width)),
        draw.array((batch, shared, depth, width)) if draw.chance() else None,
        draw.array((batch, length, draw.either(shared, shared * depth)), low=-2, high=0) if gated else None,
        draw.array((batch, length, draw.either(1, shared)), low=0, high=1) if corrected else None,
    )
    attributes = {
        "q_num_heads": heads,
        "kv_num_heads": shared,
        "update_rule": rule,
        "scale": draw.either(None, 0.0, 0.7),
        "chunk_size": draw.either(None, 16),
    }
    return OperatorCase(op, draw.either(17, 21), operands, attributes, 2, made=("float32", "float32"))


@describe_alone(f"{_DOMAIN}.LinearAttentionGate")
def decays(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with or without a rate."""
    shape, kind = (draw.size(1, 2), draw.size(), draw.size()), draw.either("float32", "float16")
    rate = draw.chance()
    a, b = draw.array(shape, kind, 0.0, -9, 30), draw.array(shape, kind)
    bias, scale = draw.array(shape[-1:]), draw.array(shape[-1:], low=-3, high=0)
    return OperatorCase(op, 21, (a, bias, scale, b if rate else None), outputs=2 if rate else 1)


@describe_alone(f"{_DOMAIN}.GatedRMSNorm")
def gated_norms(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of norms over all columns or over several groups."""
    columns, kind = draw.size(1, 8), draw.either("float32", "float16")
    shape = (*draw.shape(1, 3), columns * draw.either(1, 1, 3))
    attributes = {"activation": draw.either(None, "silu", "swish", "sigmoid"), "epsilon": draw.either(None, 1e-6, 1e-2)}
    return OperatorCase(op, 21, (draw.array(shape, kind), draw.array((columns,), kind), draw.array(shape, kind)), attributes)


@describe_alone(f"{_DOMAIN}.Inverse")
def inverses(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of small matrices, with zeros on their diagonal, or of large ones."""
    rows, kind = draw.either(1, 2, 3, 4, 4, 7, 16, 20), draw.either("float32", "float32", "float64")
    x = draw.array((*draw.shape(0, 2), rows, rows), kind)
    x = np.where(np.eye(rows) > 0, 3.0 * rows, x) if draw.chance() else np.where(np.arange(rows) == 0, x + 9, x)
    x = np.roll(x, 1, -1) if draw.chance() else x
    well = np.linalg.cond(x.astype(np.float64)).max(initial=0) < 100
    return OperatorCase(op, 17, (np.asarray(x if well else np.broadcast_to(np.eye(rows) * 2, x.shape), kind),))


@describe_alone(f"{_DOMAIN}.MurmurHash3")
def hashes(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of 4- or 8-byte numbers."""
    x = draw.array(draw.shape(0, 3), draw.either("int32", "uint32", "int64", "uint64", "float32", "float64"), 0.3)
    positive = draw.either(None, 0, 1)
    attributes = {"seed": draw.either(None, 0, 7, -1), "positive": positive}
    return OperatorCase(op, 17, (x,), attributes, made=("int32" if positive == 0 else "uint32",))


@describe_alone(f"{_DOMAIN}.DynamicTimeWarping", f"{_DOMAIN}.Unique", f"{_DOMAIN}.BifurcationDetector")
def found(draw: Draw, op: str) -> OperatorCase:
    """Draw a case with data-dependent result lengths, from constants only. Small integers have ties."""
    everything = frozenset(range(4))
    if op.endswith("Warping"):
        x = draw.array((*draw.either((), (1,)), draw.size(1, 9), draw.size(1, 9)))
        return OperatorCase(op, 17, (np.round(x) if draw.chance() else x,), static=everything)
    if op.endswith("Unique"):
        return OperatorCase(op, 17, (np.round(draw.array((draw.size(1, 9),))),), outputs=3, static=everything)
    source = draw.array((draw.size(2, 9),), "int64", low=0, high=3)
    at = draw.integer(0, len(source))
    predicted = np.append(source[at:], 1)
    predicted = np.where(np.arange(len(predicted)) == draw.integer(0, len(predicted)), 2, predicted)
    operands = (source, draw.array((draw.size(1, 6),), "int64", low=0, high=3), np.array([at]))
    attributes = {"min_ngram_size": draw.either(None, 1, 2), "max_ngram_size": draw.either(None, 3, 5)}
    return OperatorCase(op, 17, (*operands, predicted if draw.chance() else None), attributes, 2, everything)


@describe_alone(f"{_DOMAIN}.DecoderMaskedMultiHeadAttention")
def single_queries(draw: Draw, op: str) -> OperatorCase:
    """Draw a case of one query with fixed keys, or with a buffer that the query's key is inserted into."""
    batch, heads, width, room = draw.size(1, 3), draw.size(1, 3), draw.either(4, 8), draw.size(2, 7)
    hidden = heads * width
    query = draw.array((batch, 1, hidden))
    attributes = {"num_heads": heads, "scale": draw.either(None, 0.3), "mask_filter_value": draw.either(-50.0, -5.0)}
    if draw.chance(0.4):
        keys = [draw.array((batch, heads, room, width)) for _ in range(2)]
        mask = draw.array((batch, room), "int32", low=0, high=1) if draw.chance() else None
        asked = draw.chance()
        none: list[Array | None] = [None] * 6
        bias = draw.array((3 * hidden,)) if draw.chance() else None
        operands = (query, *keys, mask, *none, bias)
        absent = frozenset((1, 2)) if asked else frozenset()
        return OperatorCase(
            op,
            17,
            operands,
            {**attributes, "output_qk": int(asked)},
            4 if asked else 1,
            absent=absent,
            made=("float32",) * (2 if asked else 1),
        )
    past, length = [draw.array((batch, heads, room, width)) for _ in range(2)], draw.integer(0, room - 1)
    mask = draw.array((batch, length + 1), "int32", low=0, high=1) if draw.chance() else None
    bias = draw.array((1, draw.either(1, heads), 1, length + 1)) if draw.chance() else None
    new = [draw.array((batch, 1, hidden)) for _ in range(2)]
    projected = draw.array((3 * hidden,)) if draw.chance() else None
    operands = (query, *new, mask, bias, *past, np.array([length], np.int32), None, None, projected)
    return OperatorCase(op, 17, operands, {**attributes, "past_present_share_buffer": 1}, 3)
