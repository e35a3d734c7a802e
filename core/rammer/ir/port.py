"""ModelPort: an input or output of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rammer.ir.types import KNOWN

#: Kinds of inputs other than numeric tensors. Such values stay on the host.
STRING, SEQUENCE, OPTIONAL, MAP = "string", "sequence", "optional", "map"
ON_HOST = (STRING, SEQUENCE, OPTIONAL, MAP)


#: ONNX's names of element types, where they are not NumPy's without the underscore.
_ONNX_NAMES: Final = {
    "float32": "float",
    "float64": "double",
    "float8_e8m0fnu": "float8e8m0",
    "float6_e2m3fn": "float6e2m3",
    "float6_e3m2fn": "float6e3m2",
    "float4_e2m1fn": "float4e2m1",
}


def onnx_element(dtype: str) -> str:
    """Return ONNX's name of an element type, for example ``double``."""
    return _ONNX_NAMES.get(dtype) or dtype.replace("_", "")


@dataclass(frozen=True, slots=True)
class ModelPort:
    """The name, element type and shape of an input or output. An extent is a number, a symbol or None (any).

    Non-numeric ports have type ``string``, ``sequence``, ``optional`` or ``map``; only ``string`` has a shape. The others have
    ONNX's text of their type in ``container``. A tensor without a known shape is not ``ranked``; as an input it accepts arrays of
    any shape. An output whose type is unknown before it is computed has the type ""."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    ranked: bool = True
    container: str = ""

    @property
    def onnx_type(self) -> str:
        """ONNX's text of the type, for example ``tensor(float)``."""
        return self.container or f"tensor({onnx_element(self.dtype)})"

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
