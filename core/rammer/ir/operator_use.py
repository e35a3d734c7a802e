"""The use of an operator, as input of type inference and of decisions between voices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rammer.ir.types import TensorType


@dataclass(frozen=True)
class Use:
    """A use of an operator.

    ``version`` is the opset that last changed it; attributes are Python values. ``inputs`` holds each input's type (None if
    omitted). ``wanted`` is True for each output in use. ``values`` holds constant inputs (None for others)."""

    op: str
    version: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[TensorType | None] = ()
    wanted: Sequence[bool] = (True,)
    values: Sequence[np.ndarray | None] = ()

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or ``default`` if it is absent."""
        return self.attributes.get(name, default)

    def has(self, index: int) -> bool:
        """Return True if optional input ``index`` is present."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def value(self, index: int) -> np.ndarray | None:
        """Return an input's constant elements, or None."""
        return self.values[index] if index < len(self.values) else None

    def dtype(self, index: int = 0) -> str:
        """Return the element type of an input; "" if it is omitted."""
        kind = self.inputs[index] if index < len(self.inputs) else None
        return kind.dtype if kind is not None else ""

    def shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of an input; () if it is omitted."""
        kind = self.inputs[index] if index < len(self.inputs) else None
        return kind.shape if kind is not None else ()

    @property
    def empty(self) -> bool:
        """True if an input has no elements."""
        return any(kind is not None and kind.size == 0 for kind in self.inputs)

    @property
    def nan(self) -> bool:
        """True if a constant input contains NaN."""
        return any(v is not None and v.dtype.kind == "f" and bool(np.isnan(v).any()) for v in self.values)
