"""Products of a few float16 vectors by tensor cores: a matrix times 2 to 8 vectors, without a conversion of every operand.

A warp multiplies 16 rows of the matrix by all vectors, 32 products of a sum at a time. A thread loads 16 bytes of two rows and of
one vector, whose eight products are operands of two instructions. It has the same products of every row and vector, so their
order within an instruction is free. The warps of a strip have parts of the sum, which are added in order in shared memory. Then
each lane finishes one result, as in ``gemv``.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from rammer.codegen import Block, Val, canonicalise_sum
from rammer.codegen.products import WARP, Strips
from rammer.ir.compute import Compute
from rammer.ir.expr import Expr, Load, Ref, integer, make_add, make_mul

from rammer_cuda.kernels.frame import Frame, define_coordinates

#: Rows of an instruction and of a strip, its vectors, and the maximum steps of a warp, of 32 products of a sum each. The loads of
#: all steps are in flight at once.
STRIP: Final = 16
VECTORS: Final = 8
MOST_STEPS: Final = 12


class FewVectors(Protocol):
    """The relevant part of a ``gemv`` product's form."""

    @property
    def main(self) -> Compute: ...
    @property
    def matrix(self) -> Load: ...
    @property
    def vectors(self) -> Load: ...
    @property
    def many(self) -> tuple[int, ...]: ...
    @property
    def few(self) -> tuple[int, ...]: ...
    @property
    def across(self) -> bool: ...
    @property
    def half(self) -> bool: ...
    @property
    def depth(self) -> int: ...


class StripKernel(Protocol):
    """The relevant part of a ``gemv`` kernel under construction."""

    lanes: int
    frame: Frame
    block: Block

    @property
    def m(self) -> FewVectors: ...
    @property
    def strips(self) -> Strips: ...
    @property
    def matrix(self) -> tuple[dict[str, int], int, int]: ...
    @property
    def vectors(self) -> tuple[dict[str, int], int, int] | None: ...


def suits_tensor_cores(m: FewVectors, lanes: int, few: int) -> bool:
    """Return True if ``lanes`` threads can compute strips of ``m``, which has ``few`` vectors."""
    fits = m.half and not m.across and 2 <= few <= VECTORS and few * STRIP <= lanes
    steps = m.depth / lanes
    return fits and steps == int(steps) and steps <= MOST_STEPS and m.main.axes[m.many[-1]].extent >= STRIP


class TensorSum:
    """The part of a ``gemv`` kernel that loads and multiplies, for strips of 16 results by tensor cores."""

    def __init__(self, kernel: StripKernel) -> None:
        self.k, self.steps = kernel, kernel.m.depth // kernel.lanes

    def places(self, base: list[Expr]) -> None:
        """Define this thread's rows of the matrix, its vector, and its first product."""
        k, f = self.k, self.k.frame
        m = k.m
        few = [m.main.axes[d].extent if d in m.few else 1 for d in range(len(m.main.axes))]
        f.line("const int row = tid % 32 / 4, piece = (lane / 32 * 4 + tid % 4) * 8;")
        digits = define_coordinates(f, "j", f"min(row, {math.prod(few) - 1})", few)
        self.matrix = [
            self._address(k.matrix, [make_add(b, make_add(Ref("row"), h)) if d == m.many[-1] else b for d, b in enumerate(base)])
            for h in (0, STRIP // 2)
        ]
        assert k.vectors is not None
        self.vector = self._address(
            k.vectors, [make_add(b, j) if d in m.few else b for d, (b, j) in enumerate(zip(base, digits, strict=True))]
        )

    def _address(self, where: tuple[dict[str, int], int, int], point: list[Expr]) -> str:
        f = self.k.frame
        f.unit.ranges["row"] = (0, STRIP // 2 - 1)
        total: Expr = integer(where[1])
        for a, x in zip(self.k.m.main.axes, point, strict=True):
            total = make_add(total, make_mul(x, where[0].get(a.name, 0)))
        return f.unit.index(canonicalise_sum(total)).text

    def load_matrix(self) -> None:
        """Write the loads of this thread's part of the matrix."""
        pointer = self.k.frame.places[self.k.m.matrix.tensor].pointer
        for h, address in enumerate(self.matrix):
            for i in range(self.steps):
                place = f"{pointer} + (size_t)({address}) + piece + {i * self.k.lanes}"
                self.k.block.line(f"const uint4 w{h}_{i} = *(const uint4 *)({place});")

    def multiply(self) -> Val:
        """Write the products and the sums over the warps of a strip; return the result of this lane."""
        k, block = self.k, self.k.block
        pointer = k.frame.places[k.m.vectors.tensor].pointer
        each, warps, all_warps = STRIP * VECTORS, k.lanes // WARP, k.frame.threads // WARP
        block.line("// Products and their sums.")
        for i in range(self.steps):
            block.line(f"const uint4 v0_{i} = *(const uint4 *)({pointer} + {self.vector} + piece + {i * k.lanes});")
        block.line("float sum[4] = {};")
        for i in range(self.steps):
            for a, b in ("xy", "zw"):
                operand = f"{{w0_{i}.{a}, w1_{i}.{a}, w0_{i}.{b}, w1_{i}.{b}}}"
                block.line(f"{{ const unsigned a[4] = {operand}; rm_mma_f16(sum, a, v0_{i}.{a}, v0_{i}.{b}); }}")
        k.frame.shared += all_warps * each * 4
        block.line(f"__shared__ float part0[{all_warps}][{each}];")
        block.line(f"float *const mine = part0[tid / {WARP}] + row * {VECTORS} + tid % 4 * 2;")
        block.line(f"mine[0] = sum[0]; mine[1] = sum[1]; mine[{each // 2}] = sum[2]; mine[{each // 2 + 1}] = sum[3];")
        block.line("__syncthreads();")
        few = k.strips.each // STRIP
        columns_last = k.m.many[-1] > max(k.m.few)
        column, vector = (f"pick % {STRIP}", f"pick / {STRIP}") if columns_last else (f"pick / {few}", f"pick % {few}")
        block.line(f"const int own = ({column}) * {VECTORS} + {vector};")
        block.line(f"float total = part0[tid / {k.lanes} * {warps}][own];")
        block.line("#pragma unroll")
        block.line(f"for (int w = 1; w < {warps}; ++w) total += part0[tid / {k.lanes} * {warps} + w][own];")
        return Val("total", "float32", atom=True)
