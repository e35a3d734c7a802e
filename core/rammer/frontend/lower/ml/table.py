"""How the functions of this package are defined: ONNX has their schemas, and the host runs a use that has no body."""

from __future__ import annotations

from collections.abc import Callable

from rammer.frontend.lower.contrib.function import FUNCTIONS, OperatorFunction, Writer

DOMAIN = "ai.onnx.ml"


def standard_function(op: str, hosted: bool = True) -> Callable[[Writer], Writer]:
    """Decorator: the function that writes the bodies of one of ONNX's operators. A use without one is refused where it is not
    ``hosted``."""

    def register(write: Writer) -> Writer:
        FUNCTIONS[DOMAIN, op] = OperatorFunction(write, hosted)
        return write

    return register
