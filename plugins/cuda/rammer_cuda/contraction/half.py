"""The ``gemm_f16`` family: ``gemm`` on tensor cores for float16 operands, with float32 sums.

Blocks lie in shared memory as float16, either ``[k][unit]`` or, for operands that are contiguous along the reduction,
``[unit][k]``; ldmatrix reads both, the first one transposed. Rows are an odd number of 16-byte words, so the eight rows
that it reads at a time lie in different banks.
"""

from __future__ import annotations

from rammer.codegen.contraction import product_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.gemm import shape_of
from rammer_cuda.contraction.operand import HALVES
from rammer_cuda.contraction.preamble import PREAMBLE
from rammer_cuda.contraction.tensor import Tensor
from rammer_cuda.device import source
from rammer_cuda.kernels.task import TaskKernel

HALF = source("mma_f16")


def gemm_f16(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled contraction of float16 operands. Unsuited as ``gemm``."""
    product = product_of(operator, binding, "float16")
    shape = shape_of(product.row_count, product.width, dict(operator.config), tensor=True)
    return _Half(product, binding, shape).kernel()


class _Half(Tensor):
    """Fragments of ``mma.m16n8k16``; every lane names one row of the blocks that ldmatrix reads."""

    preamble, staging, least = PREAMBLE + HALF, HALVES, 16

    def _places(self) -> None:
        super()._places()
        text, part = self.text, self.s.bk // self.s.slices
        # The blocks of A are (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8); those of B (k, n), (k + 8, n), (k, n + 8) and
        # (k + 8, n + 8): which lane names which row follows from how they lie.
        text.line("const int l8 = tid % 8, lb = tid / 8 % 2 * 8, lc = tid / 16 % 2 * 8;")
        place = f"slice * {part}"
        if self.a.deep:
            text.line(f"const int aat = (ty + l8 + lb) * {self.a.pitch} + {place} + lc;")
        else:
            text.line(f"const int aat = ({place} + l8 + lc) * {self.a.pitch} + ty + lb;")
        if self.b.deep:
            text.line(f"const int bat = (tx + l8 + lc) * {self.b.pitch} + {place} + lb;")
        else:
            text.line(f"const int bat = ({place} + l8 + lb) * {self.b.pitch} + tx + lc;")

    def _multiply(self) -> list[str]:
        s, a, b = self.s, self.a, self.b
        layout = ", ".join("true" if stage.deep else "false" for stage in (a, b))
        return [
            f"rm_multiply_f16<{s.tm}, {s.tn}, {s.bk // s.slices}, {a.pitch}, {b.pitch}, {layout}>(",
            f"  ashared + use * {a.size} + aat, bshared + use * {b.size} + bat, acc);",
        ]
