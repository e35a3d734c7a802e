"""Which implementation is known to be wrong where: decisions by the words of ONNX's specification, as data.

Three voices say what an operator computes: our own lowered expressions (``rammer``), ONNX Runtime (``onnxruntime``) and
``onnx.reference`` (``reference``). Where they differ the specification decides, and what it decided is a row of
``DECISIONS``: the operator, the condition, the voices that are wrong, and the words. Constant folding and host operators
ask before they use the reference, tests and the graph fuzzer before they believe a voice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rammer.frontend.spec_rulings.element_rulings import ELEMENTS
from rammer.frontend.spec_rulings.operator_questions import Use
from rammer.frontend.spec_rulings.ruling import Decision, Voice
from rammer.frontend.spec_rulings.window_rulings import WINDOWS

__all__ = ["BY_OPERATOR", "DECISIONS", "Decision", "Voice", "find_decision"]

DECISIONS: Final = (*ELEMENTS, *WINDOWS)

#: The decisions on each operator.
BY_OPERATOR: Final[Mapping[str, tuple[Decision, ...]]] = {
    op: tuple(d for d in DECISIONS if op in d.ops) for op in dict.fromkeys(o for d in DECISIONS for o in d.ops)
}


def find_decision(voice: Voice, use: Use) -> Decision | None:
    """The decision against ``voice`` at this use, if there is one."""
    found = (d for d in BY_OPERATOR.get(use.op, ()) if voice in d.wrong and d.holds(use))
    return next(found, None)
