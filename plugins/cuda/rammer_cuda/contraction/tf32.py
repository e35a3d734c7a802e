"""The ``gemm_tf32`` family: ``gemm`` on tensor cores with operands rounded to tf32, where the user allows it.

One product for one of float32, summed in float32 inside the tensor cores. Packed constants are rounded when a program
is loaded, everything else on its way from shared memory to registers (``cvt.rna``: to nearest, halves away from zero).
"""

from __future__ import annotations

from rammer.codegen.contraction import Operand, product_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.gemm import shape_of
from rammer_cuda.contraction.operand import TF32_TURNED, TF32_WORDS, Staged
from rammer_cuda.contraction.preamble import PREAMBLE
from rammer_cuda.contraction.tensor import Tensor
from rammer_cuda.device import source
from rammer_cuda.kernels.task import TaskKernel

TF32 = source("mma_tf32")


def gemm_tf32(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled float32 contraction in tf32. Unsuited as ``gemm``."""
    product = product_of(operator, binding, prologue=True)
    shape = shape_of(product.row_count, product.width, dict(operator.config), tensor=True)
    return _Tf32(product, binding, shape).kernel()


class _Tf32(Tensor):
    preamble = PREAMBLE + TF32

    def stage(self, name: str, operand: Operand, axes: tuple[int, ...], unit: int) -> Staged:
        """How one operand gets into shared memory; constant rows lie as ldmatrix wants them."""
        staging = TF32_TURNED if name == "a" else TF32_WORDS
        return Staged(name, self.p, operand, axes, unit, self.depth, self.s.threads, staging)

    def _places(self) -> None:
        super()._places()
        if self.a.packing is not None:
            place = f"slice * {self.s.bk // self.s.slices} + tid / 16 % 2 * 4"
            self.text.line(f"const int aat = (ty + tid % 16) * {self.a.pitch} + {place};")

    def _multiply(self) -> list[str]:
        s, part, turned = self.s, self.s.bk // self.s.slices, self.a.packing is not None
        flags = ", ".join("true" if f else "false" for f in (turned, self.b.packing is None))
        rows = f"use * {self.a.size} + aat" if turned else f"(use * {s.bk} + slice * {part} + lt) * {self.a.pitch} + ty + lg"
        return [
            f"rm_multiply_tf32<{s.tm}, {s.tn}, {part}, {self.a.pitch}, {self.b.pitch}, {flags}>(",
            f"  ashared + {rows},",
            f"  bshared + (use * {s.bk} + slice * {part} + lt) * {self.b.pitch} + tx + lg, acc);",
        ]
