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
from rammer_cuda.kernels.task import TaskKernel

TF32 = """
#ifndef RM_TF32
#define RM_TF32
template <bool ROUND> __device__ __forceinline__ unsigned rm_tf32(float x) {
  unsigned r = __float_as_uint(x);
  if (ROUND) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
// A block of 8 x 4 words is one of 8 x 8 halfwords to ldmatrix, which leaves each lane the word that mma wants of it.
__device__ __forceinline__ void rm_words4(unsigned (&r)[4], const float *at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((unsigned)__cvta_generic_to_shared(at)));
}
// TA: the rows lie [unit][k] and are rounded already. RB: the columns still are to be.
template <int FM, int FN, int BK, int PA, int PB, bool TA, bool RB>
__device__ __forceinline__ void rm_multiply_tf32(const float *a, const float *b, float (&acc)[FM][FN][4]) {
#pragma unroll
  for (int k = 0; k < BK; k += 8) {
    unsigned x[FM][4];
#pragma unroll
    for (int i = 0; i < FM; ++i) {
      if (TA) { rm_words4(x[i], a + k + i * 16 * PA); continue; }
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = rm_tf32<true>(a[(k + e / 2 * 4) * PA + i * 16 + e % 2 * 8]);
    }
#pragma unroll
    for (int j = 0; j < FN; ++j) {
      unsigned y[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) y[e] = rm_tf32<RB>(b[(k + e * 4) * PB + j * 8]);
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma(acc[i][j], x[i], y);
    }
  }
}
#endif
"""


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
