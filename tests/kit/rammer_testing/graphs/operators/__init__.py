"""Descriptions of operators: the operands and attributes to draw for each. A new operator needs one entry."""

from __future__ import annotations

from rammer_testing.graphs.operators import (
    elementwise,
    images,
    indexing,
    layers,
    products,
    quantised,
    recurrent,
    reductions,
    sampled,
    shapes,
    signals,
)
from rammer_testing.graphs.operators.registry import DESCRIBED, LEFT_OUT, describe

__all__ = [
    "DESCRIBED",
    "LEFT_OUT",
    "describe",
    "elementwise",
    "images",
    "indexing",
    "layers",
    "products",
    "quantised",
    "recurrent",
    "reductions",
    "sampled",
    "shapes",
    "signals",
]
