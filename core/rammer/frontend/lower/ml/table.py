"""Registration of this package's functions: ONNX has their schemas, and the host runs a use without a body."""

from __future__ import annotations

from collections.abc import Callable

from rammer.frontend.lower.contrib.function import FUNCTIONS, OperatorFunction, Writer

DOMAIN = "ai.onnx.ml"


def standard_function(op: str, hosted: bool = True) -> Callable[[Writer], Writer]:
    """Register the decorated function, which writes the bodies of an ONNX operator. A use without a body raises BadInput if the
    operator is not ``hosted``."""

    def register(write: Writer) -> Writer:
        FUNCTIONS[DOMAIN, op] = OperatorFunction(write, hosted)
        return write

    return register
