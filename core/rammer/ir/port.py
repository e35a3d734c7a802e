"""InputPort: an input as the model file declares it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputPort:
    """Name, element type and declared shape: an extent is a number, a symbol or None (anything)."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join('?' if d is None else str(d) for d in self.shape)}]"
