"""The table of operators, and checks of single operators over their attribute spaces against references.

Graphs (``rammer_testing.graphs``) and checks of single operators draw from one description of each operator. A new operator needs
one entry."""

from __future__ import annotations

from rammer_testing.operators import (
    attention,
    classical,
    contrib,
    contrib_models,
    contrib_quantised,
    contrib_tensors,
    elementwise,
    hosted,
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
from rammer_testing.operators.registry import DESCRIBED, LEFT_OUT, describe, drawn

__all__ = [
    "DESCRIBED",
    "LEFT_OUT",
    "attention",
    "classical",
    "contrib",
    "contrib_models",
    "contrib_quantised",
    "contrib_tensors",
    "describe",
    "drawn",
    "elementwise",
    "hosted",
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
