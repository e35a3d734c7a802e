"""Normalisations of the last axis, with the residual addition before them, and the embeddings of a BERT."""

from __future__ import annotations

from rammer.frontend.lower.contrib.function import Declined, FunctionBody, contrib_function


def apply_layer_norm(b: FunctionBody, x: str, gamma: str, beta: str, stats: bool = False) -> list[str]:
    """Return the layer normalisation over the last axis and, if ``stats``, its mean and inverse deviation."""
    made = b.op(
        "LayerNormalization", x, gamma, *([beta] if beta else []), outputs=3 if stats else 1, axis=-1, epsilon=b.attr("epsilon")
    )
    return made if stats else [made[0], "", ""]


def apply_rms_norm(b: FunctionBody, x: str, gamma: str, axis: int = -1, stats: bool = False) -> list[str]:
    """Return ``x`` divided by its root mean square in float32 and, if ``stats``, the inverse of that root."""
    if not stats:
        return [b.RMSNormalization(x, gamma, axis=axis, epsilon=b.attr("epsilon")), ""]
    wide = b.cast(x, "float32")
    axes = b.constant(list(range(axis, 0)) if axis < 0 else list(range(axis, len(b.shape(0)))))
    mean = b.ReduceMean(b.Mul(wide, wide), axes)
    inverse = b.Reciprocal(b.Sqrt(b.Add(mean, b.constant(b.attr("epsilon"), "float32"))))
    y = b.Mul(b.cast(b.Mul(wide, inverse), b.dtype(0)), gamma)
    return [y, inverse]


def _sum_residual(b: FunctionBody, bias: int) -> str:
    """Return ``input + skip + bias``; ``skip`` may lack the batch axis or have a batch of 1."""
    x, skip = b.shape(0), b.shape(1)
    if len(x) not in (2, 3) or (x[-len(skip) :] != skip and not (len(skip) == len(x) == 3 and skip == (1, *x[1:]))):
        raise Declined(f"the skip has the shape {list(skip)}, where the input has {list(x)}")
    total = b.Add(b.input(0), b.input(1))
    return b.Add(total, b.input(bias)) if b.has(bias) else total


@contrib_function(
    "SkipLayerNormalization", "input: T, skip: T, gamma: T, beta?: T, bias?: T -> output: T, mean?: F, inv?: F, sum?: T",
    epsilon=1e-12,
)  # fmt: skip
def skip_layer_normalization(b: FunctionBody) -> list[str]:
    """Expand SkipLayerNormalization: layer normalisation of a sum, and the sum."""
    total = _sum_residual(b, 4)
    y, mean, inverse = apply_layer_norm(b, total, b.input(2), b.input(3), b.wants(1) or b.wants(2))
    return [y, mean, inverse, total]


@contrib_function(
    "SkipSimplifiedLayerNormalization", "input: T, skip: T, gamma: T, bias?: T -> output: T, mean?: F, inv?: F, sum?: T",
    epsilon=1e-12,
)  # fmt: skip
def skip_simplified_layer_normalization(b: FunctionBody) -> list[str]:
    """Expand SkipSimplifiedLayerNormalization: RMS normalisation of a sum, and the sum."""
    total = _sum_residual(b, 3)
    y, inverse = apply_rms_norm(b, total, b.input(2), stats=b.wants(2))
    return [y, "", inverse, total]


@contrib_function(
    "SimplifiedLayerNormalization", "X: T, scale: T2 -> Y: T2, inv_std_var?: F", axis=-1, epsilon=1e-5, stash_type=1
)
def simplified_layer_normalization(b: FunctionBody) -> list[str]:
    """Expand SimplifiedLayerNormalization, ONNX Runtime's name for RMSNormalization in ONNX's own domain."""
    if b.dtype(0) != b.dtype(1):
        raise Declined(f"X is {b.dtype(0)} and the scale {b.dtype(1)}")
    return apply_rms_norm(b, b.input(0), b.input(1), b.attr("axis"), b.wants(1))


@contrib_function(
    "EmbedLayerNormalization",
    "input_ids: M, segment_ids?: M, word: T, position: T, segment?: T, gamma: T, beta: T, mask?: M, position_ids?: M"
    " -> output: T, mask_index?: M, sum?: T",
    epsilon=1e-12, mask_index_type=0,
)  # fmt: skip
def embed_layer_normalization(b: FunctionBody) -> list[str]:
    """Expand EmbedLayerNormalization: the normalised sum of words, positions and segments, and the number of non-zero mask
    elements per row."""
    batch, length = b.shape(0, 2)
    words = b.Gather(b.input(2), b.input(0))
    places = b.Gather(b.input(3), b.input(8)) if b.has(8) else b.slice(b.input(3), 0, 0, length)
    total = b.Add(words, places)
    if b.has(1):
        total = b.Add(total, b.Gather(b.input(4), b.input(1)))
    counted = ""
    if b.wants(1):
        counted = b.constant([0] * batch, "int32")
        if b.has(7):
            counted = b.ReduceSum(b.input(7), b.constant([1]), keepdims=0)
    return [apply_layer_norm(b, total, b.input(5), b.input(6))[0], counted, total]


@contrib_function("LayerNormalization", "X: T, scale: T, B?: T -> Y: T, mean?: F, inv?: F", axis=-1, epsilon=1e-5, stash_type=1)
def layer_normalization(b: FunctionBody) -> list[str]:
    """Expand LayerNormalization to ONNX's operator, for models of an opset before ONNX defined it."""
    given = [b.input(i) for i in range(3) if b.has(i)]
    count = 3 if b.wants(1) or b.wants(2) else 1
    return b.op("LayerNormalization", *given, outputs=count, axis=b.attr("axis"), epsilon=b.attr("epsilon"))
