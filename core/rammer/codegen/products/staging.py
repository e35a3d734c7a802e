"""The shared-memory form of an operand for each instruction."""

from __future__ import annotations

from dataclasses import dataclass

from rammer.codegen.products.packing import Arrangement, Rows


@dataclass(frozen=True, slots=True)
class Staging:
    """The shared-memory form of an operand for an instruction.

    Elements are of ``kind`` ("float32", "tf32": constants are rounded when packed, "float16", "int8": bytes of either sign).
    ``constant``, ``deep`` and ``along`` arrange constants, deep and other copies. A deep copy has at most ``products`` products.

    ``down`` neighbouring threads copy neighbouring products before the next threads copy the next elements. With ``whole``, only
    copies of 16 bytes are supported. Without ``across``, products of one element are always adjacent, so copies of several
    elements are unsupported.
    """

    kind: str
    constant: Arrangement
    deep: Arrangement
    along: Arrangement
    products: int = 1
    down: int = 1
    whole: bool = False
    across: bool = True

    @property
    def ctype(self) -> str:
        """The C type of an element."""
        return {"float16": "unsigned short", "int8": "unsigned char"}.get(self.kind, "float")

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return {"float16": 2, "int8": 1}.get(self.kind, 4)

    @property
    def lot(self) -> int:
        """The number of elements in 16 bytes."""
        return 16 // self.item


#: For products of single threads.
PLAIN = Staging("float32", Rows(), Rows(least=4), Rows())
