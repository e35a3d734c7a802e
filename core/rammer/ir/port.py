"""InputPort: an input as the model file declares it."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.ir.types import KNOWN

#: What an input may hold besides tensors of numbers. Such values stay on the host.
STRING, SEQUENCE, OPTIONAL, MAP = "string", "sequence", "optional", "map"
ON_HOST = (STRING, SEQUENCE, OPTIONAL, MAP)


@dataclass(frozen=True, slots=True)
class InputPort:
    """Name, element type and declared shape: an extent is a number, a symbol or None (anything). The type of what is no tensor of
    numbers is ``string``, ``sequence``, ``optional`` or ``map``; all but the first have no shape. A tensor that declares no shape
    is not ``ranked``: it takes the shape of each array that is given."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    ranked: bool = True

    @property
    def numeric(self) -> bool:
        """Whether it is a tensor of numbers, which a device can hold."""
        return self.dtype in KNOWN

    @property
    def declared(self) -> str:
        """The element type and shape for messages."""
        return f"{self.dtype}[{','.join('?' if d is None else str(d) for d in self.shape) if self.ranked else '...'}]"

    def dims(self, rank: int) -> tuple[int | str | None, ...]:
        """Return the declared extents, or None for each of ``rank`` axes if no shape is declared."""
        return self.shape if self.ranked else (None,) * rank

    def __str__(self) -> str:
        return f"{self.name}: {self.declared}"
