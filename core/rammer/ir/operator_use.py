"""One use of an operator, as those see it who say what comes out: inference, decisions between voices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rammer.ir.types import TensorType


@dataclass(frozen=True)
class Use:
    """One use of an operator: its version (the opset that last changed it), its attributes as Python values, the type of
    each input (None where it is left out), whether each output is wanted, and the inputs that are known (None for others)."""

    op: str
    version: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[TensorType | None] = ()
    wanted: Sequence[bool] = (True,)
    values: Sequence[np.ndarray | None] = ()

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or ``default``."""
        return self.attributes.get(name, default)

    def has(self, index: int) -> bool:
        """Whether optional input ``index`` is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def value(self, index: int) -> np.ndarray | None:
        """An input's elements, None where they are not known."""
        return self.values[index] if index < len(self.values) else None

    def dtype(self, index: int = 0) -> str:
        """Element type of an input; "" where it is left out."""
        kind = self.inputs[index] if index < len(self.inputs) else None
        return kind.dtype if kind is not None else ""

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of an input; () where it is left out."""
        kind = self.inputs[index] if index < len(self.inputs) else None
        return kind.shape if kind is not None else ()

    @property
    def empty(self) -> bool:
        """Whether an input has no elements."""
        return any(kind is not None and kind.size == 0 for kind in self.inputs)

    @property
    def nan(self) -> bool:
        """Whether a known input holds what is no number."""
        return any(v is not None and v.dtype.kind == "f" and bool(np.isnan(v).any()) for v in self.values)
