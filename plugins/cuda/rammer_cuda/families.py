"""The kernel families. Each family is a folder and a line here."""

from __future__ import annotations

from typing import Final

from rammer.ir.operator import ROperator

from rammer_cuda.attention.cost import ATTENTION
from rammer_cuda.cell.kernel import CELL
from rammer_cuda.chain.kernel import CHAIN
from rammer_cuda.contraction.choose import PRODUCTS
from rammer_cuda.family import Family
from rammer_cuda.generic.cost import GENERIC
from rammer_cuda.rows.codes import CODES
from rammer_cuda.rows.gemv import GEMV
from rammer_cuda.rows.rowwise import ROWWISE
from rammer_cuda.window.kernel import WINDOW

#: In the order in which families are queried, which also orders equal predictions.
FAMILIES: Final[tuple[Family, ...]] = (CELL, CHAIN, ATTENTION, *PRODUCTS, GENERIC, GEMV, CODES, ROWWISE, WINDOW)
BY_NAME: Final = {f.name: f for f in FAMILIES}


def family_of(operator: ROperator) -> Family:
    """Return the family of a tiled operator; the generic family if its name is empty or unknown."""
    return BY_NAME.get(operator.family, GENERIC)
