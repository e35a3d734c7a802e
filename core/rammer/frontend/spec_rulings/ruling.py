"""A decision between the voices that say what an operator computes (``rammer.frontend.spec_rulings.rulings``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rammer.frontend.spec_rulings.operator_questions import Use

Voice: TypeAlias = Literal["rammer", "onnxruntime", "reference"]


@dataclass(frozen=True)
class Decision:
    """Where ``holds``, the voices in ``wrong`` do not say what the specification does; ``words`` quotes it."""

    ops: tuple[str, ...]
    when: str
    holds: Callable[[Use], bool]
    wrong: tuple[Voice, ...]
    words: str
