"""Operators that are functions over ONNX's: importing this defines them all."""

from rammer.frontend.contrib import (
    attention,
    blocks,
    experts,
    fused,
    grouped,
    hosted,
    norms,
    quantised,
    recurrences,
    rotary,
)
from rammer.frontend.contrib.function import FUNCTIONS, expand_use

__all__ = [
    "FUNCTIONS",
    "attention",
    "blocks",
    "expand_use",
    "experts",
    "fused",
    "grouped",
    "hosted",
    "norms",
    "quantised",
    "recurrences",
    "rotary",
]
