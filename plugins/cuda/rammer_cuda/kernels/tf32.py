"""The ``gemm_tf32`` family: ``gemm`` on tensor cores with operands rounded to tf32, where the user allows it.

One product for one of float32, summed in float32 inside the tensor cores. Packed constants are rounded when a program
is loaded, everything else on its way from shared memory to registers (``cvt.rna``: to nearest, halves away from zero).
"""

from __future__ import annotations

from rammer.codegen.contraction import product_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.gemm import Tensor, shape_of
from rammer_cuda.kernels.preamble import PREAMBLE
from rammer_cuda.kernels.task import TaskKernel

TF32 = """
#ifndef RM_TF32
#define RM_TF32
template <bool ROUND> __device__ __forceinline__ unsigned rm_tf32(float x) {
  unsigned r = __float_as_uint(x);
  if (ROUND) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
template <int FM, int FN, int BK, int PA, int PB, bool RA, bool RB>
__device__ __forceinline__ void rm_multiply_tf32(const float *a, const float *b, float (&acc)[FM][FN][4]) {
#pragma unroll
  for (int k = 0; k < BK; k += 8) {
    unsigned x[FM][4];
#pragma unroll
    for (int i = 0; i < FM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = rm_tf32<RA>(a[(k + e / 2 * 4) * PA + i * 16 + e % 2 * 8]);
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
    product = product_of(operator, binding)
    shape = shape_of(product.row_count, product.width, dict(operator.config), tensor=True)
    return _Tf32(product, binding, shape).kernel()


class _Tf32(Tensor):
    preamble, form = PREAMBLE + TF32, "tf32"

    def _multiply(self) -> list[str]:
        s, part = self.s, self.s.bk // self.s.slices
        rounds = ", ".join("true" if stage.packing is None else "false" for stage in (self.a, self.b))
        return [
            f"rm_multiply_tf32<{s.tm}, {s.tn}, {part}, {self.a.pitch}, {self.b.pitch}, {rounds}>(",
            f"  ashared + (use * {s.bk} + slice * {part} + lt) * {self.a.pitch} + ty + lg,",
            f"  bshared + (use * {s.bk} + slice * {part} + lt) * {self.b.pitch} + tx + lg, acc);",
        ]
