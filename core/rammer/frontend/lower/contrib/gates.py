"""Gates and mixes of parallel residual streams, computed in float32 and rounded where ONNX Runtime rounds."""

from __future__ import annotations

import numpy as np

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function

#: The least absolute value under the root of an Engram gate.
_LEAST_DOT = 1e-6


def _input_float32(b: FunctionBody, index: int) -> str:
    return b.cast(b.input(index), "float32")


@contrib_function("GatedAdd", "X: T, Y: T, gate: T -> output: T")
def gated_add(b: FunctionBody) -> str:
    """Expand GatedAdd: ``X + Y * gate``, with a gate per row."""
    return b.Add(b.input(0), b.Mul(b.input(1), b.input(2)))


@contrib_function("ScaledSiLU", "X: T, scale?: S -> Y: T", alpha=1.0)
def scaled_silu(b: FunctionBody) -> str:
    """Expand ScaledSiLU: ``Z * Sigmoid(Z)`` of the scaled input."""
    scale = b.reshape(_input_float32(b, 1)) if b.has(1) else b.constant(b.attr("alpha"), "float32")
    z = b.cast(b.Mul(scale, _input_float32(b, 0)), b.dtype())
    opening = b.cast(b.Sigmoid(b.cast(z, "float32")), b.dtype())
    return b.Mul(z, opening)


def split_branches(b: FunctionBody, index: int = 0) -> tuple[str, tuple[int, ...]]:
    """Return an input in float32 as ``[..., branches, columns]``, and that shape; a flat input has ``num_branches``."""
    shape, count = b.shape(index), b.attr("num_branches")
    if count:
        if not shape or count < 0 or shape[-1] % count:
            raise Declined(f"{count} branches share {list(shape)}")
        shape = (*shape[:-1], count, shape[-1] // count)
    if len(shape) < 2:
        raise Declined(f"branches of an input of {list(shape)}")
    return b.reshape(_input_float32(b, index), *shape), shape


@contrib_function("BranchwiseRMSNorm", "X: T, scale?: S -> Y: T", num_branches=0, epsilon=1e-5)
def branchwise_rms_norm(b: FunctionBody) -> str:
    """Expand BranchwiseRMSNorm: root-mean-square norm of each branch, with a shared scale or one per branch."""
    x, shape = split_branches(b)
    branches, columns = shape[-2:]
    y = b.RMSNormalization(x, b.constant(np.ones(columns, np.float32)), axis=-1, epsilon=b.attr("epsilon"))
    if b.has(1):
        scale = b.shape(1)
        if scale not in ((columns,), (branches, columns), (branches * columns,)):
            raise Declined(f"a scale of {list(scale)} for {branches} branches of {columns} columns")
        y = b.Mul(y, b.reshape(_input_float32(b, 1), -1, columns))
    return b.cast(b.reshape(y, *b.shape(0)), b.dtype())


@contrib_function("HyperConnectionPreMix", "streams: T, pre_mix: S -> output: T", num_branches=0, reduction_scale=1.0)
def hyper_connection_pre_mix(b: FunctionBody) -> str:
    """Expand HyperConnectionPreMix: the gated sum of the streams."""
    x, shape = split_branches(b)
    total = b.ReduceSum(b.Mul(x, _shape_gates(b, 1, shape)), b.constant([-2]), keepdims=0)
    scale = b.attr("reduction_scale")
    return b.cast(b.Mul(total, b.constant(scale, "float32")) if scale != 1 else total, b.dtype())


def _shape_gates(b: FunctionBody, index: int, shape: tuple[int, ...]) -> str:
    """Return gates that broadcast to ``[..., branches, columns]``: one per branch, or one per column of each branch."""
    (*lead, branches, columns), given = shape, b.shape(index)
    if given in ((*lead, branches), (*lead, branches, 1)):
        return b.reshape(_input_float32(b, index), *lead, branches, 1)
    if given in (shape, (*lead, branches * columns)):
        return b.reshape(_input_float32(b, index), *shape)
    raise Declined(f"gates of {list(given)} for streams of {list(shape)}")


@contrib_function(
    "HyperConnectionPostMix", "streams: T, block_output: T, post_mix: S, stream_mix?: S -> output: T", num_branches=0
)
def hyper_connection_post_mix(b: FunctionBody) -> str:
    """Expand HyperConnectionPostMix: mixed streams, each with one output added through its gate."""
    x, shape = split_branches(b)
    if b.has(3):
        x = b.MatMul(b.Transpose(_input_float32(b, 3), perm=_swapped_axes(len(b.shape(3)))), x)
    added = b.Mul(_shape_gates(b, 2, shape), b.Unsqueeze(_input_float32(b, 1), b.constant([-2])))
    return b.cast(b.reshape(b.Add(x, added), *b.shape(0)), b.dtype())


def _swapped_axes(rank: int) -> list[int]:
    """Return the axis order with the last two exchanged."""
    return [*range(rank - 2), rank - 1, rank - 2]


@contrib_function(
    "EngramGate",
    "key: T, query: T, value: T, key_norm_scale: T, query_norm_scale: T, conv_norm_scale?: T -> output: T, normed?: T",
    epsilon=1e-5,
)  # fmt: skip
def engram_gate(b: FunctionBody) -> list[str]:
    """Expand EngramGate: a value shared by all branches, gated per branch by the match of its normalised key and query."""
    _, _, _, columns = b.shape(0, 4)
    key, query = (b.Mul(_rms_normalise(b, _input_float32(b, i), columns), _input_float32(b, i + 3)) for i in range(2))
    dot = b.ReduceSum(b.Mul(key, query), b.constant([-1]), keepdims=1)
    dot = b.Div(dot, b.constant(float(np.sqrt(columns)), "float32"))
    gate = b.Sigmoid(b.Mul(b.Sign(dot), b.Sqrt(b.Max(b.Abs(dot), b.constant(_LEAST_DOT, "float32")))))
    gated = b.Mul(gate, b.Unsqueeze(_input_float32(b, 2), b.constant([2])))
    normed = b.cast(b.Mul(_rms_normalise(b, gated, columns), _input_float32(b, 5)), b.dtype()) if b.has(5) else ""
    return [b.cast(gated, b.dtype()), normed]


def _rms_normalise(b: FunctionBody, x: str, columns: int) -> str:
    return b.RMSNormalization(x, b.constant(np.ones(columns, np.float32)), axis=-1, epsilon=b.attr("epsilon"))
