"""The ``gemm_tf32`` family: ``gemm`` on tensor cores with operands rounded to tf32, where the user allows it.

One product for one of float32, summed in float32 inside the tensor cores. Packed constants are rounded when a program
is loaded, everything else on its way from shared memory to registers (``cvt.rna``: to nearest, halves away from zero).
"""

from __future__ import annotations

from rammer.codegen.contraction import Operand, product_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.gemm import shape_of
from rammer_cuda.contraction.packing import pack
from rammer_cuda.contraction.preamble import PREAMBLE
from rammer_cuda.contraction.stage import Stage
from rammer_cuda.contraction.tensor import Tensor
from rammer_cuda.device import source
from rammer_cuda.kernels.task import TaskKernel

TF32 = source("mma_tf32")


def gemm_tf32(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled float32 contraction in tf32. Unsuited as ``gemm``."""
    product = product_of(operator, binding, prologue=True)
    shape = shape_of(product.row_count, product.width, dict(operator.config), tensor=True)
    return _Tf32(product, binding, shape).kernel()


class TurnedStage(Stage):
    """A packed constant as ``[unit][k]``; rows of an odd number of 16-byte words, which ldmatrix reads without conflicts."""

    def _pack(self) -> None:
        self.packing, self.coordinates = pack(self.p, self.operand, self.along, self.unit, self.depth, self.form, self.wide)

    @property
    def pitch(self) -> int:
        """Elements from one row in shared memory to the next."""
        return self.depth.block + self.wide

    @property
    def size(self) -> int:
        """Elements of one buffer of the ring."""
        return self.unit * self.pitch


class _Tf32(Tensor):
    preamble, form = PREAMBLE + TF32, "tf32"

    def stage(self, name: str, operand: Operand, axes: tuple[int, ...], unit: int) -> Stage:
        """How one operand gets into shared memory; constant rows lie as ldmatrix wants them."""
        if name == "a" and operand.packable and len(axes) <= 1:
            return TurnedStage(name, self.p, operand, axes, unit, self.depth, self.s.threads, 0, self.form)
        return super().stage(name, operand, axes, unit)

    def _places(self) -> None:
        super()._places()
        if isinstance(self.a, TurnedStage):
            place = f"slice * {self.s.bk // self.s.slices} + tid / 16 % 2 * 4"
            self.text.line(f"const int aat = (ty + tid % 16) * {self.a.pitch} + {place};")

    def _multiply(self) -> list[str]:
        s, part, turned = self.s, self.s.bk // self.s.slices, isinstance(self.a, TurnedStage)
        flags = ", ".join("true" if f else "false" for f in (turned, self.b.packing is None))
        rows = f"use * {self.a.size} + aat" if turned else f"(use * {s.bk} + slice * {part} + lt) * {self.a.pitch} + ty + lg"
        return [
            f"rm_multiply_tf32<{s.tm}, {s.tn}, {part}, {self.a.pitch}, {self.b.pitch}, {flags}>(",
            f"  ashared + {rows},",
            f"  bshared + (use * {s.bk} + slice * {part} + lt) * {self.b.pitch} + tx + lg, acc);",
        ]
