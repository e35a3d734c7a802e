"""Cases in which an implementation is wrong: decisions quoted from ONNX's specification, as data.

Three voices define an operator's result: our lowered expressions (``rammer``), ONNX Runtime (``onnxruntime``) and
``onnx.reference`` (``reference``). Where they differ, the specification decides. Each decision is a row of ``DECISIONS``: the
operator, the condition, the wrong voices and the quotation. Constant folding and host operators look up decisions before they use
the reference. Tests and the graph fuzzer look them up before they trust a voice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rammer.frontend.spec_rulings.element_rulings import ELEMENTS
from rammer.frontend.spec_rulings.operator_questions import Decision, Use, Voice
from rammer.frontend.spec_rulings.window_rulings import WINDOWS

__all__ = ["BY_OPERATOR", "DECISIONS", "Decision", "Voice", "find_decision"]

DECISIONS: Final = (*ELEMENTS, *WINDOWS)

#: Decisions by operator.
BY_OPERATOR: Final[Mapping[str, tuple[Decision, ...]]] = {
    op: tuple(d for d in DECISIONS if op in d.ops) for op in dict.fromkeys(o for d in DECISIONS for o in d.ops)
}


def find_decision(voice: Voice, use: Use) -> Decision | None:
    """Return the decision against ``voice`` for this use, or None."""
    found = (d for d in BY_OPERATOR.get(use.op, ()) if voice in d.wrong and d.holds(use))
    return next(found, None)
