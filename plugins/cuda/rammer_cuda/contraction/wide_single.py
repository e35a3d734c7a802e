"""Warpgroup products of one for one: ``gemm_wgmma1`` in tf32, where the user allows it, and ``gemm_wgmma_f16``.

The frame is that of ``gemm_wgmma3`` (``contraction.wide``): warpgroups that copy, others that multiply. Constants are rounded and
arranged when a program is loaded, so nothing is left to do with copies that have arrived. Sums stay on the tensor cores
for all of a block's products, as in ``gemm_tf32`` and ``gemm_f16``.

In tf32 the operand that is no constant is rounded on its way to registers (``cvt.rna``). In float16 both operands lie in
shared memory as core matrices, written by copies of 16 bytes, so neither has to be constant: neighbours in those 16 bytes
are either products or rows (columns), and the instruction takes both.
"""

from __future__ import annotations

from rammer.codegen.contraction import Operand, Product, product_of
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.half import HALF
from rammer_cuda.contraction.operand import HALF_CORES, TF32_CORES, Staged
from rammer_cuda.contraction.packing import CORE, DEEP
from rammer_cuda.contraction.wgmma import HALF_DEEP, half_name, half_preamble
from rammer_cuda.contraction.wide import GROUP, THREADS, Warpgroups, Wide, runs_down, wide_shape
from rammer_cuda.kernels.task import TaskKernel


def gemm_wgmma1(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled float32 contraction in tf32 with one constant operand. Unsuited as ``gemm_wgmma3``."""
    product = product_of(operator, binding, prologue=True)
    shape = wide_shape(product.row_count, product.width, dict(operator.config), runs_down(product))
    return _Single(product, binding, shape).kernel()


def gemm_wgmma_f16(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled contraction of float16 operands; ``down`` of its config says that 64 rows, not columns, are a
    warpgroup's. Unsuited as ``gemm``, and where an operand can be copied neither packed nor by 16 bytes."""
    product = product_of(operator, binding, "float16")
    config = dict(operator.config)
    shape = wide_shape(product.row_count, product.width, config, bool(config.get("down", 1)))
    return _SingleHalf(product, binding, shape).kernel()


class _Single(Warpgroups):
    constant, parts, channels = TF32_CORES, 1, 8

    def arrived(self, slot: str) -> list[str]:
        """Nothing: the constant was rounded when it was packed."""
        return []

    def release(self) -> str:
        """The buffer of the block before is free: its products are done."""
        return f"if (i > 0 && tid % 32 == 0) rm_barrier_arrive(empty + 8 * ((i - 1) % {self.s.stages}));"

    def _loop(self) -> None:
        """Wait for the products of the block before, read and round the next, start its products. Reading earlier would gain
        nothing where other warpgroups multiply meanwhile, and is wrong: products in flight read the operand's registers, of
        which ptxas takes no account when it loads the next values (ResNeXt-29 on an H200: an error of 2e-2 for 7e-4).
        """
        text, s, m = self.text, self.s, self.matrix
        text.all(["} else {", "rm_after();"])
        fragments = self.fragments()
        text.all([
            f"unsigned held[{s.bk // DEEP}][4];",
            *self.blocks(), "rm_warpgroup_wait<0>();", self.release(), *fragments.wait, *self.complete(), *fragments.place,
            *fragments.read("held[s][e] = rm_rounded({element});"), "rm_pin(held);", *fragments.leave,
            f"rm_products{self.fixed}(acc[0], held, rm_matrix({m.name}shared + slot * {self.whole}, {self.fixed}));",
            "}", "rm_warpgroup_wait<0>();", "rm_pin(acc[0]);", "}",
        ])  # fmt: skip


class _SingleHalf(_Single):
    constant, least, item = HALF_CORES, HALF_DEEP, 2

    def __init__(self, product: Product, binding: Binding, shape: Wide) -> None:
        if shape.patch:
            raise Unsuited("patches are for operands in registers")
        super().__init__(product, binding, shape)

    def stage(self, name: str, operand: Operand, axes: tuple[int, ...], unit: int) -> Staged:
        """How one operand gets into shared memory."""
        return Staged(name, self.p, operand, axes, unit, self.depth, THREADS, HALF_CORES)

    def products(self) -> str:
        """Device functions: products, and copies of float16."""
        return HALF + half_preamble(self.fixed, self._turned())

    def _turned(self) -> tuple[bool, bool]:
        """Whether rows (columns), not products, are contiguous in a core matrix."""
        return self.read.arrangement == HALF_CORES.along, self.matrix.arrangement == HALF_CORES.along

    def _loop(self) -> None:
        """Start a block's products, and wait for those of the one before."""
        text, s, r, m = self.text, self.s, self.read, self.matrix
        through = s.bm if s.down else s.bn
        call = f"rm_products_{half_name(self.fixed, self._turned())}<{s.bk // HALF_DEEP}, {2 * through}, {2 * self.fixed}>"
        text.all([
            # The zeros have to be in registers before the first products, which the compiler cannot know.
            "} else {", "rm_after();", "rm_pin(acc[0]);",
            *self.blocks(), *self.complete(),
            f"{call}(acc[0],",
            f"  rm_matrix({r.name}shared + slot * {r.size} + tid / {THREADS} * {GROUP * CORE}, {through}),",
            f"  rm_matrix({m.name}shared + slot * {self.whole}, {self.fixed}));",
            "rm_warpgroup_wait<1>();", self.release(),
            "}", "rm_warpgroup_wait<0>();", "rm_pin(acc[0]);", "}",
        ])  # fmt: skip
