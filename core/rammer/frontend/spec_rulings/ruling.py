"""A decision between the voices that define an operator's result (``rammer.frontend.spec_rulings.rulings``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rammer.frontend.spec_rulings.operator_questions import Use

Voice: TypeAlias = Literal["rammer", "onnxruntime", "reference"]


@dataclass(frozen=True)
class Decision:
    """A condition ``holds`` under which the voices in ``wrong`` violate the specification, quoted in ``words``."""

    ops: tuple[str, ...]
    when: str
    holds: Callable[[Use], bool]
    wrong: tuple[Voice, ...]
    words: str
