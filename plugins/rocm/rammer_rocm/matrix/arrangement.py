"""The order of a block of float16 products in local memory that waves read without bank conflicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from rammer.codegen.products import Turned
from rammer.device.manifest import Array

#: Elements of a lot: 16 bytes. Local memory has 32 banks of 4 bytes, so 64 elements reach each bank once.
LOT: Final = 8
BANKS: Final = 64


@dataclass(frozen=True, slots=True)
class Swizzled(Turned):
    """An arrangement with one row per element, ``[e][k]``, without padding. Row ``e`` has its lots of 16 bytes in the order
    ``lot ^ swizzle(e)``.

    The first part of the swizzle spreads the lots that eight neighbouring lanes read over all banks. The second part spreads the
    words that neighbouring work-items write, which copy eight elements of one product each."""

    lot: int = LOT

    def pitch(self, unit: int, block: int) -> int:
        return block

    def swizzle(self, e: str, block: int) -> str:
        """Return C text for the number that changes the lots of row ``e``. Its period is 32 rows."""
        rows, lots = max(1, BANKS // block), block // LOT
        return f"(({e}) / {rows} ^ ({e}) / {LOT} % 4) % {lots}"

    def place(self, k: str, e: str, unit: int, block: int) -> str:
        return f"({e}) * {block} + (({k}) / {LOT} ^ {self.swizzle(e, block)}) * {LOT} + ({k}) % {LOT}"

    def ahead(self, products: int, elements: int, unit: int, block: int) -> int | None:
        return None if products or elements % 32 else elements * block

    def packed(self, values: Array) -> Array:
        *outer, block, unit = values.shape
        lots = np.swapaxes(values, -2, -1).reshape(*outer, unit, block // LOT, LOT)
        e, lot = np.indices((unit, block // LOT))
        rows = max(1, BANKS // block)
        return np.ascontiguousarray(lots[..., e, lot ^ (e // rows ^ e // LOT % 4) % (block // LOT), :])
