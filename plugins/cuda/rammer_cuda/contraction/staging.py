"""How each instruction wants an operand in shared memory, as values."""

from __future__ import annotations

from dataclasses import dataclass

from rammer_cuda.contraction.packing import Arrangement, Cores, Rows, Turned


@dataclass(frozen=True, slots=True)
class Staging:
    """How an instruction wants an operand in shared memory: elements of ``kind`` ("float32", "tf32": constants are rounded
    when packed, "float16", "int8": bytes of either sign); the arrangement of constants, of deep and of other copies; products
    of a deep copy, at most.

    Of threads, ``down`` neighbours take neighbouring products before others take their next elements. ``whole``: copies of
    16 bytes alone will do. Without ``across`` products of one element are next to each other however it is copied, so
    copies of several elements will not.
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
        """Elements of 16 bytes."""
        return 16 // self.item


#: For FFMA; for tensor cores that read words; constants that ldmatrix reads as words; constants for warpgroups.
PLAIN = Staging("float32", Rows(), Rows(least=4), Rows())
WORDS = Staging("float32", Rows(True), Rows(True, 4), Rows(True))
TF32_WORDS = Staging("tf32", Rows(True), Rows(True, 4), Rows(True))
TF32_TURNED = Staging("tf32", Turned(4), Rows(True, 4), Rows(True))
FLOAT32_CORES = Staging("float32", Cores(4), Rows(least=4), Rows())
TF32_CORES = Staging("tf32", Cores(4), Rows(least=4), Rows())
#: For ldmatrix, and core matrices whatever the operand: eight threads write one of them, so that they write different banks.
HALVES = Staging("float16", Rows(True), Turned(8), Rows(True), 8)
HALF_CORES = Staging("float16", Cores(8), Cores(8), Cores(8, across=True), 8, 8, True)
#: Bytes: tensor cores want four products of an element in a register, whichever way the operand lies.
BYTES = Staging("int8", Turned(16), Turned(16), Turned(16), 16, 4, across=False)
BYTE_CORES = Staging("int8", Cores(16), Cores(16), Cores(16), 16, 8, True, across=False)
