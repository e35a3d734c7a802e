"""The shared-memory form of an operand for each instruction."""

from __future__ import annotations

from dataclasses import dataclass

from rammer_cuda.contraction.packing import Arrangement, Cores, Rows, Turned


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


#: For FFMA; for tensor cores that read words; for constants that ldmatrix reads as words; for constants of warpgroups.
PLAIN = Staging("float32", Rows(), Rows(least=4), Rows())
WORDS = Staging("float32", Rows(True), Rows(True, 4), Rows(True))
TF32_WORDS = Staging("tf32", Rows(True), Rows(True, 4), Rows(True))
TF32_TURNED = Staging("tf32", Turned(4), Rows(True, 4), Rows(True))
FLOAT32_CORES = Staging("float32", Cores(4), Rows(least=4), Rows())
TF32_CORES = Staging("tf32", Cores(4), Rows(least=4), Rows())
#: For ldmatrix, and for core matrices of any operand. Eight threads write one core matrix, so they write to different banks.
HALVES = Staging("float16", Rows(True), Turned(8), Rows(True), 8)
HALF_CORES = Staging("float16", Cores(8), Cores(8), Cores(8, across=True), 8, 8, True)
#: Bytes: tensor cores need four products of an element in one register, whatever the operand's layout.
BYTES = Staging("int8", Turned(16), Turned(16), Turned(16), 16, 4, across=False)
BYTE_CORES = Staging("int8", Cores(16), Cores(16), Cores(16), 16, 8, True, across=False)
