"""The ``gemm_f16`` family: ``gemm`` on tensor cores for float16 operands, with float32 sums.

Blocks lie in shared memory as float16, either ``[k][unit]`` or, for operands that are contiguous along the reduction,
``[unit][k]``; ldmatrix reads both, the first one transposed. Rows are an odd number of 16-byte words, so the eight rows
that it reads at a time lie in different banks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rammer.codegen.contraction import Operand, product_of
from rammer.codegen.text import Text
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.gemm import shape_of
from rammer_cuda.contraction.preamble import PREAMBLE
from rammer_cuda.contraction.stage import Stage
from rammer_cuda.contraction.tensor import Tensor
from rammer_cuda.kernels.task import TaskKernel

HALF = """
#ifndef RM_HALF
#define RM_HALF
__device__ __forceinline__ void rm_copy2(unsigned short *to, const unsigned short *from, bool valid) {
  unsigned short v = 0;
  if (valid) v = *from;
  *to = v;
}
__device__ __forceinline__ void rm_copy16(unsigned short *to, const unsigned short *from, bool valid) {
  rm_copy16((unsigned)__cvta_generic_to_shared(to), (const float *)from, valid);
}
// Four (or two) 8 x 8 blocks of float16; lane l of the first 8, 16 or 32 names row l % 8 of block l / 8.
template <bool TURN> __device__ __forceinline__ void rm_blocks4(unsigned (&r)[4], const unsigned short *at) {
  const unsigned s = (unsigned)__cvta_generic_to_shared(at);
  if (TURN)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s));
}
template <bool TURN> __device__ __forceinline__ void rm_blocks2(unsigned (&r)[4], const unsigned short *at) {
  const unsigned s = (unsigned)__cvta_generic_to_shared(at);
  if (TURN)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(s));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(s));
}
__device__ __forceinline__ void rm_mma_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// DA, DB: the operand lies [unit][k], else [k][unit].
template <int FM, int FN, int BK, int PA, int PB, bool DA, bool DB>
__device__ __forceinline__ void rm_multiply_f16(const unsigned short *a, const unsigned short *b, float (&acc)[FM][FN][4]) {
#pragma unroll
  for (int k = 0; k < BK; k += 16) {
    unsigned x[FM][4], y[(FN + 1) / 2][4];
#pragma unroll
    for (int i = 0; i < FM; ++i) rm_blocks4<!DA>(x[i], a + (DA ? k + i * 16 * PA : k * PA + i * 16));
#pragma unroll
    for (int j = 0; j < (FN + 1) / 2; ++j) {
      const unsigned short *const at = b + (DB ? k + j * 16 * PB : k * PB + j * 16);
      if (2 * j + 1 < FN) rm_blocks4<!DB>(y[j], at);
      else rm_blocks2<!DB>(y[j], at);
    }
#pragma unroll
    for (int j = 0; j < FN; ++j)
#pragma unroll
      for (int i = 0; i < FM; ++i) rm_mma_f16(acc[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
  }
}
#endif
"""


def gemm_f16(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled contraction of float16 operands. Unsuited as ``gemm``."""
    product = product_of(operator, binding, "float16")
    shape = shape_of(product.row_count, product.width, dict(operator.config), tensor=True)
    return _Half(product, binding, shape).kernel()


@dataclass
class HalfStage(Stage):
    """As ``Stage``, for 2-byte elements. *Deep* copies are 16 bytes along the reduction and keep that order; elements that
    are not 16 bytes together go through registers, since cp.async copies at least 4."""

    ctype: ClassVar[str] = "unsigned short"
    wide: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deep:
            self.vector = self.wide

    @property
    def pitch(self) -> int:
        """Elements from one row in shared memory to the next."""
        return self.depth.block + self.wide if self.deep else super().pitch

    @property
    def size(self) -> int:
        """Elements of one buffer of the ring."""
        return self.unit * self.pitch if self.deep else super().size

    def _deep(self) -> bool:
        """Whether 8 neighbours along the inner reduction axis are always 16 aligned bytes, valid or not together."""
        o, inner = self.operand, self.depth.inner
        if self.depth.flat or o.steps.get(inner.name, 0) != 1 or inner.extent % self.wide:
            return False
        whole = all(s % self.wide == 0 for a, s in o.steps.items() if a != inner.name)
        return whole and o.aligned and o.constant % self.wide == 0 and not any(inner.name in g.steps for g in o.guards)

    def _words(self) -> int:
        return self.depth.block // self.wide

    def _setup_deep(self, text: Text) -> None:
        n, down, words, step = self.name, self.down, self._words(), self._step()
        thread, below = ("tid", "") if down == 1 else (f"tid / {down}", f" * {down} + tid % {down}")
        text.line(f"const int {n}k = {thread} % {words} * {self.wide};")
        for i in range(-(-self.unit // step)):
            text.line(f"const int {n}j{i} = {thread} / {words}{below} + {i * step};")
            self._element(text, f"{n}j{i}", str(i), [])

    def place(self, row: str, element: str) -> str:
        """Where product ``row`` of element ``element`` lies in shared memory."""
        return f"{element} * {self.pitch} + {row}" if self.deep else super().place(row, element)


class _Half(Tensor):
    """Fragments of ``mma.m16n8k16``; every lane names one row of the blocks that ldmatrix reads."""

    preamble, form, least = PREAMBLE + HALF, "float16", 16

    def stage(self, name: str, operand: Operand, axes: tuple[int, ...], unit: int) -> Stage:
        """How one operand gets into shared memory."""
        return HalfStage(name, self.p, operand, axes, unit, self.depth, self.s.threads, self.pad(unit), self.form)

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
