"""ONNX Runtime's own operators of whole layers: mixtures of experts, recurrences and what stands around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer.testing.operators.case import Array, OperandDraw, OperatorCase, family

_DOMAIN = "com.microsoft"


def _chosen(draw: OperandDraw, activations: tuple[str, ...]) -> dict[str, Any]:
    """Draw the attributes that both kinds of mixtures have."""
    attributes: dict[str, Any] = {
        "activation_type": draw.pick(*activations),
        "normalize_routing_weights": draw.pick(None, 0, 1),
        "k": draw.pick(None, 1, 2, 3),
    }
    if draw.chance(0.2):
        attributes |= {"k": 2, "use_sparse_mixer": 1}
    if attributes["activation_type"] == "swiglu":
        attributes |= {
            "swiglu_fusion": 1,
            "activation_alpha": draw.pick(None, 1.702),
            "activation_beta": draw.pick(None, 1.0),
            "swiglu_limit": draw.pick(None, 0.5, 7.0),
        }
    return attributes


def _routed(draw: OperandDraw, kind: str, hidden: int) -> tuple[Array, Array, int]:
    """Draw tokens and their router, and the number of experts; some routers prefer no expert."""
    experts, shape = draw.size(3, 8), draw.pick((draw.size(1, 5),), (draw.size(1, 2), draw.size(1, 4)))
    router = draw.array((int(np.prod(shape)), experts), kind)
    if draw.chance(0.2):
        router = np.round(router)
    return draw.array((*shape, hidden), kind), router, experts


@family(f"{_DOMAIN}.MoE")
def experts(draw: OperandDraw, op: str) -> OperatorCase:
    """Weights that are constants or not."""
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
    return OperatorCase(op, draw.pick(17, 21), operands, attributes, static=static)


@family(f"{_DOMAIN}.QMoE")
def quantised_experts(draw: OperandDraw, op: str) -> OperatorCase:
    """Integers of 2, 4 and 8 bits by rows, of 4 bits by blocks: ONNX Runtime rounds the input of other blocks to 8 bits, too."""
    attributes = _chosen(draw, ("relu", "gelu", "silu", "identity", "swiglu"))
    kind, bits, block = draw.pick("float32", "float32", "float16"), draw.pick(2, 4, 4, 8), draw.pick(None, 16, 32)
    block = block if bits == 4 else None
    hidden, inner = (draw.pick(32, 64) for _ in range(2))
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
