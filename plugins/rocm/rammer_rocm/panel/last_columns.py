"""The last few columns of a product with packed rows, as sums across rows.

An image of 7 x 7 has 49 columns: three vectors, and one column that would occupy a vector alone. Rows of packed constants are
adjacent. One vector multiply of rows by a column element therefore accumulates one sum per row. Several blocks of rows are summed
together to hide the latency of each sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rammer.codegen import Text
from rammer.device.manifest import Binding

from rammer_rocm.kernels.vector import read_element, vector_type
from rammer_rocm.panel.recognise import PanelOperand, PanelProduct

#: Blocks of rows that are summed together, and the supported row counts of a block.
BLOCKS: Final = 4
HEIGHTS: Final = (4, 8, 16)
#: At most 1 / PART of a vector is summed across rows.
PART: Final = 4


def columns_across(p: PanelProduct, binding: Binding, width: int, lanes: int) -> int:
    """Return the number of the last columns, out of ``width``, that are summed across rows instead of in whole vectors."""
    rest = width % lanes
    return rest if p.a.tensor in binding.constants and width > lanes and rest <= lanes // PART else 0


def cycles_across(rest: int, mr: int, lanes: int) -> float:
    """Return the cycles of one reduction step for a block of rows."""
    return max(1.0, rest * mr / lanes)


def sum_across(
    text: Text,
    p: PanelProduct,
    b: PanelOperand,
    shape: tuple[int, int, int],
    loops: Callable[[tuple[Sequence[str], str], Callable[[], None]], None],
) -> None:
    """Write the sums of ``shape`` (columns, rows of a block, lanes) into ``tile``, one vector per row. ``loops`` writes the
    reduction loops around its callback, in blocks of the accumulators and their type."""
    rest, mr, lanes = shape
    kind = vector_type(mr)
    for n in range(BLOCKS):
        # Blocks past the end repeat the last block; they are never stored.
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
