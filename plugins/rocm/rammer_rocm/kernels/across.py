"""The last columns of a product whose rows are packed, where they are few: sums that run across rows.

An image of 7 x 7 has 49 columns: three vectors, and one column that would take a vector of its own. Rows of packed constants lie
side by side, so a vector of them times the column's element sums as many rows at a time. Blocks of rows are summed together, as a
sum waits for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rammer.codegen.c_text import Text
from rammer.device.manifest import Binding

from rammer_rocm.kernels.contraction import PanelOperand, PanelProduct
from rammer_rocm.kernels.vector import read_element, vector_type

#: Blocks of rows that are summed together, and rows of a block.
BLOCKS: Final = 4
HEIGHTS: Final = (4, 8, 16)
#: At most this part of a vector is summed across rows.
PART: Final = 4


def columns_across(p: PanelProduct, binding: Binding, width: int, lanes: int) -> int:
    """How many of ``width`` columns are summed across rows, beside whole vectors."""
    rest = width % lanes
    return rest if p.a.tensor in binding.constants and width > lanes and rest <= lanes // PART else 0


def cycles_across(rest: int, mr: int, lanes: int) -> float:
    """Of one step along the sums, for a block of rows."""
    return max(1.0, rest * mr / lanes)


def sum_across(
    text: Text,
    p: PanelProduct,
    b: PanelOperand,
    shape: tuple[int, int, int],
    loops: Callable[[tuple[Sequence[str], str], Callable[[], None]], None],
) -> None:
    """Write the sums of (columns, rows of a block, lanes) ``shape`` into ``tile``, a vector a row; ``loops`` writes the loops
    along the sums, in blocks of these accumulators and their type, around what it is given."""
    rest, mr, lanes = shape
    kind = vector_type(mr)
    for n in range(BLOCKS):
        # Blocks past the end repeat the last one; they are never stored.
        text.line(f"__global const float *a_{n} = a + min({n}, (rows - 1 - r) / {mr}) * {p.depth * mr};")
        text.line(f"{kind} {', '.join(f'x{n}_{j} = 0' for j in range(rest))};")

    def step() -> None:
        for j in range(rest):
            text.line(f"const {kind} b{j} = {read_element(b.dtype, 'b', f'kb + {j}')};")
        for n in range(BLOCKS):
            sums = " ".join(f"x{n}_{j} = fma(w, b{j}, x{n}_{j});" for j in range(rest))
            text.line(f"{{ const {kind} w = vload{mr}(0, a_{n} + ka); {sums} }}")

    loops(([f"x{n}_{j}" for n in range(BLOCKS) for j in range(rest)], kind), step)
    text.line(f"float across[{mr}];")
    for n in range(BLOCKS):
        for j in range(rest):
            to = f"((float *)tile)[({n * mr} + i) * {lanes} + {j}]"
            text.line(f"vstore{mr}(x{n}_{j}, 0, across); for (int i = 0; i < {mr}; ++i) {to} = across[i];")
