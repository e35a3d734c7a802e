"""Operators that are functions over ONNX's: importing this defines them all."""

from rammer.frontend.contrib import (
)
from rammer.frontend.contrib.function import FUNCTIONS, expand_use

__all__ = [
    "FUNCTIONS",
    "expand_use",
]
