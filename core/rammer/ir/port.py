"""InputPort: an input as the model file declares it."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.ir.types import KNOWN

#: Kinds of inputs other than numeric tensors. Such values stay on the host.
STRING, SEQUENCE, OPTIONAL, MAP = "string", "sequence", "optional", "map"
ON_HOST = (STRING, SEQUENCE, OPTIONAL, MAP)


@dataclass(frozen=True, slots=True)
class InputPort:
    """The name, element type and declared shape of an input. An extent is a number, a symbol or None (any).

    Non-numeric inputs have type ``string``, ``sequence``, ``optional`` or ``map``; only ``string`` has a shape. A tensor without
    a declared shape is not ``ranked`` and accepts arrays of any shape."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    ranked: bool = True

    @property
    def numeric(self) -> bool:
        """True for a tensor of numbers, which a device can hold."""
        return self.dtype in KNOWN

    @property
    def declared(self) -> str:
        """The element type and shape, as shown in messages."""
        return f"{self.dtype}[{','.join('?' if d is None else str(d) for d in self.shape) if self.ranked else '...'}]"

    def dims(self, rank: int) -> tuple[int | str | None, ...]:
        """Return the declared extents, or None for each of ``rank`` axes if no shape is declared."""
        return self.shape if self.ranked else (None,) * rank

    def __str__(self) -> str:
        return f"{self.name}: {self.declared}"
