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
from rammer_cuda.device import source
from rammer_cuda.kernels.task import TaskKernel

HALF = source("mma_f16")


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
