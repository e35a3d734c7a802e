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
    numbers is ``string``, ``sequence``, ``optional`` or ``map``; all but the first have no shape."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]

    @property
    def numeric(self) -> bool:
        """Whether it is a tensor of numbers, which a device can hold."""
        return self.dtype in KNOWN

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join('?' if d is None else str(d) for d in self.shape)}]"
