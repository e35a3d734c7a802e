"""What a user chooses when compiling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

#: Told (step, detail) while compiling.
Progress: TypeAlias = Callable[[str, str], None]


def quiet(step: str, detail: str) -> None:
    """The default progress sink."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Scheduling policy, tuning level (off, quick, full) and the named hardware to compile for."""

    policy: str = "wavefront"
    tune: str = "off"
    target: str = ""


#: What is chosen when nothing is said.
DEFAULT = CompileOptions()
