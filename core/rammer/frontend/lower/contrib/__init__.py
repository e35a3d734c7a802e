"""The operators that are functions over ONNX's; importing this package defines all of them."""

from rammer.frontend.lower.contrib import (
    attention,
    blocks,
    decoders,
    experts,
    fused,
    gates,
    grouped,
    hosted,
    images,
    norms,
    older,
    quantised,
    quantised_lstm,
    recurrences,
    rotary,
    tensors,
)
from rammer.frontend.lower.contrib.function import FUNCTIONS, expand_use
from rammer.frontend.lower.contrib.hosted import HOST_ONLY

__all__ = [
    "FUNCTIONS",
    "HOST_ONLY",
    "attention",
    "blocks",
    "decoders",
    "expand_use",
    "experts",
    "fused",
    "gates",
    "grouped",
    "hosted",
    "images",
    "norms",
    "older",
    "quantised",
    "quantised_lstm",
    "recurrences",
    "rotary",
    "tensors",
]
