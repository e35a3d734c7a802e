"""The ``gemm_tf32x3`` family: ``gemm`` on tensor cores, three tf32 products for one of fp32 (``preamble``)."""

from __future__ import annotations

from rammer.codegen.contraction import product_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.gemm import Gemm, shape_of
from rammer_cuda.contraction.operand import WORDS
from rammer_cuda.kernels.task import TaskKernel


def gemm_tf32x3(operator: ROperator, binding: Binding) -> TaskKernel:
    """The same on tensor cores, three tf32 products for one of fp32: an error of fp32's size. Unsuited as ``gemm``."""
    product = product_of(operator, binding, prologue=True)
    shape = shape_of(product.row_count, product.width, dict(operator.config), tensor=True)
    return Tensor(product, binding, shape).kernel()


class Tensor(Gemm):
    """Fragments as PTX lays them out for ``mma.m16n8k8``: lane ``4 g + t`` holds rows g, g + 8 and columns 2 t, 2 t + 1."""

    staging, least = WORDS, 8

    def line_of(self, width: int) -> int:
        """8 or 24 (mod 32) elements: the float2 stores of half a warp then reach every bank once."""
        return width + (8 - width) % 16

    def _places(self) -> None:
        s, text = self.s, self.text
        across = s.bn // (8 * s.tn)
        text.line(f"const int warp = tid / 32, slice = warp / {s.group // 32}, place = warp % {s.group // 32};")
        text.line(f"const int ty = place / {across} * {16 * s.tm}, tx = place % {across} * {8 * s.tn};")
        text.line("const int lg = tid % 32 / 4, lt = tid % 4;")

    def _multiply(self) -> list[str]:
        s, part = self.s, self.s.bk // self.s.slices
        return [
            f"rm_multiply3<{s.tm}, {s.tn}, {part}, {self.a.pitch}, {self.b.pitch}>(",
            f"  ashared + (use * {s.bk} + slice * {part} + lt) * {self.a.pitch} + ty + lg,",
            f"  bshared + (use * {s.bk} + slice * {part} + lt) * {self.b.pitch} + tx + lg, acc);",
        ]

    def _leave(self) -> list[str]:
        s = self.s
        return [
            "#pragma unroll", f"for (int i = 0; i < {s.tm}; ++i)", "#pragma unroll", f"for (int j = 0; j < {s.tn}; ++j)",
            "#pragma unroll", "for (int h = 0; h < 2; ++h)",
            f"  *(float2 *)(shared + (slice * {s.bm} + ty + i * 16 + h * 8 + lg) * {self.line} + tx + j * 8 + lt * 2)"
            " = make_float2(acc[i][j][2 * h], acc[i][j][2 * h + 1]);",
        ]  # fmt: skip
